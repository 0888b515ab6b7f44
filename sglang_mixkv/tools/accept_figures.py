"""How a pair's answers compare with a single server's, prompt by prompt."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from sglang_mixkv.tools.client import (
    Answer,
    accept_length,
    acceptance_by_position,
    longest_draft,
)

FEWEST = 8
"""Prompts that a verdict needs: of fewer, how much prompts differ cannot be told."""

EARLY = 8
"""Outputs of right servers part too, where two tokens are as likely: seldom so soon."""

RESAMPLES, TAIL = 2000, 0.025


class Verdict(Enum):
    WITHIN = "within"
    BELOW = "below"
    OTHER_OUTPUT = "other output"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Asked:
    """One prompt and its two answers."""

    prompt_tokens: int
    single: Answer
    pair: Answer

    @property
    def parts_at(self) -> int | None:
        """The first place where the outputs differ, None where they are equal."""
        one, two = self.single.tokens, self.pair.tokens
        if one == two:
            return None
        same = (n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
        return next(same, min(len(one), len(two)))

    def row(self) -> dict[str, Any]:
        sides = {"single": self.single, "pair": self.pair}
        return {
            "prompt_tokens": self.prompt_tokens,
            "parts_at": self.parts_at,
            **{
                name: {
                    "tokens": len(answer.tokens),
                    "verify_rounds": answer.verify_rounds,
                    "rounds_by_right_drafts": answer.rounds_by_right_drafts,
                    "first_token_s": answer.first_token_s,
                    "cached_tokens": answer.cached_tokens,
                    "dp_rank": answer.dp_rank,
                }
                for name, answer in sides.items()
            },
        }


class Comparison:
    """`gate`: the share of accept length that the pair may lose."""

    def __init__(self, asked: Sequence[Asked], gate: float) -> None:
        self.asked, self.gate = asked, gate

    @property
    def single(self) -> list[Answer]:
        return [one.single for one in self.asked]

    @property
    def pair(self) -> list[Answer]:
        return [one.pair for one in self.asked]

    @property
    def ratio(self) -> float:
        """The pair's accept length to the single server's."""
        return accept_length(self.pair) / accept_length(self.single)

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The ratio's 95 % interval, by resampling prompts: their rounds hang together."""
        counts = np.array(
            [
                (len(a.pair.tokens), a.pair.verify_rounds, len(a.single.tokens),
                 a.single.verify_rounds)
                for a in self.asked
            ], float
        )  # fmt: skip
        draws = np.random.default_rng(1).integers(len(counts), size=(RESAMPLES, len(counts)))
        pair, pair_rounds, single, single_rounds = counts[draws].sum(axis=1).T
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = (pair / pair_rounds) / (single / single_rounds)
        low, high = np.nanquantile(ratios, (TAIL, 1 - TAIL))
        return float(low), float(high)

    @property
    def more(self) -> int:
        """Prompts that would decide, if they are as these: the interval has to keep off the
        gate."""
        low, high = self.interval
        off = abs(self.ratio - (1 - self.gate))
        need = len(self.asked) * ((high - low) / 2 / off) ** 2 if off else 0
        return max(FEWEST, len(self.asked) + 1, min(int(need) + 1, 10_000))

    @property
    def early(self) -> int:
        """Prompts whose outputs part soon."""
        return sum(a.parts_at is not None and a.parts_at < EARLY for a in self.asked)

    @cached_property
    def by_dp_rank(self) -> dict[int, Comparison]:
        """Of decode's DP ranks, where there are several: one may be broken."""
        ranks = sorted({a.pair.dp_rank for a in self.asked if a.pair.dp_rank is not None})
        if len(ranks) < 2:
            return {}
        return {
            rank: Comparison([a for a in self.asked if a.pair.dp_rank == rank], self.gate)
            for rank in ranks
        }

    @property
    def is_below(self) -> bool:
        enough = len(self.asked) >= FEWEST
        below = enough and self.interval[1] < 1 - self.gate
        return below or any(one.is_below for one in self.by_dp_rank.values())

    @property
    def verdict(self) -> Verdict:
        if len(self.asked) >= FEWEST and self.early > len(self.asked) / 2:
            return Verdict.OTHER_OUTPUT
        if self.is_below:
            return Verdict.BELOW
        if len(self.asked) >= FEWEST and self.interval[0] >= 1 - self.gate:
            return Verdict.WITHIN
        return Verdict.UNDECIDED

    # -- said

    def figures(self) -> dict[str, Any]:
        steps = longest_draft(self.single + self.pair)
        return {
            "prompts": len(self.asked),
            "same_output": sum(a.parts_at is None for a in self.asked),
            "parted_early": self.early,
            "single": _side(self.single, steps),
            "pair": _side(self.pair, steps),
            "ratio": self.ratio,
            "interval": self.interval,
            "by_dp_rank": {rank: one.ratio for rank, one in self.by_dp_rank.items()},
            "gate": self.gate,
            "verdict": self.verdict.value,
            "each": [a.row() for a in self.asked],
        }

    def table(self) -> Iterator[str]:
        found = self.figures()
        yield f"{'':>8}  accept length  first token  by position"
        for name in ("single", "pair"):
            side = found[name]
            shares = "  ".join(f"{share:6.1%}" for share in side["by_position"])
            first = f"{side['first_token_s'] * 1e3:8.0f} ms"
            yield f"{name:>8}  {side['accept_length']:13.3f}  {first}  {shares}"
        parted = [a.parts_at for a in self.asked if a.parts_at is not None]
        part = f"; the others part at token {statistics.median(parted):.0f}" if parted else ""
        yield f"outputs equal: {found['same_output']} of {found['prompts']}{part}"
        for rank, one in self.by_dp_rank.items():
            outside = ", OUTSIDE" if one.is_below else ""
            yield f"decode's DP rank {rank}: {one.ratio:.1%} of {len(one.asked)} prompts{outside}"
        low, high = self.interval
        yield f"pair to single: {self.ratio:.1%}, with 95 % confidence {low:.1%} to {high:.1%}"
        yield self._words()

    def _words(self) -> str:
        """The verdict's."""
        if self.verdict is Verdict.OTHER_OUTPUT:
            return (
                f"OTHER OUTPUT: of most prompts it parts within {EARLY} tokens. The pair runs "
                "another model or other flags, or the target's KV is wrong"
            )
        if self.verdict is Verdict.UNDECIDED:
            return f"too few prompts to decide: send {self.more} or more"
        side = "within" if self.verdict is Verdict.WITHIN else "OUTSIDE"
        return f"accept length {side} the gate of {self.gate:.0%}"


def _side(answers: list[Answer], steps: int) -> dict[str, Any]:
    """`first_token_s`: the median."""
    return {
        "accept_length": accept_length(answers),
        "by_position": acceptance_by_position(answers, steps),
        "verify_rounds": sum(a.verify_rounds for a in answers),
        "first_token_s": statistics.median(a.first_token_s for a in answers),
    }
