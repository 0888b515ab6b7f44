"""Numbers of a room's uses: later ones are greater, and no two ranks share one."""

from __future__ import annotations

import random

import numpy as np
import torch
from rig.threads import Decode

from sglang_mixkv.channel.messages import decode, encode, fail
from sglang_mixkv.channel.times import Times

RANKS, USES = 8, 100


def test_generations_rise_and_no_two_ranks_share_one() -> None:
    """SGLang seeds each rank of a server alike; they draw for the same requests. By chance two of
    eight ranks meet once in 190,000 runs."""
    ranks = []
    for _ in range(RANKS):
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        rank = Decode(Times())
        ranks.append([rank.channel._new_generation() for _ in range(USES)])
        rank.close()
    for drawn in ranks:
        assert sorted(set(drawn)) == drawn
        for generation in (drawn[0], drawn[-1]):
            assert decode(encode(fail(1, generation, "closed"))).generation == generation
    highs = [{generation >> 32 for generation in drawn} for drawn in ranks]
    lows = {generation & 0xFFFFFFFF for drawn in ranks for generation in drawn}
    assert len(set.union(*highs)) == RANKS * USES
    assert len(lows) > 0.99 * RANKS * USES
