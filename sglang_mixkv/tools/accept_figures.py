"""How a pair's answers compare with a single server's, prompt by prompt.

Accept lengths here are what a verify round yields, its right drafts and one token more. The first
token of an answer, which prefill computes, is not in them: short answers would look alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from sglang_mixkv.tools.client import Answer, acceptance_by_position

FEWEST = 8
"""Prompts that a verdict needs: of fewer, how much prompts differ is not known."""

EARLY = 8
RESAMPLES, TAIL = 2000, 0.025


class Verdict(Enum):
    WITHIN = "within"
    BELOW = "below"
    OTHER_OUTPUT = "other output"
    UNDECIDED = "undecided"


class Asked(msgspec.Struct, frozen=True):
    """One prompt and its two answers."""

    input_ids: tuple[int, ...]
    single: Answer
    pair: Answer

    @property
    def differs_at(self) -> int | None:
        """The first place where the outputs differ, None where they are equal."""
        one, two = self.single.tokens, self.pair.tokens
        if one == two:
            return None
        places = (n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
        return next(places, min(len(one), len(two)))


class Side:
    """All answers of one deployment. `counts`: of each, the tokens that verify rounds yielded, and
    the rounds. `accept_length`: 0 without a verify round."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        rows = [a.rounds_by_right_drafts for a in answers]
        yielded = [sum((right + 1) * n for right, n in enumerate(row)) for row in rows]
        self.counts = np.array([*zip(yielded, map(sum, rows), strict=True)], float)
        tokens, rounds = self.counts.sum(axis=0)
        self.accept_length = float(tokens / rounds) if rounds else 0.0
        self.first_token_s = statistics.fmean(answer.first_token_s for answer in answers)
        self.positions = max(0, max(map(len, rows)) - 1)


def is_chance(early: int, number: int) -> bool:
    """Whether so many of this number of outputs may differ within EARLY tokens. Outputs of right
    servers do, too, where two tokens are as likely. More than a tenth of them is taken for chance
    only as long as that is likelier than one in a thousand; in whole numbers, since the ways to
    choose them are beyond a float."""
    ways = term = math.comb(number, early) * 9 ** (number - early)
    for k in range(early, number):
        term = term * (number - k) // (9 * (k + 1))
        ways += term
    return 1000 * ways >= 10**number


class Comparison:
    """Of some prompts. `gate`: the share of accept length that the pair may lose. `tail`: the
    probability on either side of the interval. `ratio`: the pair's accept length to the single
    server's; None where one has no rounds."""

    def __init__(self, asked: Sequence[Asked], gate: float, tail: float = TAIL) -> None:
        self.asked, self.gate, self._tail = asked, gate, tail
        self.single = Side([one.single for one in asked])
        self.pair = Side([one.pair for one in asked])
        one, two = self.single.accept_length, self.pair.accept_length
        self.ratio = two / one if one and two else None
        self.interval = self._interval()

    def _interval(self) -> tuple[float, float] | None:
        """Where the ratio lies, by resampling prompts: rounds of one prompt hang together. None
        where the prompts are too few."""
        number = len(self.asked)
        if number < FEWEST:
            return None
        rng = np.random.default_rng(1)
        draws = rng.multinomial(number, [1 / number] * number, RESAMPLES)
        pair, single = draws @ self.pair.counts, draws @ self.single.counts
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = (pair[:, 0] / pair[:, 1]) / (single[:, 0] / single[:, 1])
        if not np.isfinite(ratios).all():
            return None
        low, high = np.quantile(ratios, (self._tail, 1 - self._tail))
        return float(low), float(high)

    @cached_property
    def by_dp_rank(self) -> dict[int, Comparison]:
        """Of decode's DP ranks, where several answered: one may be broken. The more there are,
        the less may chance do on each."""
        ranks = sorted({a.pair.dp_rank for a in self.asked if a.pair.dp_rank is not None})
        if len(ranks) < 2:
            return {}
        tail = self._tail / len(ranks)
        return {
            rank: Comparison([a for a in self.asked if a.pair.dp_rank == rank], self.gate, tail)
            for rank in ranks
        }

    # -- the verdict

    @cached_property
    def differs(self) -> bool:
        """Whether outputs do too soon, too often."""
        number = len(self.asked)
        early = sum(a.differs_at is not None and a.differs_at < EARLY for a in self.asked)
        return number >= FEWEST and not is_chance(early, number)

    @property
    def is_below(self) -> bool:
        return self.interval is not None and self.interval[1] < 1 - self.gate

    @property
    def is_within(self) -> bool:
        return self.interval is not None and self.interval[0] >= 1 - self.gate

    @property
    def verdict(self) -> Verdict:
        """Each rank must have prompts enough to be found below, but not to be found within: that
        takes as many on each as on all."""
        ranks = self.by_dp_rank.values()
        if any(one.differs for one in (self, *ranks)):
            return Verdict.OTHER_OUTPUT
        if any(one.is_below for one in (self, *ranks)):
            return Verdict.BELOW
        known = all(one.interval is not None for one in ranks)
        return Verdict.WITHIN if known and self.is_within else Verdict.UNDECIDED

    # -- in words

    def words(self) -> str:
        """The verdict's."""
        verdict = self.verdict
        if verdict is Verdict.OTHER_OUTPUT:
            return (
                f"OTHER OUTPUT: too often it differs within {EARLY} tokens. The pair runs another "
                "model or other flags, or the target's KV is wrong"
            )
        if verdict is Verdict.UNDECIDED:
            number = max(2 * len(self.asked), FEWEST * len(self.by_dp_rank))
            return f"too few prompts to decide: send {number} or more"
        side = "within" if verdict is Verdict.WITHIN else "OUTSIDE"
        return f"accept length {side} the gate of {self.gate:.0%}"

    def _sides(self) -> Iterator[tuple[str, Side, list[float]]]:
        """Each with its acceptance by position, as far as a round of either got."""
        steps = max(self.single.positions, self.pair.positions)
        for name, side in (("single", self.single), ("pair", self.pair)):
            yield name, side, acceptance_by_position(side.answers, steps)

    def figures(self) -> dict[str, Any]:
        return {
            "prompts": len(self.asked),
            "same_output": sum(a.differs_at is None for a in self.asked),
            **{
                name: {
                    "accept_length": side.accept_length,
                    "by_position": by_position,
                    "verify_rounds": int(side.counts[:, 1].sum()),
                    "first_token_s": side.first_token_s,
                }
                for name, side, by_position in self._sides()
            },
            "ratio": self.ratio,
            "interval": self.interval,
            "by_dp_rank": {rank: one.ratio for rank, one in self.by_dp_rank.items()},
            "gate": self.gate,
            "each": self.asked,
        }

    def table(self) -> Iterator[str]:
        yield f"{'':>8}  accept length  first token  by position"
        for name, side, by_position in self._sides():
            shares = "  ".join(f"{share:6.1%}" for share in by_position)
            first = f"{side.first_token_s * 1e3:8.0f} ms"
            yield f"{name:>8}  {side.accept_length:13.3f}  {first}  {shares}"
        places = [a.differs_at for a in self.asked if a.differs_at is not None]
        where = f"; the others differ from token {statistics.median(places or [0]):.0f} on"
        same = len(self.asked) - len(places)
        yield f"outputs equal: {same} of {len(self.asked)}{where if places else ''}"
        for rank, one in self.by_dp_rank.items():
            yield f"decode's DP rank {rank}: {one.summary()}"
        yield f"pair to single: {self.summary()}"

    def summary(self) -> str:
        ratio = "nothing to compare" if self.ratio is None else f"{self.ratio:.1%}"
        if self.interval is None:
            return f"{ratio}, of {len(self.asked)} prompts"
        low, high = self.interval
        marks = (", OUTSIDE" if self.is_below else "") + (", OTHER OUTPUT" if self.differs else "")
        return f"{ratio}, between {low:.1%} and {high:.1%} by {len(self.asked)} prompts{marks}"
