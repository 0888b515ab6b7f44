"""Generations, which tell requests with the same room number apart."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from rig.channel.threads import Decode

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.messages import decode, encode, fail
from sglang_mixkv.channel.times import Times

RANKS, USES = 8, 100


def test_generations_increase_and_are_unique() -> None:
    """A rank's generations increase, and no two ranks share one although SGLang seeds them alike.

    Two of the eight ranks may start with close numbers by chance. Then the test fails, once in
    190,000 runs.
    """
    highs = set[int]()
    for _ in range(RANKS):
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        rank = Decode(Times())
        drawn = [rank.channel._new_generation() for _ in range(USES)]
        rank.close()
        assert sorted(set(drawn)) == drawn
        assert decode(encode(fail(1, drawn[-1], "closed", ""))).generation == drawn[-1]
        highs |= {generation >> 32 for generation in drawn}
    assert len(highs) == RANKS * USES


@pytest.mark.parametrize(("drawn", "first"), [(1, 0), ((1 << 63) - 1, (1 << 30) - 1)])
def test_generations_start_in_the_lower_half(
    drawn: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first generation is in the lower half of its range, which leaves numbers for years."""
    monkeypatch.setattr(messages, "draws", lambda: itertools.repeat(drawn))
    rank = Decode(Times())
    found = [rank.channel._new_generation() for _ in range(3)]
    rank.close()
    assert found == [(first + n) << 32 | drawn & 0xFFFFFFFF for n in range(3)]
