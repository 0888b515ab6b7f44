"""A schedule as plain values, from which a run can be repeated and shrunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.faults import Fault

Where = tuple[int, int]  # a server's number, and a rank of that server


@dataclass(frozen=True)
class Server:
    """A server.

    `tokens`: the number of tokens, with all heads of a rank, that fit a slot. `patience`: the
    factor of its time-outs. `device`: whether its pools are on GPUs.
    """

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
    """A chunk of a prompt.

    `pending`: whether SGLang sends it when its forward is launched, not after the forward.
    """

    count: int
    pending: bool
    seconds: float


@dataclass(frozen=True)
class Request:
    """A request.

    `number`: its room number. `after`: the id of the request that had this room number before, or
    -1. `optimistic`: whether the forward starts without waiting for decode's metadata. `forward`:
    seconds for which an earlier forward still writes to decode's pages. `abort`: the side that
    aborts it, when, and whether the other side also does. `late`: whether it comes long after
    all faults. `name`: the name by which decode addresses the prefill server.
    """

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
        """True if an earlier forward makes the request hold slots that others wait for."""
        return self.forward > 0.1


@dataclass(frozen=True)
class Spec:
    """A schedule.

    `copying`: the longest time of a copy. `copiers`: the number of copies that a rank makes in
    parallel. `gathers`: the probability that one pass of the channel thread takes several events.
    """

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
        """Describe the schedule in lines of text."""
        head = f"seed {self.seed}, {self.heads} heads, {'TCP' if self.over_tcp else 'RDMA'}"
        items = [*self.servers, *self.requests, *self.faults]
        return [head, *map(str, items)]
