"""What the benchmark moves bytes with, by transfer backend: engines with one call surface, and the
product's transport over them, timed.

    engine.session      its name for a sender
    engine.hello        what a sender needs besides, in order to write to it
    engine.meet(hello)  on a sender
    engine.batch_register, batch_transfer_sync    as Mooncake's

`wire`: seconds spent in waiting for writes; `descriptors` counts their ranges. `most`: ranges of
one call.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from typing import Any

import numpy as np

from sglang_mixkv.kv.ranges import Blocks
from sglang_mixkv.transport import mooncake, nixl
from sglang_mixkv.transport.mooncake import Engines, InFlight, Mooncake, SharedEngine
from sglang_mixkv.transport.nixl import Memory, Nixl

HOST = Memory("DRAM", 0)


class Counted:
    """An engine that counts."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.wire, self.descriptors = 0.0, 0

    def took(self, start: float, ranges: int) -> None:
        self.wire += time.perf_counter() - start
        self.descriptors += ranges


class MooncakeEngine(Counted):
    """A Mooncake engine with what is used of SGLang's MooncakeTransferEngine."""

    hello, most = b"", mooncake.WAITED_FOR

    def __init__(self) -> None:
        from mooncake.engine import TransferEngine

        super().__init__()
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake could not be initialised")
        self.session = f"127.0.0.1:{self.engine.get_rpc_port()}"

    def meet(self, hello: bytes) -> None:
        """Mooncake asks the peer itself."""

    def batch_register(self, addresses: list[int], lengths: list[int]) -> int:
        return int(self.engine.batch_register_memory(addresses, lengths))

    def batch_transfer_sync(
        self, session: str, src: list[int], dst: list[int], lengths: list[int]
    ) -> int:
        start = time.perf_counter()
        code = int(self.engine.batch_transfer_sync_write(session, src, dst, lengths))
        self.took(start, len(lengths))
        return code


class NixlEngine(Counted):
    """A NIXL agent as SGLang makes it for a prefill rank, with its environment variable for more
    threads or fewer. `memory`: what is registered; `peer_device`: that of the peers' memory, of
    the same kind."""

    most = 1 << 30
    threads = 8

    def __init__(self, memory: Memory = HOST, peer_device: int = 0) -> None:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        super().__init__()
        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = nixl_agent_config(backends=[], num_threads=self.threads, sync_mode=strict)
        self.agent = nixl_agent(str(uuid.uuid4()), config)
        of_backend = {"num_threads": str(self.threads)} if self.threads else {}
        asked = os.environ.get("SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS", "{}")
        self.agent.create_backend("UCX", {**of_backend, **json.loads(asked)})
        self.session = self.agent.name
        self.memory, self.peer_device = memory, peer_device
        self.transport = Nixl(self.agent, memory, lambda _: self.peer_device)

    @property
    def hello(self) -> bytes:
        """Of all memory that is registered now."""
        return bytes(self.agent.get_agent_metadata())

    def meet(self, hello: bytes) -> None:
        self.agent.add_remote_agent(hello)

    def batch_register(self, addresses: list[int], lengths: list[int]) -> int:
        device = self.memory.device
        regions = [(a, n, device, "") for a, n in zip(addresses, lengths, strict=True)]
        self.agent.register_memory(regions, self.memory.kind)
        return 0

    def batch_transfer_sync(
        self, session: str, src: list[int], dst: list[int], lengths: list[int]
    ) -> int:
        start = time.perf_counter()
        blocks = Blocks(*(np.array(column, np.int64) for column in (src, dst, lengths)))
        code = self.transport.wait(self.transport.write(session, blocks))
        self.took(start, len(lengths))
        return code


class ListeningNixlEngine(NixlEngine):
    """As SGLang makes it for a decode rank."""

    threads = 0


class Listening:
    """The engines of one rank as the one that memory is registered with."""

    def __init__(self, engines: list[Any]) -> None:
        self._engines = engines

    def batch_register(self, addresses: list[int], lengths: list[int]) -> int:
        codes = [engine.batch_register(addresses, lengths) for engine in self._engines]
        return next((code for code in codes if code), 0)


class ListeningNixl:
    """The product's transport of a decode rank, which registers and knows what ranges cost."""

    limits = Nixl.limits

    def __init__(self, listening: Listening) -> None:
        self._listening = listening

    def register(self, address: int, size: int) -> None:
        self._listening.batch_register([address], [size])


class TimedMooncake(Mooncake):
    """The product's transport. Its engine times what is waited for at once; asynchronous writes
    count with the wire too, while they begin and while they are waited for."""

    def write(self, session: str, blocks: Blocks, *, overlap: bool = False) -> Any:
        start = time.perf_counter()
        handle = super().write(session, blocks, overlap=overlap)
        if isinstance(handle, mooncake.Begun):
            self.engine.took(start, len(handle.numbers))
        return handle

    def wait(self, handle: Any) -> int:
        start = time.perf_counter()
        code = super().wait(handle)
        if isinstance(handle, mooncake.Begun):
            self.engine.took(start, 0)
        return code


class TimedNixl(Nixl):
    """The product's transport, timed while writes are posted and while they are waited for."""

    def __init__(self, engine: NixlEngine) -> None:
        super().__init__(engine.agent, engine.memory, lambda _: engine.peer_device)
        self.engine = engine

    def write(self, session: str, blocks: Blocks, *, overlap: bool = False) -> Any:
        start = time.perf_counter()
        handle = super().write(session, blocks, overlap=overlap)
        self.engine.took(start, len(blocks.length))
        return handle

    def wait(self, handle: nixl.Ended | nixl.Begun) -> int:
        start = time.perf_counter()
        code = super().wait(handle)
        self.engine.took(start, 0)
        return code


ENGINES = {"mooncake": MooncakeEngine, "nixl": NixlEngine}
LISTENING = {"mooncake": MooncakeEngine, "nixl": ListeningNixlEngine}


def sending(engine: Any) -> tuple[Any, Any]:
    """The product's transport over a sender's engine, and the engine as SGLang's own code sees it;
    None where that does not go through an engine."""
    if isinstance(engine, NixlEngine):
        return TimedNixl(engine), None
    engines, in_flight = Engines(engine, MooncakeEngine), InFlight()
    transport = TimedMooncake(engines, in_flight)
    return transport, SharedEngine(engines, transport, in_flight)


def receiving(backend: str, engines: list[Any]) -> Any:
    """The product's transport over a receiver's engines."""
    listening = Listening(engines)
    if backend == "nixl":
        return ListeningNixl(listening)
    return Mooncake(Engines(listening, MooncakeEngine), None)
