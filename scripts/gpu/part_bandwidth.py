"""Pack and scatter beside the device's own copy of the same bytes (scripts/bench/kernels.py), and
what a launch costs."""

from __future__ import annotations

import argparse
from itertools import product

import kernels
import torch
from parts import Found, Record, Wrong

TOKENS = (1 << 10, 8 << 10, 32 << 10, 128 << 10)
SMALL = (64, 256)  # tokens, where the launch is all that a copy costs
SMALL_WIDTH = 256
LAYOUTS = ("contiguous", "random")


def fits(tokens: int, width: int) -> bool:
    """Whether this case's memory is a part of what the GPU has left: the strided rows, the packed
    ones twice, and what comparing them takes."""
    size = kernels.ENTRIES * tokens * width
    free, _ = torch.cuda.mem_get_info()
    return (kernels.FAN + 4) * size < free // 2


def measured(options: argparse.Namespace) -> list[Record]:
    tokens = [count for count in TOKENS if count <= options.tokens]
    sizes = [*product(SMALL, (SMALL_WIDTH,)), *product(tokens, kernels.WIDTHS)]
    found = []
    for kind, layout, (count, width) in product(("pack", "scatter"), LAYOUTS, sizes):
        if fits(count, width):
            case = kind, count, width, layout
            try:
                found.append(kernels.measure(*case, options.repeats, options.gpu))
            except Exception as error:
                raise Wrong(f"{case}: {error!r}", Found("", found)) from error
            torch.cuda.empty_cache()
    return found


def summed_up(records: list[Record]) -> list[Record]:
    """By kind, layout and tokens: over all widths of whole words of 16, GB/s of the widest. What
    a launch takes shows where it is all."""
    found: dict[tuple[str, str, int], list[Record]] = {}
    for record in records:
        if record["word"] == 16:
            key = (record["kind"], record["layout"], record["tokens"])
            found.setdefault(key, []).append(record)
    widest = {key: max(group, key=lambda r: r["width"]) for key, group in found.items()}
    return [
        {"kind": kind, "layout": layout, "tokens": tokens,
         "GB/s": widest[kind, layout, tokens]["kernel GB/s"],
         "copy GB/s": widest[kind, layout, tokens]["device copy GB/s"],
         "share of copy, least": min(r["share_of_copy"] for r in group),
         "share of copy, most": max(r["share_of_copy"] for r in group),
         "launch us": _least(group, "kernel launch us") if tokens in SMALL else "",
         "copy's launch us": _least(group, "device copy launch us") if tokens in SMALL else "",
         "call us": min(r["call us"] for r in group)}
        for (kind, layout, tokens), group in found.items()
    ]  # fmt: skip


def _least(group: list[Record], name: str) -> float:
    return float(min(record[name] for record in group))


def run(options: argparse.Namespace) -> Found:
    torch.cuda.set_device(options.gpu)
    records = measured(options)
    short, judged = summed_up(records), kernels.judged(records)
    small = [r for r in records if r["tokens"] in SMALL]
    launch = f"a launch {min(r['kernel launch us'] for r in small):.0f} us" if small else ""
    if not judged:
        says = f"{launch}; no copy is large enough to judge"
        return Found(says, records, short)
    least = min(judged, key=lambda r: r["share_of_copy"])
    says = (
        f"{least['share_of_copy']:.0%} of the device's copy at least, from "
        f"{kernels.FROM_BYTES >> 20} MiB on ({least['kind']}, {least['layout']}, "
        f"{least['tokens']:,} x {least['width']} B); {launch}"
    )
    found = Found(says, records, short)
    if least["share_of_copy"] < options.share:
        raise Wrong(f"{says}; expected {options.share:.0%}", found)
    return found
