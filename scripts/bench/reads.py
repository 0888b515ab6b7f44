"""Reads over the channel's data plane against those of a bare engine: the same bytes, in turns.

The plane is polled as the channel's thread polls it, every 0.2 ms. The bare engine is Mooncake's
`transfer_sync_read`, which asks for its state without a rest, or a NIXL agent that is asked so. A
third column has the bare engine polled as the plane is: where there are few cores, to wait without
a rest takes one from those that move the bytes. UCX_TLS=tcp: NIXL without memory of the host.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import (
    MOONCAKE_ENV,
    Check,
    Record,
    Result,
    Samples,
    interleave,
    options,
    ratio,
    repeats,
)  # fmt: skip

from sglang_mixkv.channel.data_plane import DataPlane, Memory, Outcome

TICK_S = 2e-4
SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)
AT_LEAST = 1 << 20  # sizes with a target
TARGET = 1.05
Bare = Callable[[int, bool], None]


def plane_of(backend: str) -> DataPlane:
    if backend == "mooncake":
        from sglang_mixkv.channel.mooncake import Mooncake

        return Mooncake("127.0.0.1")
    from sglang_mixkv.channel.nixl import Nixl

    return Nixl()


def truth(size: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(np.random.default_rng(1).bytes(size), np.uint8)


def engine_of(memory: np.ndarray[Any, Any]) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
    return engine


def agent_of(memory: np.ndarray[Any, Any]) -> Any:
    """With a progress thread that waits, as the plane's does."""
    from sglang_mixkv.channel.nixl import WAIT_US, _new_agent

    agent = _new_agent(WAIT_US)
    agent.create_backend("UCX", {})
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent


def serve(pipe: Any, backend: str, size: int = max(SIZES)) -> None:
    """So many bytes, for a plane and a bare engine, as long as the parent lives."""
    parent = os.getppid()
    memory, plane = truth(size).copy(), plane_of(backend)
    plane.register(Memory(memory.ctypes.data, memory.nbytes))
    if backend == "mooncake":
        bare = engine_of(memory)
        name = f"127.0.0.1:{bare.get_rpc_port()}"
    else:
        bare = agent_of(memory)
        name = bare.get_agent_metadata()
    pipe.send((plane.endpoint, name, memory.ctypes.data))
    while os.getppid() == parent:
        time.sleep(1)


def mooncake_reads(memory: np.ndarray[Any, Any], name: str, remote: int) -> Bare:
    engine, local = engine_of(memory), memory.ctypes.data

    def read(size: int, rests: bool) -> None:
        if not rests:
            assert engine.transfer_sync_read(name, local, remote, size) == 0
            return
        number = engine.batch_transfer_async_read(name, [local], [remote], [size])
        while (state := engine.transfer_check_status(number)) == 0:
            time.sleep(TICK_S)
        assert state == 1

    return read


def nixl_reads(memory: np.ndarray[Any, Any], metadata: bytes, remote: int) -> Bare:
    agent, local = agent_of(memory), memory.ctypes.data
    name = agent.add_remote_agent(metadata).decode()

    def read(size: int, rests: bool) -> None:
        here = agent.get_xfer_descs([(local, size, 0)], "DRAM")
        there = agent.get_xfer_descs([(remote, size, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", here, there, name)
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(TICK_S if rests else 0)
            state = agent.check_xfer_state(handle)
        assert state == "DONE"
        agent.release_xfer_handle(handle)

    return read


BARE = {"mooncake": mooncake_reads, "nixl": nixl_reads}


def measure(backend: str, count: int) -> list[Record]:
    mine, theirs = mp.Pipe()
    process = mp.Process(target=serve, args=(theirs, backend), daemon=True)
    process.start()
    endpoint, name, remote = mine.recv()
    memory, expected = np.zeros(max(SIZES), np.uint8), truth(max(SIZES))
    plane = plane_of(backend)
    plane.register(Memory(memory.ctypes.data, memory.nbytes), spare=memory.ctypes.data)
    peer = plane.connect(endpoint)
    bare = BARE[backend](memory, name, remote)

    def over_plane(size: int) -> None:
        read = plane.start(peer, memory.ctypes.data, remote, size)
        while (outcome := plane.outcome(read)) is None:
            time.sleep(TICK_S)
        assert outcome is Outcome.DONE

    def timed(read: Callable[[int], None], size: int) -> Callable[[Samples], None]:
        def once(samples: Samples) -> None:
            memory[:size] = 0
            start = time.perf_counter()
            read(size)
            samples.add(time.perf_counter() - start)
            assert (memory[:size] == expected[:size]).all()

        return once

    methods = {
        "plane": over_plane,
        "bare": lambda size: bare(size, False),
        "polled": lambda size: bare(size, True),
    }
    records = [of_size(backend, size, methods, timed, count) for size in SIZES]
    plane.close()
    process.kill()
    process.join()
    return records


def of_size(
    backend: str, size: int, methods: dict[str, Any], timed: Callable[..., Any], count: int
) -> Record:
    turns = {name: timed(read, size) for name, read in methods.items()}
    interleave(turns, 3)
    samples = interleave(turns, count)
    medians = {f"{name}_ms": taken.record()["median"] * 1e3 for name, taken in samples.items()}
    ratios = {
        f"ratio_to_{name}": ratio(samples["plane"], samples[name]) for name in ("bare", "polled")
    }
    return {"backend": backend, "KiB": size >> 10, **medians, **ratios, "samples": count}


def checks(records: list[Record]) -> list[Check]:
    return [
        Check(f"{r['backend']}: {r['KiB']} KiB over the plane, to a bare read", TARGET,
              r["ratio_to_bare"])
        for r in records if r["KiB"] << 10 >= AT_LEAST
    ]  # fmt: skip


def main() -> None:
    parser = options((__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=("mooncake", "nixl"), action="append")
    arguments = parser.parse_args()
    os.environ.update({**MOONCAKE_ENV, "NIXL_LOG_LEVEL": "ERROR"})
    result = Result("reads", arguments.quick, {"reads": []})
    for backend in arguments.backend or ("mooncake", "nixl"):
        result.parts["reads"] += measure(backend, repeats(arguments, 41))
    result.checks = checks(result.parts["reads"])
    result.finish(arguments)


if __name__ == "__main__":
    main()
