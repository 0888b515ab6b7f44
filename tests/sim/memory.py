"""What memory holds here: a number for a row, which names its prompt, token and heads.

A row of a prefill pool is `row(prompt, token)`. In a slot the heads that were packed join it. A
decode pool has one cell per token and head. A slot is stamp, rows, sum.
"""

from __future__ import annotations

EMPTY = 0  # zeroed
EARLIER = 7  # rows of a request that had these pages before
REUSED = 11  # rows of a request that was given these pages afterwards
SHARED = 13  # rows of a prefix that several requests share
SPOILED = 17  # bytes that belong to no row: other heads than were asked for
TOKENS = 64  # a prompt is shorter


def row(prompt: int, token: int) -> int:
    return (prompt + 1) * TOKENS + token


def packed(row_: int, heads: range) -> int:
    return (row_ << 10) | (heads.start << 5) | heads.stop


def unpacked(piece: int, heads: range) -> int:
    """What lands in the cells of these heads."""
    same = (piece >> 5) & 31 == heads.start and piece & 31 == heads.stop
    return piece >> 10 if same else SPOILED


def checksum(pieces: list[int], stamp: int) -> int:
    return hash((stamp, *pieces)) & ((1 << 62) - 1)


def new_slots(count: int) -> list[list[int]]:
    return [[EMPTY] * (TOKENS + 2) for _ in range(count)]


def carries(slot: list[int], tokens: int, stamp: int) -> bool:
    """Whether the slot holds what a READY has announced, as far as a reader can see."""
    return slot[0] == stamp and slot[tokens + 1] == checksum(slot[1 : tokens + 1], stamp)
