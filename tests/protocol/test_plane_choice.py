"""Which data plane a rank takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_mixkv import config
from sglang_mixkv.channel import mooncake, nixl, planes
from sglang_mixkv.errors import MixKVError

pytestmark = pytest.mark.mooncake_only


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What is taken with such a backend and devices, without making an engine."""
    monkeypatch.setattr(nixl, "Nixl", lambda *_: "nixl")
    monkeypatch.setattr(mooncake, "Mooncake", lambda *_: "mooncake")

    def take(backend: str, devices: tuple[str, ...] = (), asked: str = "") -> object:
        for device in devices:
            (tmp_path / device).mkdir()
        monkeypatch.setattr(planes, "RDMA_DEVICES", str(tmp_path))
        return planes.make(planes.choose(backend, asked).name, "127.0.0.1", "", {})

    return take


def test_a_reader_over_ucx_without_rdma_could_end_its_peer(taken: Any) -> None:
    """tests/protocol/test_data_planes.py test_a_reader_that_dies_leaves_its_peer_alone"""
    assert taken("nixl") == "mooncake"


def test_with_rdma_each_backend_has_its_own(taken: Any) -> None:
    assert taken("nixl", ("mlx5_0",)) == "nixl"
    assert taken("mooncake") == "mooncake"


def test_another_nixl_backend_is_not_ucx(taken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_NIXL_BACKEND", "LIBFABRIC")
    assert taken("nixl") == "nixl"


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_the_operator_may_choose(taken: Any, name: str) -> None:
    assert taken("nixl", asked=name) == name


def test_without_mooncake_it_does_not_start(taken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ImportError("No module named 'mooncake'")

    monkeypatch.setattr(mooncake, "Mooncake", missing)
    with pytest.raises(MixKVError, match=r"MIXKV-START-06.*SGLANG_MIXKV_DATA_PLANE=nixl"):
        taken("nixl")


def test_nixls_backend_is_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.environ import envs

    for name in (planes.NIXL_ENV, config.NIXL_PARAMS_ENV, "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    stock = envs.SGLANG_DISAGGREGATION_NIXL_BACKEND.get()
    assert planes.nixl_backend("", {}) == (stock, {})
    params = envs.SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS.get()
    assert json.loads(params) == config.resolve(None, {}).nixl_params
    found = planes.nixl_backend("mlx5_0", {"num_threads": "4"})
    assert found == ("UCX", {"device_list": "mlx5_0", "num_threads": "4"})
