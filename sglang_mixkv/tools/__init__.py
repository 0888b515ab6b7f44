"""The commands, a module each. They share the table of plain text and the word on a long wait."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Timer

PATIENCE_S = 1.0


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Left-aligned columns, two spaces between; the first row is the header."""
    head, *others = rows
    widths = [max(map(len, column)) for column in zip(head, *others, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, ["-" * width for width in widths], *others)
    ]


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says on a terminal what takes longer than a second."""
    timer = Timer(PATIENCE_S, lambda: print(f"{what} ...", file=sys.stderr, flush=True))
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
