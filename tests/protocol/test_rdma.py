"""Which transport Mooncake uses: TCP's limits hold unless it is certainly RDMA, and only then."""

from __future__ import annotations

import importlib
import json
import multiprocessing as mp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rig.model import Case, Request
from rig.rank import Rank
from rig.ring import run

from sglang_mixkv.engine import rdma as module
from sglang_mixkv.transport.mooncake import SharedEngine

NICS = {"cpu:0": [["mlx5_0"], ["mlx5_1"]], "cuda:0": [[], ["mlx5_1"]]}
NO_NICS: dict[str, list[list[str]]] = {"cpu:0": [[], []]}


def fake(topology: Any, asked: list[str]) -> Any:
    def get_local_topology(devices: str) -> str:
        asked.append(devices)
        return topology if isinstance(topology, str) else json.dumps(topology)

    return SimpleNamespace(
        ib_device="mlx5_0", engine=SimpleNamespace(get_local_topology=get_local_topology)
    )


@pytest.fixture
def rdma_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A host on which nothing speaks against RDMA."""
    for name in (*module.OTHERWISE, "MOONCAKE_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(module, "DEVICES", tmp_path)
    monkeypatch.setattr(importlib.import_module("mooncake.engine"), "SUPPORT_EFA", False)
    return monkeypatch


def bounded(topology: Any = NICS) -> bool:
    return not module.over_rdma(fake(topology, []))


def test_rdma_has_no_limits_of_tcp(rdma_host: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    engine = fake(NICS, asked)
    assert module.over_rdma(engine)
    assert asked == ["mlx5_0"], "with the devices that this engine may use"


@pytest.mark.parametrize("value", ["1", "true", "yes", "0", ""])
@pytest.mark.parametrize("name", module.OTHERWISE)
def test_another_transport_is_bounded(rdma_host: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Mooncake asks whether MC_FORCE_TCP is set, not to what."""
    rdma_host.setenv(name, value)
    assert bounded()


@pytest.mark.parametrize("topology", [NO_NICS, {}, "no JSON", '{"nics": 1}'])
def test_a_host_without_a_usable_device_is_bounded(
    rdma_host: pytest.MonkeyPatch, topology: Any
) -> None:
    """A device in /sys whose driver this container lacks; an answer that nobody knows."""
    assert bounded(topology)


def test_a_host_without_devices_is_not_asked_for_them(
    rdma_host: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mlx5_0").rmdir()
    asked: list[str] = []
    assert not module.over_rdma(fake(NICS, asked))
    assert asked == []


@pytest.mark.parametrize(
    ("for_efa", "protocol", "limits"),
    [
        (False, "rdma", False), (False, "tcp", True), (False, "efa", True),
        (True, "efa", False), (True, "rdma", True), (None, "rdma", True),
    ],
)  # fmt: skip
def test_the_protocol_and_the_build(
    rdma_host: pytest.MonkeyPatch, for_efa: bool | None, protocol: str, limits: bool
) -> None:
    """A build for EFA takes TCP for every other protocol; an old one does not say what it is."""
    mooncake = importlib.import_module("mooncake.engine")
    if for_efa is None:
        rdma_host.delattr(mooncake, "SUPPORT_EFA")
    else:
        rdma_host.setattr(mooncake, "SUPPORT_EFA", for_efa)
    rdma_host.setenv("MOONCAKE_PROTOCOL", protocol)
    assert bounded() == limits


@pytest.mark.parametrize(("most", "calls"), [(0, 1), (200, 2)])
def test_over_rdma_a_chunk_is_one_call(
    monkeypatch: pytest.MonkeyPatch, most: int, calls: int
) -> None:
    """400 scattered pages of one token: 1,600 ranges, more than a call over TCP has.
    SGLang's own limit of pages in a call holds for peers with a plan, too."""
    written = mp.get_context("fork").Array("i", 16)

    def count(rank: Rank) -> None:
        assert not isinstance(rank.manager.engine, SharedEngine)
        engine = rank.plugin.transport.engine
        real = engine.batch_transfer_sync

        def counted(session: str, *ranges: Any) -> int:
            written[sum(map(bool, written))] = len(ranges[0])
            return int(real(session, *ranges))

        engine.batch_transfer_sync = counted

    monkeypatch.setattr("sglang_mixkv.engine.mooncake.over_rdma", lambda _: True)
    monkeypatch.setenv("SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES", str(most))
    extra = {"config": {"draft_transfer": "direct"}, "faults": {("prefill", 0): count}}
    outcome = run(Case(2, 1, page_size=1, requests=(Request(400),), extra=extra))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
    *chunk, aux = filter(None, written)
    assert len(chunk) == calls
    assert sum(chunk) > 1000
    assert aux == 10
