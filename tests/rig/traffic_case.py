"""The schedule of traffic on the protocol ring (rig/traffic.py): which requests
there are, when they begin and what each meets; and what all ranks share about them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rig.model import Cache, Case, Request
from rig.special import Key, Shared, Special
from rig.stages import Stop

UNKNOWN, BEGUN, ENDED = range(3)  # stages of a request, as decode sees it
STARTS, READY, DONE = range(3)  # stages of a rank
ROOM_AGAIN_AFTER, STORM, STORMS = 400, 12, 0.02
AT_DECODE = ("abort before metadata", *["abort after metadata"] * 4, "metadata: late")
AT_PREFILL = ("prefill aborts",)


@dataclass(frozen=True)
class Meeting:
    """What a request meets: a fault's name, the rank of the side that it happens on, and a number
    in [0, 1) that says when."""

    name: str = ""
    rank: int = 0
    part: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """At most so many `requests`; `tail` more to each server once everything was done to them.

    `prefills` servers of `prefill_tp` ranks; decode ranks of TP `decode_tp`, in `decodes` DP ranks.
    Each of these has at most `at_once` requests open at each server, and begins one there at most
    each `every` seconds. `touched`: the prefill server, or the decode rank, that meets the fault.
    `hosts`: namespaces and addresses of ranks that are not on this machine's loopback. `stock`:
    without the plugin, and with a drafter of one head, which SGLang moves rightly. `held`: the rank
    whose rooms are held at a stage (stages.py). `same_ports`: a rank that starts again has its
    channel's port again. `restarts`: how many servers, or ranks, start again.

    A flow has requests of `tokens` each. With `max_tokens` requests are random, by `seed`: their
    sizes, when copies, reads and messages fail, and what `faulty` of them meet. Prefill then does
    not wait for decode to begin, and ranks of a server agree on each request's status, as SGLang's
    do. In a flow the target goes on without a rank that sends draft KV alone."""

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
    prefill_tp: int = 2
    decode_tp: int = 1
    max_tokens: int = 0
    faulty: float = 0.2
    seed: int = 0

    @property
    def is_random(self) -> bool:
        return self.max_tokens > 0

    def server_of(self, number: int) -> int:
        return number % self.prefills

    def decode_of(self, number: int) -> int:
        """Its DP rank."""
        return number // self.prefills % self.decodes

    def case(self) -> TrafficCase:
        heads, size = (1, 256) if self.stock else (4, 64)
        more: dict[str, Any] = {"requests": (Request(self.tokens, chunk_pages=8),) * self.requests}
        if self.is_random:
            draw, size = random.Random(self.seed), 8
            sizes = [(draw.randint(1, self.max_tokens), draw.choice([0, 0, 16, 64]))
                     for _ in range(self.requests)]  # fmt: skip
            more = {
                "requests": tuple(Request(n, chunk_pages=pages) for n, pages in sizes),
                "page_size": 16, "special": Special(config={"staging_mb": 1}),
            }  # fmt: skip
        return TrafficCase(
            self.prefill_tp, self.decode_tp, prefills=self.prefills, decode_dp=self.decodes,
            draft=Cache("mha", heads=heads, k_bytes=size, v_bytes=size), seed=self.seed,
            prefill_mixkv=not self.stock, decode_mixkv=not self.stock, traffic=self, **more,
        )  # fmt: skip

    def meeting(self, number: int) -> Meeting:
        """A storm of aborts hits STORM requests in a row."""
        draw = random.Random(f"{self.seed} {number}")
        storm = random.Random(f"{self.seed} storm {number // STORM}").random() < STORMS
        if not self.is_random or (not storm and draw.random() >= self.faulty):
            return Meeting()
        if storm:
            return Meeting("abort storm")
        name = draw.choice((*AT_DECODE, *AT_PREFILL * 3))
        ranks = self.decode_tp if name in AT_DECODE else self.prefill_tp
        return Meeting(name, draw.randrange(ranks), draw.random())


@dataclass(frozen=True)
class TrafficCase(Case):
    """A case whose pages are handed out while it runs. Random traffic uses each 20 times. In a flow
    none comes again, since what SGLang writes late to a failed request's must not look like a
    fault."""

    traffic: Traffic = Traffic(0)

    @property
    def pool_pages(self) -> int:
        sizes = [self.pages(request) for request in self.requests]
        return max(sum(sizes) // 20, 2 * max(sizes)) if self.traffic.is_random else sum(sizes) + 5

    def room(self, number: int) -> int:
        """Random traffic uses room numbers again now and then, long after they have ended."""
        again = self.traffic.is_random and number % 25 == 24 and number >= ROOM_AGAIN_AFTER
        return 1000 + number - ROOM_AGAIN_AFTER * again


@dataclass
class OfTraffic(Shared):
    """Arrays and values of processes that may be killed: none has a lock.

    `stages`: of each request; `states`: by side, of each rank; `statuses`: by side, of each request
    on each rank of a server; `closed`: whether a prefill rank's channel is; `channel_ports`:
    theirs, 0 for any;
    `acted`: whether everything was done to the ranks; `over`: whether no request begins any more;
    `stop`: where a room is held (stages.py)."""

    stages: Any = None
    states: Mapping[str, Any] = field(default_factory=dict)
    statuses: Mapping[str, Any] = field(default_factory=dict)
    closed: Any = None
    channel_ports: Any = ()
    acted: Any = None
    over: Any = None
    stop: Stop | None = None
