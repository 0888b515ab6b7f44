"""Triton kernels that pack, unpack, settle and clear draft rows. rows_gpu.py starts them.

Each takes three arrays of 8-byte words:

    jobs     [slots, 8]: slot, pages, first token, tokens, first head, heads, stamp, sum
    entries  [entries, 4]: address; units of a row, of a head, and of a head in all earlier entries
    results  [slots]: a SlotCheck each

A unit is 16 bytes, the most that a thread copies at once. Slots and entries are addressed in units,
and masks are equal for both words of a unit, so that Triton copies whole units. `pages` is the
address of 32-bit page numbers. Counts, heads and addresses are read from memory, so no kernel is
specialised on them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_mixkv.draft.slot_format import GOLDEN, HEADER, MIX, SEED, SlotCheck

UNIT = 16  # bytes
TOKENS, COLUMN = 64, 16  # a tile's tokens, and the words of each
WARPS = 4

_GOLDEN, _MIX, _SEED = tl.constexpr(GOLDEN), tl.constexpr(MIX), tl.constexpr(SEED)
_TOKENS, _COLUMN = tl.constexpr(TOKENS), tl.constexpr(COLUMN)
_HEADER = tl.constexpr(HEADER // 8)
_OK, _STALE, _DIFFERS = (tl.constexpr(int(check)) for check in list(SlotCheck)[:3])
MODES = ("pack", "unpack", "seal", "settle", "clear")
_PACK, _UNPACK, _SEAL, _SETTLE, _CLEAR = (tl.constexpr(mode) for mode in range(len(MODES)))


@triton.jit
def _weights(place: tl.tensor) -> tl.tensor:
    """Return the same weights as slot_format.weights."""
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
    """Move tiles of _COLUMN words of _TOKENS tokens, of one entry and job, in pages of PAGE tokens.
    Each program moves one tile, or several if there are fewer programs. _PACK and _UNPACK also sum
    the stored words, and _UNPACK stores nothing if the stamp differs. After them, _SEAL writes the
    headers; _SETTLE writes the verdicts, and zeros for each verdict but _OK."""
    number = tl.program_id(2)
    job, entry = jobs + number * 8, entries + tl.program_id(1) * 4
    slot, stamp = _words(tl.load(job)), tl.load(job + 6)
    tokens, heads = tl.load(job + 3).to(tl.int32), tl.load(job + 5).to(tl.int32)
    if MODE == _UNPACK:
        tokens = tl.where(tl.load(slot) == stamp, tokens, 0)
    elif MODE != _PACK:
        result, total = tl.full([], _OK, tl.int64), tl.load(job + 7) + stamp * _SEED
        if MODE == _SEAL:
            tl.store(slot, stamp)
            tl.store(slot + 1, total)
        elif MODE == _SETTLE:
            differs = tl.where(tl.load(slot + 1) == total, _OK, _DIFFERS)
            result += tl.where(tl.load(slot) == stamp, differs, _STALE)
            tokens = tl.where(result == _OK, 0, tokens)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(results + number, result)
    units = tl.load(entry + 2).to(tl.int32)
    width = units * heads * 2
    columns = (width + _COLUMN - 1) // _COLUMN
    tiles = (tokens + _TOKENS - 1) // _TOKENS * columns if MODE != _SEAL else 0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        token = tile // columns * _TOKENS + tl.arange(0, _TOKENS)
        column = tile % columns * _COLUMN + tl.arange(0, _COLUMN)
        mask = (token < tokens)[:, None] & (column < width)[None, :]
        at = tl.load(job + 2).to(tl.int32) + token
        pages = tl.load(job + 1).to(tl.pointer_type(tl.int32))
        page = tl.load(pages + at // PAGE, mask=token < tokens, other=0).to(tl.int64)
        row = (page * PAGE + at % PAGE) * (tl.load(entry + 1) * 2)
        pool = _words(tl.load(entry) + tl.load(job + 4) * units) + row[:, None] + column[None, :]
        if MODE == _PACK or MODE == _UNPACK:  # noqa: SIM109
            before = tl.load(entry + 3).to(tl.int32) * heads * tokens * 2
            place = before + (token * width)[:, None] + column[None, :]
            packed = slot + _HEADER + place
            source, target = (pool, packed) if MODE == _PACK else (packed, pool)
            data = tl.load(source, mask=mask, other=0)
            tl.store(target, data, mask=mask)
            tl.atomic_add(job + 7, tl.sum(data * _weights(place)), sem="relaxed")
        else:
            tl.store(pool, tl.full([_TOKENS, _COLUMN], 0, tl.int64), mask=mask)


def compiled(capability: int, page_size: int) -> dict[str, Any]:
    """Compile the kernels for a compute capability (90 for sm_90). This needs no GPU."""
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": WARPS}
    types = {name: "constexpr" if name.isupper() else "*i64" for name in _move.arg_names}
    sources = (ASTSource(_move, types, {"PAGE": page_size, "MODE": n}) for n in range(len(MODES)))
    made = (triton.compile(source, target=target, options=options) for source in sources)
    return dict(zip(MODES, made, strict=True))
