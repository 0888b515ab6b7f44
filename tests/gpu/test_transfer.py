"""Another process reads slots correctly over the plugin's data planes, Mooncake and NIXL.

The time of a request is measured from its OPEN to its last unpacked row. A bare read is a read of
the same number of bytes by the same engine. Half of the heads are moved, and every byte is
compared. As a control, the rows are zero before a transfer. `doctor --listen` and `--peer` test
reads between two hosts.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rig.channel.threads import Decode, Prefill

from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.rows import DraftRows

from .copies import TIMES, fetch, given, serve
from .pools import DFLASH, DTYPES, HEAD, pages_of, pool, rows_of, settle, wrong_bytes

PAGE, HEADS, WANTED = 64, range(DFLASH.heads), range(4, 8)
HOST = "127.0.0.1"
MIB, TURNS = {"cuda": 192, "cpu": 2}, {"cuda": 9, "cpu": 1}
INFINIBAND = Path("/sys/class/infiniband")


def side(backend: str, entries: list[torch.Tensor], heads: range) -> dict[str, Any]:
    """Return one side's rows, slots and data plane."""
    if backend == "mooncake":
        from sglang_mixkv.channel.mooncake import Mooncake

        plane: Any = Mooncake(HOST)
    else:
        from sglang_mixkv.channel.nixl import Nixl

        plane = Nixl()
    return given(DraftRows(entries, heads), PAGE, [], plane)


def truth(dtype: str, tokens: int, device: torch.device) -> list[torch.Tensor]:
    """Return the expected rows. The rows are drawn on the host, so that both sides get the same
    rows on any GPUs."""
    return [e.to(device) for e in pool(DFLASH.layers, DFLASH.heads, tokens, dtype, "cpu")]


def pack(there: Connection, device: torch.device, backend: str, dtype: str, tokens: int) -> None:
    """Run prefill's process, which packs requests until the other side ends."""
    prefill = Prefill(TIMES, **side(backend, truth(dtype, tokens, device), HEADS))
    there.send((prefill.row.instance, prefill.row.address, prefill.row.staging))
    try:
        while room := there.recv():
            serve(prefill, room, tokens, Pages(pages_of(tokens, PAGE), PAGE))
            there.send(prefill.notes.copying)
    finally:
        os._exit(0)  # without waiting for the engine's threads


def rdma_bytes() -> int:
    """Return the bytes received by all devices. The kernel counts 4-byte words."""
    counters = INFINIBAND.glob("*/ports/*/counters/port_rcv_data")
    return 4 * sum(int(counter.read_text()) for counter in counters)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
def test_slots_are_read_by_another_process(
    device: torch.device, backend: str, dtype: str, pytestconfig: pytest.Config,
    figures: Callable[..., None], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    needed = {"mooncake": "mooncake.engine", "nixl": "nixl._api"}[backend]
    module = pytest.importorskip(needed, exc_type=ImportError)  # a library may be missing
    if device.type == "cuda" and not getattr(module, "SUPPORT_CUDA", True):
        pytest.skip("this Mooncake is built without CUDA")
    monkeypatch.setenv("MC_LOG_LEVEL", "ERROR")
    if not INFINIBAND.is_dir():
        monkeypatch.setenv("MC_FORCE_TCP", "1")
    per_token = 2 * DFLASH.layers * len(WANTED) * HEAD * DTYPES[dtype].itemsize
    tokens = (MIB[device.type] << 20) // per_token // PAGE * PAGE
    size = tokens * per_token
    places = torch.from_numpy(rows_of(tokens, PAGE)).to(device)
    right = [
        entry[places][:, WANTED.start :].contiguous() for entry in truth(dtype, tokens, device)
    ]
    found, taken, packing = [torch.zeros_like(entry) for entry in right], [], 0.0
    before, received = wrong_bytes(found, right), rdma_bytes()
    card = torch.device("cuda", pytestconfig.getoption("--peer-gpu", 0))
    there, theirs = mp.Pipe()
    asked = card if device.type == "cuda" else device, backend, dtype, tokens
    process = mp.get_context("spawn").Process(target=pack, args=(theirs, *asked), daemon=True)
    process.start()
    theirs.close()
    try:
        made = side(backend, found, WANTED)
        reader, staging = Decode(TIMES, **made), made["staging"]
        instance, address, facts = there.recv()
        row: Any = SimpleNamespace(instance=instance, address=address, staging=facts)
        reader.reach(row)
        for room in range(1, TURNS[device.type] + 2):
            for entry in found:
                entry.zero_()
            settle()
            there.send(room)
            begin = time.perf_counter()
            fetch(reader, row, HEADS, room, tokens, PAGE)
            middle, length = time.perf_counter(), min(size, staging.size)
            packing = there.recv()
            assert wrong_bytes(found, right) == 0
            peer, again = reader.plane.connect(facts.endpoint), time.perf_counter()
            whole_slots = [(staging.address, facts.base, length)]
            reader.plane.start("bare", peer, whole_slots)
            while not (ended := reader.plane.ended()):
                time.sleep(0)
            assert ended == [("bare", "")]
            bare = (time.perf_counter() - again) * size / length
            taken.append((middle - begin, bare))
        reader.close()
    finally:
        process.kill()
        process.join()
    whole, bare = np.median(taken[1:], axis=0).tolist()  # the first turn includes set-up
    figures(
        bytes=size, wrong_before=before, request_ms=whole * 1e3, bare_read_ms=bare * 1e3,
        times=whole / bare, bare_gb_s=size / bare / 1e9, pack_ms=packing / len(taken) * 1e3,
        unpack_ms=reader.notes.copying / len(taken) * 1e3,
        rdma_mib=(rdma_bytes() - received) / 2 / len(taken) / 2**20,
    )  # fmt: skip
    assert before > size // 2, "the bytes were correct before the transfer"
