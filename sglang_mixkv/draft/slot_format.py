"""The byte format of a slot, common to both sides, and a reader's verdict on a slot's contents.

A *segment* is a run of a request's tokens for one reader, in a *slot* of the staging buffer:

    | stamp, 8 bytes | sum, 8 | unused, 48 | payload | zeros up to a multiple of 8 |

The payload contains one entry after another, each [tokens, heads, head bytes]. The sum, modulo
2**64, adds up the payload's 8-byte words, each times the odd weight of its place, and the stamp
times SEED. READY contains the stamp. A reader computes the sum of a slot, and compares both:

* A change within one word is always detected, since each weight is odd.
* A different segment is always detected: its stamp differs and, since SEED is odd, its sum too.
* Other changes, such as a mix of two segments, go undetected if the weighted differences add up to
  zero: once in 2**64 for bytes unrelated to the weights, and always for two words with only their
  highest bits flipped.

The ACK protects a slot; stamp and sum are a second safeguard. A second stamp after the payload
would add nothing: reads are unordered, so equal stamps prove nothing about the bytes between them.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

HEADER = 64  # bytes in front of the payload
PROBE_OFFSET = 16  # of the byte that receives the probe of a new peer
SLOT_OVERHEAD = HEADER + 8  # bytes: the header, and padding after the payload
GOLDEN, MIX, SEED = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0x2545F4914F6CDD1D
"""For the sum: two multipliers that turn a place into a weight, and the stamp's weight. All odd."""
MASK = (1 << 64) - 1


class SlotCheck(IntEnum):
    """The verdict on a slot that was read. STALE: wrong stamp. DIFFERS: wrong sum. ERROR: whether
    the copy was made is unknown."""

    OK = 0
    STALE = 1
    DIFFERS = 2
    ERROR = 3


def weights(count: int) -> NDArray[np.uint64]:
    """Return the uint64 weights of a payload's first `count` places. They are computed, so that
    both sides agree without a table and a GPU need not load them."""
    half = np.uint64(32)
    found = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    found = (found ^ (found >> half)) * np.uint64(MIX)
    return (found ^ (found >> half)) | np.uint64(1)
