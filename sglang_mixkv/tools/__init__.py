"""The commands, one module each, and their shared helpers for arguments and output."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from textwrap import wrap
from typing import Any

import msgspec

WIDTH = 100


def parser(command: str, description: str | None) -> argparse.ArgumentParser:
    name, formatter = f"python -m sglang_mixkv {command}", argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(name, description=description, formatter_class=formatter)


def as_json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def hidden(text: str) -> str:
    """Mask a URL's user and password, and its query, which may hold a key, for use in reports."""
    return re.sub(r"(://[^?\s]*)\?\S+", r"\1?***", re.sub(r"://[^/?@\s]*@", "://***@", text))


def printable(text: str) -> str:
    """Replace control characters in a server's text, except line ends."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def bounded(least: int, most: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from `least` to `most`."""

    def number(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected {least} to {most}, got {text!r}")
        return int(text)

    return number


def point(text: str, first: str = "") -> list[str]:
    """Wrap a paragraph. `first` goes before the first line, as many spaces before the others."""
    return wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Format rows, the header first, as columns two spaces apart, with numbers right-aligned."""
    columns = []
    for head, *cells in zip(*rows, strict=True):
        width = max(map(len, (head, *cells)))
        side = ">" if all(re.fullmatch(r"-|[\d,.]+%?( .*)?", cell) for cell in cells) else "<"
        columns.append([f"{cell:{side}{width}}" for cell in (head, "-" * width, *cells)])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
