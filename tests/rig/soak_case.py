"""A soak's requests, their rooms and what each meets, the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from rig.memory import RankReport
from rig.model import Case, Request
from rig.special import Special

ROOM_AGAIN_AFTER = 400
STORM = 12

AT_DECODE = ("abort before metadata", *["abort after metadata"] * 4, "metadata: late")
AT_PREFILL = ("prefill aborts",)


@dataclass(frozen=True)
class Soak:
    """`faulty`: share of the requests that meet a fault. `reuse`: times each page is used."""

    requests: int
    seed: int = 0
    faulty: float = 0.2
    prefill_tp: int = 2
    decode_tp: int = 1
    max_tokens: int = 4000
    page_size: int = 16
    in_flight: int = 16
    reuse: int = 20

    def __str__(self) -> str:
        return f"P{self.prefill_tp}-D{self.decode_tp}, {self.requests} requests, seed {self.seed}"

    def case(self) -> SoakCase:
        draw = random.Random(self.seed)
        requests = tuple(
            Request(draw.randint(1, self.max_tokens), chunk_pages=draw.choice([0, 0, 16, 64]))
            for _ in range(self.requests)
        )
        most = -(-self.max_tokens // self.page_size)
        uses = sum(-(-r.tokens // self.page_size) for r in requests)
        return SoakCase(
            self.prefill_tp, self.decode_tp, requests=requests, page_size=self.page_size,
            seed=self.seed, special=Special(config={"staging_mb": 1}),
            soak=self, pages_in_pool=max(uses // self.reuse, 2 * most),
        )  # fmt: skip


@dataclass(frozen=True)
class SoakCase(Case):
    """A case whose pages are handed out while it runs."""

    soak: Soak = Soak(0)
    pages_in_pool: int = 0

    @property
    def pool_pages(self) -> int:
        return self.pages_in_pool

    def room(self, number: int) -> int:
        """Room numbers are used again now and then, long after they have ended."""
        again = number % 25 == 24 and number >= ROOM_AGAIN_AFTER
        return 1000 + number - ROOM_AGAIN_AFTER * again

    def fault(self, number: int) -> Meeting | None:
        """What this request meets; a storm of aborts hits STORM requests in a row."""
        draw = random.Random(f"{self.soak.seed} {number}")
        if random.Random(f"{self.soak.seed} storm {number // STORM}").random() < 0.02:
            return Meeting("abort storm", 0, 0.0)
        if draw.random() >= self.soak.faulty:
            return None
        name = draw.choice((*AT_DECODE, *AT_PREFILL * 3))
        ranks = self.decode_tp if name in AT_DECODE else self.prefill_tp
        return Meeting(name, draw.randrange(ranks), draw.random())


@dataclass(frozen=True)
class Meeting:
    """A fault's name, the rank (of the side that it happens on) and a number in [0, 1)."""

    name: str
    rank: int
    part: float


@dataclass
class Report(RankReport):
    """`ended`: request -> (status, reason). `resources`: warm, then at the end."""

    ended: dict[int, tuple[str, str]] = field(default_factory=dict)
    resources: list[dict[str, int]] = field(default_factory=list)
