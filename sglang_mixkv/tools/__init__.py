"""The commands, a module each. They share the table of plain text here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Left-aligned columns, two spaces between; the first row is the header."""
    head, *others = rows
    widths = [max(map(len, column)) for column in zip(head, *others, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, ["-" * width for width in widths], *others)
    ]
