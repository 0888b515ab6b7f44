"""Slots are read by another process, over the product's data plane of Mooncake or NIXL.

A turn is a request through the channel, from OPEN to the last row in its place. A bare read is one
of as many bytes, by the same engine. Half of the heads are wanted; every byte is compared, and, as
the control, the rows are zeros before. The processes talk over a pipe, or over a connection to one
that listens; who reaches its port can start a process there, so listen between hosts of your own.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rig.threads import Decode, Prefill

from sglang_mixkv.channel.data_plane import Extent
from sglang_mixkv.draft.facts import StagingFacts
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.rows import DraftRows

from .copies import TIMES, fetch, given, serve
from .pools import DFLASH, DTYPES, HEAD, pages_of, pool, rows_of, settle, wrong_bytes

PAGE, HEADS, WANTED = 64, range(DFLASH.heads), range(4, 8)
MIB, TURNS = {"cuda": 192, "cpu": 2}, {"cuda": 9, "cpu": 1}
INFINIBAND = Path("/sys/class/infiniband")
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def side(there: Connection, asked: Any, entries: list[torch.Tensor], heads: range) -> Any:
    """Rows, slots and data plane, and this process's address."""
    _, backend, _, _ = asked
    with socket.socket(fileno=os.dup(there.fileno())) as end:
        host = "127.0.0.1" if end.family == socket.AF_UNIX else str(end.getsockname()[0])
    if backend == "mooncake":
        from sglang_mixkv.channel.mooncake import Mooncake

        plane: Any = Mooncake(host)
    else:
        from sglang_mixkv.channel.nixl import Nixl

        plane = Nixl()
    return given(DraftRows(entries, heads), PAGE, [], plane), host


def truth(asked: Any, device: torch.device) -> list[torch.Tensor]:
    """It is drawn on the host, so that both sides have the same whatever their GPUs."""
    _, _, dtype, tokens = asked
    return [e.to(device) for e in pool(DFLASH.layers, DFLASH.heads, tokens, dtype, "cpu")]


# ---------------------------------------------------------------- the process that packs


def pack(there: Connection, gpu: int) -> None:
    """Requests, until the other side ends."""
    asked = decode(there.recv_bytes())
    device = torch.device(asked[0], *[gpu] * (asked[0] == "cuda"))
    made, host = side(there, asked, truth(asked, device), HEADS)
    prefill, tokens = Prefill(TIMES, host=host, **made), asked[3]
    there.send_bytes(encode((prefill.row.instance, prefill.row.address, prefill.row.staging)))
    try:
        while room := decode(there.recv_bytes()):
            serve(prefill, room, tokens, Pages(pages_of(tokens, PAGE), PAGE))
            there.send_bytes(encode(prefill.notes.copying))
    finally:
        os._exit(0)  # whatever an engine's threads do


def start(there: Connection, gpu: int) -> Any:
    """A process for this connection, which is the caller's no more."""
    process = mp.get_context("spawn").Process(target=pack, args=(there, gpu), daemon=True)
    process.start()
    there.close()
    return process


def listen(address: str, gpu: int) -> None:
    host, _, port = address.rpartition(":")
    with Listener((host, int(port))) as listener:
        print(f"listening on {address}", flush=True)
        while True:
            start(listener.accept(), gpu)


# ---------------------------------------------------------------- the process that reads


@contextmanager
def other_side(config: pytest.Config) -> Iterator[Connection]:
    if peer := config.getoption("--peer", None):
        host, _, port = peer.rpartition(":")
        with Client((host, int(port))) as there:
            yield there
        return
    mine, theirs = mp.Pipe()
    process = start(theirs, config.getoption("--peer-gpu", 0))
    try:
        yield mine
    finally:
        process.kill()
        process.join()


def rdma_bytes() -> int:
    """What all devices have received: the kernel counts words of four bytes."""
    counters = INFINIBAND.glob("*/ports/*/counters/port_rcv_data")
    return 4 * sum(int(counter.read_text()) for counter in counters)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
def test_slots_are_read_by_another_process(
    device: torch.device, backend: str, dtype: str, pytestconfig: pytest.Config,
    figures: Callable[..., None], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    module = pytest.importorskip({"mooncake": "mooncake.engine", "nixl": "nixl._api"}[backend])
    if device.type == "cuda" and not getattr(module, "SUPPORT_CUDA", True):
        pytest.skip("this Mooncake is built without CUDA")
    monkeypatch.setenv("MC_LOG_LEVEL", "ERROR")
    if not INFINIBAND.is_dir():
        monkeypatch.setenv("MC_FORCE_TCP", "1")
    per_token = 2 * DFLASH.layers * len(WANTED) * HEAD * DTYPES[dtype].itemsize
    tokens = (MIB[device.type] << 20) // per_token // PAGE * PAGE
    size, asked = tokens * per_token, (device.type, backend, dtype, tokens)
    places = torch.from_numpy(rows_of(tokens, PAGE)).to(device)
    right = [entry[places][:, WANTED.start :].contiguous() for entry in truth(asked, device)]
    found, taken, packing = [torch.zeros_like(entry) for entry in right], [], 0.0
    before, received = wrong_bytes(found, right), rdma_bytes()
    with other_side(pytestconfig) as there:
        made, _ = side(there, asked, found, WANTED)
        reader, staging = Decode(TIMES, **made), made["staging"]
        there.send_bytes(encode(asked))
        instance, address, facts = decode(there.recv_bytes(), type=tuple[bytes, str, StagingFacts])
        row: Any = SimpleNamespace(instance=instance, address=address, staging=facts)
        reader.reach(row)
        for room in range(1, TURNS[device.type] + 2):
            for entry in found:
                entry.zero_()
            settle()
            there.send_bytes(encode(room))
            begin = time.perf_counter()
            fetch(reader, row, HEADS, room, tokens, PAGE)
            middle, length = time.perf_counter(), min(size, staging.size)
            packing = decode(there.recv_bytes())
            assert wrong_bytes(found, right) == 0
            peer, again = reader.plane.connect(facts.endpoint), time.perf_counter()
            whole_slots = [Extent(staging.address, facts.base, length)]
            reader.plane.start("bare", peer, whole_slots)
            while not (ended := reader.plane.ended()):
                time.sleep(0)
            assert ended == [("bare", "")]
            bare = (time.perf_counter() - again) * size / length
            taken.append((middle - begin, bare))
        reader.close()
    whole, bare = np.median(taken[1:], axis=0).tolist()  # memory and connections are new at first
    figures(
        bytes=size, wrong_before=before, request_ms=whole * 1e3, bare_read_ms=bare * 1e3,
        times=whole / bare, bare_gb_s=size / bare / 1e9, pack_ms=packing / len(taken) * 1e3,
        unpack_ms=reader.notes.copying / len(taken) * 1e3,
        rdma_mib=(rdma_bytes() - received) / 2 / len(taken) / 2**20,
    )  # fmt: skip
    assert before > size // 2, "nothing was shown: the bytes were there before"


def test_another_host_packs(tmp_path: Path) -> None:
    """--listen and --peer, and the file of --figures."""
    pytest.importorskip("mooncake.engine")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "pytest", Path(__file__).parent]
    env = {**os.environ, "MC_FORCE_TCP": "1"}
    one = subprocess.Popen(
        [*command, "--listen", address], env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        assert one.stdout is not None
        assert any("listening on" in line for line in one.stdout)
        chosen = ["-k", "cpu-mooncake-bf16", "--peer", address, "--figures", tmp_path / "f.json"]
        subprocess.run([*command, *chosen], env=env, timeout=300, check=True)
    finally:
        one.terminate()  # a background job may ignore SIGINT
        one.communicate(timeout=30)
    (record,) = json.loads((tmp_path / "f.json").read_text())["figures"]
    assert record["wrong_before"] > record["bytes"] // 2
