"""Numbers of a room's uses: later ones are greater, and no two ranks share one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from rig.threads import Decode

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.times import Times

USES = 100


@pytest.fixture
def ranks() -> Iterator[list[list[int]]]:
    """What decode ranks of one server draw for the same requests: SGLang seeds each alike."""
    drawn, made = [], []
    for _ in range(8):
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        made.append(Decode(Times()))
        drawn.append([made[-1].channel._new_generation() for _ in range(USES)])
    yield drawn
    for rank in made:
        rank.close()


def test_generations_of_a_rank_rise_and_fit_a_message(ranks: list[list[int]]) -> None:
    for drawn in ranks:
        assert sorted(set(drawn)) == drawn
        for generation in (drawn[0], drawn[-1]):
            frame = messages.encode(messages.fail(1, generation, "closed"))
            assert messages.decode(frame).generation == generation  # type: ignore[union-attr]


def test_ranks_with_the_same_history_differ_in_the_high_half(ranks: list[list[int]]) -> None:
    """By chance two of eight ranks meet once in 190,000 runs."""
    highs = [{generation >> 32 for generation in drawn} for drawn in ranks]
    assert len(set.union(*highs)) == len(ranks) * USES


def test_the_low_half_is_drawn_anew_for_each_use(ranks: list[list[int]]) -> None:
    lows = {generation & 0xFFFFFFFF for drawn in ranks for generation in drawn}
    assert len(lows) > 0.99 * len(ranks) * USES
