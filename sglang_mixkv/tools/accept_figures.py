"""How a pair's answers compare with a single server's, prompt by prompt.

Accept lengths here are what a verify round yields, its right drafts and one token more. The first
token of an answer, which prefill computes, is not in them: short answers would look alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from sglang_mixkv.tools.client import Answer, acceptance_by_position, longest_draft

FEWEST = 8
"""Prompts that a verdict needs: of fewer, how much prompts differ is not known."""

EARLY, TIES, CHANCE = 8, 0.1, 1e-3
"""Outputs of right servers part too, where two tokens are as likely. More than a tenth of them
within so many tokens is taken for chance only as long as that is likelier than one in a
thousand."""

RESAMPLES, TAIL = 2000, 0.025


class Verdict(Enum):
    WITHIN = "within"
    BELOW = "below"
    OTHER_OUTPUT = "other output"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Side:
    """All answers of one deployment."""

    answers: tuple[Answer, ...]

    @cached_property
    def counts(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Tokens that verify rounds yielded, and rounds, of each answer."""
        histograms = [answer.rounds_by_right_drafts for answer in self.answers]
        rounds = [sum(h) for h in histograms]
        right = [sum(n * count for n, count in enumerate(h)) for h in histograms]
        return np.array([(r + n, n) for r, n in zip(right, rounds, strict=True)], float)

    @property
    def accept_length(self) -> float:
        """0 without a verify round."""
        tokens, rounds = self.counts.sum(axis=0)
        return float(tokens / rounds) if rounds else 0.0

    @property
    def first_token_s(self) -> float:
        return statistics.fmean(answer.first_token_s for answer in self.answers)

    def by_position(self, drafts: int) -> list[float]:
        return acceptance_by_position(list(self.answers), drafts)


@dataclass(frozen=True)
class Asked:
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

    def row(self) -> dict[str, Any]:
        sides = {"single": self.single, "pair": self.pair}
        return {
            "prompt_tokens": len(self.input_ids),
            "input_ids": self.input_ids,
            "differs_at": self.differs_at,
            **{
                name: {
                    "tokens": len(answer.tokens),
                    "output_ids": answer.tokens,
                    "drafted": answer.drafted,
                    "verify_rounds": answer.verify_rounds,
                    "rounds_by_right_drafts": answer.rounds_by_right_drafts,
                    "first_token_s": answer.first_token_s,
                    "cached_tokens": answer.cached_tokens,
                    "dp_rank": answer.dp_rank,
                }
                for name, answer in sides.items()
            },
        }


def _chance(some: int, number: int) -> float:
    """Of exactly so many of this number of prompts, by ties; in logarithms, since the number of
    ways to choose them is beyond a float."""
    ways = math.lgamma(number + 1) - math.lgamma(some + 1) - math.lgamma(number - some + 1)
    return math.exp(ways + some * math.log(TIES) + (number - some) * math.log(1 - TIES))


class Comparison:
    """Of some prompts. `gate`: the share of accept length that the pair may lose. `tail`: the
    probability on either side of the interval."""

    def __init__(self, asked: Sequence[Asked], gate: float, tail: float = TAIL) -> None:
        self.asked, self.gate, self._tail = asked, gate, tail
        self.single = Side(tuple(one.single for one in asked))
        self.pair = Side(tuple(one.pair for one in asked))

    @property
    def ratio(self) -> float | None:
        """The pair's accept length to the single server's; None where one has no rounds."""
        one, two = self.single.accept_length, self.pair.accept_length
        return two / one if one and two else None

    @cached_property
    def interval(self) -> tuple[float, float] | None:
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

    @property
    def would_decide(self) -> int:
        """About how many prompts as these would: the interval has to keep off the gate."""
        number, fewest = len(self.asked), FEWEST * max(1, len(self.by_dp_rank))
        if self.interval is None or self.ratio is None:
            return max(fewest, 2 * number)
        low, high = self.interval
        distance = abs(self.ratio - (1 - self.gate))
        need = number * ((high - low) / 2 / distance) ** 2 if distance else math.inf
        return max(fewest, number + 1, math.ceil(min(need, 10_000)))

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
        by_chance = sum(_chance(k, number) for k in range(early, number + 1))
        return number >= FEWEST and by_chance < CHANCE

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

    def words(self) -> str:
        """The verdict's."""
        verdict = self.verdict
        if verdict is Verdict.OTHER_OUTPUT:
            return (
                f"OTHER OUTPUT: too often it differs within {EARLY} tokens. The pair runs another "
                "model or other flags, or the target's KV is wrong"
            )
        if verdict is Verdict.UNDECIDED:
            return f"too few prompts to decide: send some {self.would_decide}"
        side = "within" if verdict is Verdict.WITHIN else "OUTSIDE"
        return f"accept length {side} the gate of {self.gate:.0%}"

    # -- in words

    @property
    def drafts(self) -> int:
        """Positions worth showing: those that a round got right, and one more. A tree's drafts
        are more than its depth."""
        answers = [*self.single.answers, *self.pair.answers]
        right = max((len(a.rounds_by_right_drafts) for a in answers), default=0)
        return min(longest_draft(answers), right)

    def figures(self) -> dict[str, Any]:
        return {
            "prompts": len(self.asked),
            "same_output": sum(a.differs_at is None for a in self.asked),
            **{
                name: {
                    "accept_length": side.accept_length,
                    "by_position": side.by_position(self.drafts),
                    "verify_rounds": int(side.counts[:, 1].sum()),
                    "first_token_s": side.first_token_s,
                }
                for name, side in (("single", self.single), ("pair", self.pair))
            },
            "ratio": self.ratio,
            "interval": self.interval,
            "by_dp_rank": {rank: one.ratio for rank, one in self.by_dp_rank.items()},
            "gate": self.gate,
            "each": [a.row() for a in self.asked],
        }

    def table(self) -> Iterator[str]:
        yield f"{'':>8}  accept length  first token  by position"
        for name, side in (("single", self.single), ("pair", self.pair)):
            shares = "  ".join(f"{share:6.1%}" for share in side.by_position(self.drafts))
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
