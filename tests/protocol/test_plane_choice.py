"""Test the choice of a rank's data plane."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_mixkv import config
from sglang_mixkv.channel import mooncake, nixl, planes
from sglang_mixkv.engine import gpu
from sglang_mixkv.errors import MixKVError


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that returns the name of the data plane chosen for a backend and devices,
    without making an engine."""
    monkeypatch.setattr(nixl, "Nixl", lambda *_: "nixl")
    monkeypatch.setattr(mooncake, "Mooncake", lambda *_: "mooncake")

    def take(backend: str, devices: tuple[str, ...] | None = (), asked: str = "") -> object:
        for device in devices or ():
            (tmp_path / device).mkdir()
        folder = tmp_path if devices is not None else tmp_path / "none"
        monkeypatch.setattr(planes, "RDMA_DEVICES", str(folder))
        return planes.make(planes.choose(backend, asked).name, "127.0.0.1", "", {})

    return take


@pytest.mark.parametrize(
    ("backend", "devices", "asked", "plane"),
    [
        ("mooncake", (), "", "mooncake"),
        # Over UCX's TCP, a reader that dies can crash its peer.
        ("nixl", (), "", "mooncake"),
        ("nixl", None, "", "mooncake"),
        ("nixl", ("mlx5_0",), "", "nixl"),
        ("nixl", (), "nixl", "nixl"),
        ("nixl", ("mlx5_0",), "mooncake", "mooncake"),
    ],
)
def test_the_data_plane_follows_the_backend_or_the_operator(
    taken: Any, backend: str, devices: tuple[str, ...], asked: str, plane: str
) -> None:
    assert taken(backend, devices, asked) == plane


def test_a_nixl_backend_other_than_ucx_needs_no_rdma(
    taken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_NIXL_BACKEND", "LIBFABRIC")
    assert taken("nixl") == "nixl"


def test_nixl_without_rdma_or_mooncake_is_refused(
    taken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise ImportError("No module named 'mooncake'")

    monkeypatch.setattr(mooncake, "Mooncake", missing)
    with pytest.raises(MixKVError, match=r"MIXKV-START-06.*SGLANG_MIXKV_DATA_PLANE=nixl"):
        taken("nixl")


def test_nixls_backend_and_parameters_are_sglangs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.environ import envs

    for name in (planes.NIXL_ENV, f"{planes.NIXL_ENV}_PARAMS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    stock = envs.SGLANG_DISAGGREGATION_NIXL_BACKEND.get()
    assert planes.nixl_backend("", {}) == (stock, {})
    params = envs.SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS.get()
    assert json.loads(params) == config.resolve(None, {}).nixl_params
    of_operator = {"num_threads": "4"}
    found = planes.nixl_backend("mlx5_0", of_operator)
    assert found == ("UCX", {"device_list": "mlx5_0", "num_threads": "4"})
    assert of_operator == {"num_threads": "4"}, "a second plane gets the same parameters"
    # Both may name the devices, if they agree. NIXL's parser needs the spaces that SGLang adds.
    found = planes.nixl_backend("mlx5_2,mlx5_3", {"device_list": "mlx5_2,mlx5_3"})
    assert found == ("UCX", {"device_list": "mlx5_2, mlx5_3"})


DEVICES = json.dumps({"0": "mlx5_0", "1": "mlx5_2,mlx5_3"})


@pytest.mark.parametrize("given", [None, "mlx5_0,mlx5_1", DEVICES])
@pytest.mark.parametrize(
    "environ", [{}, {"MOONCAKE_PROTOCOL": "efa"}, {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp"}]
)
def test_mooncake_starts_as_sglangs_own_engine_does(
    environ: dict[str, str], given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both engines of a rank get the same transport and RDMA devices."""
    from sglang.srt.distributed.device_communicators import mooncake_transfer_engine as theirs

    for name in ("MC_FORCE_TCP", "MOONCAKE_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    started = list[tuple[Any, ...]]()

    class Engine:
        def initialize(self, *args: Any) -> int:
            started.append(args)
            return 0

        def get_rpc_port(self) -> int:
            return 7

    monkeypatch.setattr("mooncake.engine.TransferEngine", Engine)
    theirs.MooncakeTransferEngine("10.0.0.1", 1, given)
    devices = gpu.rdma_devices(SimpleNamespace(ib_device=given, gpu_id=1))
    planes.make("mooncake", "10.0.0.1", devices, {})
    planes.make("mooncake", "10.0.0.1", "mlx5_9", {})  # as `doctor` does with any devices
    assert started[0] == started[1]
    assert started[2][3] == ("" if "MC_FORCE_TCP" in environ else "mlx5_9")
