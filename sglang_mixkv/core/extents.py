"""Extents: how slices that are a part of a destination's row are written in long ranges.

An extent is a run of tokens that are neighbours at the destination. While a request is received
its extents hold slice after slice instead of row after row:

    in rows        | h0 h1 | h0 h1 | h0 h1 | ...                token after token
    in an extent   | h0 of token 0, 1, 2 ... | h1 of token 0, 1, 2 ... |

so that each sender writes one range into it. The receiver puts the rows in order when all
senders have answered (packed.to_rows). Both sides work the extents out of the request's
destination pages, and of how many tokens an extent has at most (wire.Grant).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from sglang_mixkv.core.plan import Blocks, Copies, Ints, runs_of


@dataclass(frozen=True)
class Extents:
    """`first`: number of the first token in the pool; `count`: tokens; `before`: tokens of the
    request before it. In units of `unit` tokens all three are whole numbers."""

    first: Ints
    count: Ints
    before: Ints
    unit: int

    def __len__(self) -> int:
        return len(self.first)

    def cut(self, start: int, stop: int) -> Extents:
        """Those at these places."""
        part = slice(start, stop)
        return Extents(self.first[part], self.count[part], self.before[part], self.unit)


def extents(pages: Ints, page_size: int, most: int) -> Extents:
    """The extents of these pages, of at most `most` tokens each; `most` 0: a page each."""
    if not most:
        before = np.arange(len(pages), dtype=np.int64) * page_size
        return Extents(pages * page_size, np.full_like(pages, page_size), before, page_size)
    unit = gcd(page_size, most)
    units = _units(pages, page_size // unit)
    place, length = runs_of(units)
    step = most // unit
    pieces = -(-length // step)
    number = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = np.repeat(place, pieces) + number * step
    count = np.minimum(step, np.repeat(place + length, pieces) - start)
    return Extents(units[start] * unit, count * unit, start * unit, unit)


def most_tokens(page_size: int, room: int) -> int:
    """The largest extent of at most `room` tokens that holds whole pages, or divides a page."""
    if room >= page_size:
        return room // page_size * page_size
    return next(n for n in range(room, 0, -1) if page_size % n == 0)


def extent_blocks(
    copies: Copies, found: Extents, page_size: int, start: int, src_pages: Ints
) -> Blocks:
    """Ranges for the request's pages from `start` on, which are `src_pages` at the source.

    One per copy and run that lies in one extent and is consecutive at the source, whose rows
    hold nothing but the slice.
    """
    unit = found.unit
    src = _units(src_pages, page_size // unit)
    at = start * page_size + np.arange(len(src)) * unit
    extent = np.searchsorted(found.before, at, "right") - 1
    # Numbers that are neighbours where both are: a change of the extent leaves a gap.
    place, length = runs_of(src, at // unit + extent)
    extent, inside = extent[place], at[place] - found.before[extent[place]]
    first, count = found.first[extent], found.count[extent]
    row, offset, width = (
        column[:, None] for column in (copies.dst_row, copies.dst_offset, copies.width)
    )
    return Blocks(
        (copies.src[:, None] + src[place] * unit * width).ravel(),
        (copies.dst[:, None] + first * row + count * offset + inside * width).ravel(),
        (length * unit * width).ravel(),
    )


def _units(pages: Ints, per_page: int) -> Ints:
    if per_page == 1:
        return pages
    return (pages[:, None] * per_page + np.arange(per_page)).ravel()
