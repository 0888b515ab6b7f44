"""Triton kernels that pack, verify, unpack and clear draft rows. rows_gpu.py starts them.

Each takes three arrays of words of 8 bytes:

    jobs     [slots, 8]: slot, pages, first token, tokens, first head, heads, stamp, sum
    entries  [1 + entries, 4]: address; units of a row, of a head, and of a head in all entries
             before. Of the first line only the last one is used: of a head in all entries
    results  [slots]: a SlotCheck each

A unit is 16 bytes, the most that a thread copies at once. Slots and entries are addressed in units,
and masks are the same for both words of a unit: so Triton knows that it may copy whole units.
`pages` is the address of page numbers of 32 bits. Counts, heads and addresses are read from memory,
so no kernel is specialised on them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_mixkv.draft.layout import GOLDEN, HEADER, MIX, SEED, SlotCheck

UNIT = 16  # bytes
TOKENS, COLUMN, BLOCK = 64, 16, 1024  # of a program: tokens, words of each; words that it adds up
WARPS = 4

_GOLDEN, _MIX, _SEED = tl.constexpr(GOLDEN), tl.constexpr(MIX), tl.constexpr(SEED)
_TOKENS, _COLUMN, _BLOCK = tl.constexpr(TOKENS), tl.constexpr(COLUMN), tl.constexpr(BLOCK)
_HEADER = tl.constexpr(HEADER // 8)
_OK, _STALE, _DIFFERS = (tl.constexpr(int(check)) for check in list(SlotCheck)[:3])
_PACK, _UNPACK, _CLEAR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _weights(place: tl.tensor) -> tl.tensor:
    """As layout.weights."""
    found = (place.to(tl.uint32) + 1).to(tl.uint64) * _GOLDEN
    found = (found ^ (found >> 32)) * _MIX
    return ((found ^ (found >> 32)) | 1).to(tl.int64)


@triton.jit
def _words(unit: tl.tensor) -> tl.tensor:
    return tl.multiple_of((unit * 16).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def _move(
    jobs: tl.tensor, entries: tl.tensor, results: tl.tensor, PAGE: tl.constexpr, MODE: tl.constexpr
) -> None:
    """A program moves _COLUMN words of _TOKENS tokens, of one entry and job, in pages of PAGE.
    _PACK also adds up; _UNPACK needs what _verify has added up."""
    number = tl.program_id(2)
    if MODE == _UNPACK:  # the last slots first: what _verify has read last is still in the cache
        number = tl.num_programs(2) - 1 - number
    job, entry = jobs + number * 8, entries + (tl.program_id(1) + 1) * 4
    slot = _words(tl.load(job))
    tokens, heads = tl.load(job + 3).to(tl.int32), tl.load(job + 5).to(tl.int32)
    if MODE != _PACK:
        result = tl.full([], _OK, tl.int64)
        if MODE == _UNPACK:
            stamp = tl.load(job + 6)
            same = tl.load(slot + 1) == tl.load(job + 7) + stamp * _SEED
            result += tl.where(tl.load(slot) != stamp, _STALE, tl.where(same, _OK, _DIFFERS))
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(results + number, result)
        tokens = tl.where(result == _OK, tokens, 0)
    units = tl.load(entry + 2).to(tl.int32)
    width = units * heads * 2
    columns = (width + _COLUMN - 1) // _COLUMN
    first = tl.program_id(0) // columns * _TOKENS
    if first < tokens:
        token = first + tl.arange(0, _TOKENS)
        column = tl.program_id(0) % columns * _COLUMN + tl.arange(0, _COLUMN)
        mask = (token < tokens)[:, None] & (column < width)[None, :]
        at = tl.load(job + 2).to(tl.int32) + token
        pages = tl.load(job + 1).to(tl.pointer_type(tl.int32))
        page = tl.load(pages + at // PAGE, mask=token < tokens, other=0).to(tl.int64)
        row = (page * PAGE + at % PAGE) * (tl.load(entry + 1) * 2)
        pool = _words(tl.load(entry) + tl.load(job + 4) * units) + row[:, None] + column[None, :]
        if MODE == _CLEAR:
            tl.store(pool, tl.full([_TOKENS, _COLUMN], 0, tl.int64), mask=mask)
        else:
            before = tl.load(entry + 3).to(tl.int32) * heads * tokens * 2
            place = before + (token * width)[:, None] + column[None, :]
            packed = slot + _HEADER + place
            if MODE == _PACK:
                data = tl.load(pool, mask=mask, other=0)
                tl.store(packed, data, mask=mask)
                tl.atomic_add(job + 7, tl.sum(data * _weights(place)), sem="relaxed")
            else:
                tl.store(pool, tl.load(packed, mask=mask, other=0), mask=mask)


@triton.jit
def _seal(jobs: tl.tensor, entries: tl.tensor, results: tl.tensor) -> None:
    """A program writes one header, behind what _move has packed and added up."""
    number = tl.program_id(0)
    job = jobs + number * 8
    slot, stamp = _words(tl.load(job)), tl.load(job + 6)
    tl.store(slot, stamp)
    tl.store(slot + 1, tl.load(job + 7) + stamp * _SEED)
    tl.store(results + number, _OK)


@triton.jit
def _verify(jobs: tl.tensor, entries: tl.tensor, results: tl.tensor) -> None:
    """A program adds up _BLOCK words of one slot."""
    job = jobs + tl.program_id(1) * 8
    words = (tl.load(job + 3) * tl.load(job + 5) * tl.load(entries + 3)).to(tl.int32) * 2
    first = tl.program_id(0) * _BLOCK
    if first < words:
        place = first + tl.arange(0, _BLOCK)
        packed = _words(tl.load(job)) + _HEADER + place
        data = tl.load(packed, mask=place < words, other=0)
        tl.atomic_add(job + 7, tl.sum(data * _weights(place)), sem="relaxed")


def compiled(capability: int, page_size: int) -> dict[str, Any]:
    """The kernels for GPUs of this compute capability, 90 for sm_90. It needs no GPU."""

    def build(kernel: Any, **constants: Any) -> Any:
        types = {name: "constexpr" if name in constants else "*i64" for name in kernel.arg_names}
        target = GPUTarget("cuda", capability, 32)
        source = ASTSource(kernel, types, {name: int(n) for name, n in constants.items()})
        return triton.compile(source, target=target, options={"num_warps": WARPS})

    return {
        "pack": build(_move, PAGE=page_size, MODE=_PACK.value), "seal": build(_seal),
        "verify": build(_verify), "unpack": build(_move, PAGE=page_size, MODE=_UNPACK.value),
        "clear": build(_move, PAGE=page_size, MODE=_CLEAR.value),
    }  # fmt: skip
