"""A schedule as plain values: a world can be rebuilt from it, and it can be cut down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.faults import Fault

Where = tuple[int, int]  # server, and a rank of it


@dataclass(frozen=True)
class Server:
    """`tokens`: how many fit a slot, with all heads of a rank. `patience`: multiplies its times.
    `device`: its pools are on GPUs."""

    number: int
    side: str
    tp: int
    slots: int
    tokens: int
    page: int
    patience: float = 1.0
    device: bool = False


@dataclass(frozen=True)
class Chunk:
    """`pending`: it is handed over when its forward is launched, not when that has ended."""

    count: int
    pending: bool
    seconds: float


@dataclass(frozen=True)
class Request:
    """`number`: SGLang's. `after`: the request that had this number before; -1 for none.

    `optimistic`: the forward does not wait for decode. `forward`: for how long an earlier one still
    writes to decode's pages. `abort`: which side, when, and whether the other is told. `late`: it
    comes long after all faults. `name`: the one of its prefill server's names by which it is
    addressed."""

    id: int
    number: int
    prefill: int
    decode: int
    arrival: float
    prompt: int
    first_token: int
    chunks: tuple[Chunk, ...]
    prefill_delay: float = 0.0
    decode_delay: float = 0.0
    optimistic: bool = False
    target: float = 0.01
    forward: float = 0.0
    abort: tuple[str, float, bool] | None = None
    after: int = -1
    late: bool = False
    name: bytes = b""

    @property
    def holds_slots(self) -> bool:
        """True if it waits so long for an earlier forward that others wait for its slots."""
        return self.forward > 0.1


@dataclass(frozen=True)
class Spec:
    """`copying`: the longest time of a copy. `copiers`: how many copies a rank makes in parallel.
    `gathers`: how often a look takes more than one event before it asks for actions."""

    seed: int
    heads: int
    servers: tuple[Server, ...]
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    over_tcp: bool
    copying: float = 0.004
    copiers: int = 1
    gathers: float = 0.0

    def lines(self) -> list[str]:
        """Describe the schedule for people to read."""
        head = f"seed {self.seed}, {self.heads} heads, {'TCP' if self.over_tcp else 'RDMA'}"
        items = [*self.servers, *self.requests, *self.faults]
        return [head, *map(str, items)]
