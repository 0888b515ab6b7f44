"""A steady flow of requests (rig/flow.py): what it is, what its ranks share, what they report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rig.memory import RankReport
from rig.model import Cache, Case, Request
from rig.special import Key, Shared

UNKNOWN, BEGUN, ENDED = range(3)


@dataclass
class Ended:
    """One request, as decode saw it. `state`: of its draft KV, warm or cold, and `reason` why."""

    number: int
    server: int
    decode: int
    began: float
    seconds: float
    status: str
    state: str
    reason: str

    def is_of(self, key: Key) -> bool:
        """Whether that prefill server, or that decode rank, serves it."""
        return key == (key[0], self.server if key[0] == "prefill" else self.decode)


@dataclass
class FlowReport(RankReport):
    ended: list[Ended] = field(default_factory=list)
    resources: dict[str, int] = field(default_factory=dict)  # once it was warm


@dataclass(frozen=True)
class Flow:
    """At most so many `requests`; `tail` more to each server once everything was done to them.

    `prefills` servers of TP 2, a decode server of TP 1 with `decodes` DP ranks. Each of these gets
    a request at most each `every` seconds from each server. `touched`: the prefill server, or the
    decode rank, that meets the fault. `hosts`: namespaces and addresses of ranks that are not on
    this machine's loopback. `stock`: without the plugin, and with a drafter of one head, which
    SGLang moves rightly. `held`: the rank whose rooms are held at a stage (stages.py).
    `same_ports`: a rank that starts again has its channel's port again. `restarts`: how many
    servers, or ranks, start again."""

    requests: int
    tail: int = 100
    prefills: int = 1
    decodes: int = 1
    at_once: int = 4
    every: float = 0.0
    tokens: int = 96
    touched: Key = ("prefill", 0)
    held: Key = ("prefill", 1)
    hosts: Mapping[Key, tuple[int, str]] = field(default_factory=dict)
    stock: bool = False
    same_ports: bool = False
    restarts: int = 0

    def case(self) -> Case:
        heads, size = (1, 256) if self.stock else (4, 64)
        return Case(
            2, 1, prefills=self.prefills, decode_dp=self.decodes,
            draft=Cache("mha", heads=heads, k_bytes=size, v_bytes=size),
            requests=(Request(self.tokens, chunk_pages=8),) * self.requests,
            prefill_mixkv=not self.stock, decode_mixkv=not self.stock,
        )  # fmt: skip


class Flag:
    """Set once, for all processes. It has no lock, which a rank that is killed could take along."""

    def __init__(self, context: Any) -> None:
        self._value = context.RawValue("b", 0)

    def set(self) -> None:
        self._value.value = 1

    def is_set(self) -> bool:
        return bool(self._value.value)


@dataclass
class OfFlow(Shared):
    """`stages`: of each request; `ready`: of each rank; `closed`: of each prefill rank's channel;
    `channel_ports`: theirs, 0 for any; `counts`: requests that have ended on each decode rank;
    `done`: whether all have; `acted`: set when everything was done to them; `over`: set at the
    end; `stop`: where a room is held (stages.py)."""

    flow: Flow | None = None
    stages: Any = None
    ready: Any = None
    closed: Any = None
    channel_ports: Any = ()
    counts: Any = None
    done: Any = None
    acted: Any = None
    over: Any = None
    stop: Any = None
