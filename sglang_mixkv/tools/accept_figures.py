"""Compare the answers of a pair with those of a single server, prompt by prompt. Accept length:
tokens per verify round, correct drafts plus one. The first token comes before all rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np

from sglang_mixkv.tools.client import Answer

FEWEST = 8  # prompts for a verdict; fewer do not show how much prompts differ
EARLY = 8
RESAMPLES, TAIL = 2000, 0.025


class Decision(Enum):
    WITHIN = "within"
    BELOW = "below"
    OTHER_OUTPUT = "other output"
    UNDECIDED = "undecided"


class Asked(msgspec.Struct, frozen=True):
    """One prompt and its two answers."""

    input_ids: tuple[int, ...]
    single: Answer
    pair: Answer


class Side(msgspec.Struct, frozen=True):
    """The figures of one deployment's answers. `accept_length`: 0 without a verify round."""

    accept_length: float
    by_position: list[float]
    verify_rounds: int

    def row(self, name: str) -> str:
        shares = "  ".join(f"{share:6.1%}" for share in self.by_position)
        return f"{name:>8}  {self.accept_length:13.3f}  {shares}"


class Comparison(msgspec.Struct, frozen=True):
    """`ratio`: the pair's accept length over the single server's; None if one has no rounds.
    `interval`: the confidence interval of `ratio`; None for too few prompts. `differs`: too many
    outputs differ within EARLY tokens. `gate`: the share of accept length that the pair may lose.
    `by_dp_rank`: a comparison per DP rank of decode, if several answered: one may be broken."""

    prompts: int
    same_output: int
    single: Side
    pair: Side
    ratio: float | None
    interval: tuple[float, float] | None
    differs: bool
    gate: float
    by_dp_rank: dict[int, Comparison]

    @property
    def is_below(self) -> bool:
        return self.interval is not None and self.interval[1] < 1 - self.gate

    @property
    def verdict(self) -> Decision:
        """Return the verdict. WITHIN needs enough prompts on each rank to detect a loss, but not to
        rule one out: that would take as many on each rank as on all ranks together."""
        each = (self, *self.by_dp_rank.values())
        if any(one.differs for one in each):
            return Decision.OTHER_OUTPUT
        if any(one.is_below for one in each):
            return Decision.BELOW
        low, _ = self.interval or (0, 0)
        if low >= 1 - self.gate and all(one.interval for one in each):
            return Decision.WITHIN
        return Decision.UNDECIDED

    def words(self) -> str:
        """Return the verdict as a sentence."""
        number = max(2 * self.prompts, FEWEST * len(self.by_dp_rank))
        return {
            Decision.WITHIN: f"accept length within the gate of {self.gate:.0%}",
            Decision.BELOW: f"accept length OUTSIDE the gate of {self.gate:.0%}",
            Decision.OTHER_OUTPUT: f"OTHER OUTPUT: too many differ within {EARLY} tokens. The "
            "pair runs a different model or flags, or the target's KV is wrong",
            Decision.UNDECIDED: f"too few prompts to decide: send {number} or more",
        }[self.verdict]

    def table(self) -> Iterator[str]:
        yield f"{'':>8}  accept length  by position"
        yield from (self.single.row("single"), self.pair.row("pair"))
        yield f"outputs equal: {self.same_output} of {self.prompts}"
        for rank, one in self.by_dp_rank.items():
            yield f"decode's DP rank {rank}: {one.summary()}"
        yield f"pair to single: {self.summary()}"

    def summary(self) -> str:
        ratio = "nothing to compare" if self.ratio is None else f"{self.ratio:.1%}"
        if self.interval is None:
            return f"{ratio}, of {self.prompts} prompts"
        low, high = self.interval
        marks = (", OUTSIDE" if self.is_below else "") + (", OTHER OUTPUT" if self.differs else "")
        return f"{ratio}, between {low:.1%} and {high:.1%} by {self.prompts} prompts{marks}"


def lengths(asked: Sequence[Asked]) -> list[float]:
    sides = [a.single for a in asked], [a.pair for a in asked]
    return [_side(_at_least(answers)).accept_length for answers in sides]


def compare(asked: Sequence[Asked], gate: float, tail: float = TAIL) -> Comparison:
    """Compare both answers to each prompt. `tail`: the probability on each side of `interval`."""
    sides = [a.single for a in asked], [a.pair for a in asked]
    tables = [*map(_at_least, sides)]
    single, pair = map(_side, tables)
    one, two = single.accept_length, pair.accept_length
    same = sum(a.single.tokens == a.pair.tokens for a in asked)
    early = sum(a.single.tokens[:EARLY] != a.pair.tokens[:EARLY] for a in asked)
    ranks = sorted({a.pair.dp_rank for a in asked if a.pair.dp_rank is not None})
    # More ranks mean more chances of a false alarm, so each gets a smaller tail.
    by_dp_rank = {
        rank: compare([a for a in asked if a.pair.dp_rank == rank], gate, tail / len(ranks))
        for rank in ranks
        if len(ranks) > 1
    }
    return Comparison(
        len(asked), same, single, pair,
        two / one if one and two else None, _interval(tables, tail),
        len(asked) >= FEWEST and not is_chance(early, len(asked)), gate, by_dp_rank,
    )  # fmt: skip


def _at_least(answers: list[Answer]) -> Any:
    """Return [answers, longest draft + 1]: in column k, each answer's verify rounds with at least k
    correct drafts. Column 0 counts all rounds; a row's sum is the tokens of its rounds."""
    rows = [answer.rounds_by_right_drafts for answer in answers]
    padded = np.array([*zip_longest(*rows, (0,), fillvalue=0)], float).T[:-1]
    return padded[:, ::-1].cumsum(axis=1)[:, ::-1]


def _side(at_least: Any) -> Side:
    sums = at_least.sum(axis=0)
    rounds = max(1, int(sums[0]))
    return Side(float(sums.sum()) / rounds, (sums[1:] / rounds).tolist(), int(sums[0]))


def _interval(tables: list[Any], tail: float) -> tuple[float, float] | None:
    """Resample whole prompts, since a prompt's rounds are correlated; None for too few prompts."""
    number = len(tables[0])
    if number < FEWEST:
        return None
    draws = np.random.default_rng(1).multinomial(number, [1 / number] * number, RESAMPLES)
    with np.errstate(divide="ignore", invalid="ignore"):
        single, pair = (one.sum(axis=1) / one[:, 0] for one in (draws @ each for each in tables))
        low, high = np.quantile(pair / single, (tail, 1 - tail))
    return (float(low), float(high)) if np.isfinite([low, high]).all() else None


def is_chance(early: int, number: int) -> bool:
    """Return whether `early` of `number` outputs may differ within EARLY tokens by chance, as those
    of correct servers do where two tokens are equally likely: if each output differed with
    probability 0.1, at least `early` would differ in one of a thousand runs or more. Computed in
    integers, since the binomials overflow a float."""
    ways = (math.comb(number, k) * 9 ** (number - k) for k in range(early, number + 1))
    return 1000 * sum(ways) >= 10**number
