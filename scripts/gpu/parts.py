"""The parts of the check, and what becomes of one.

A part is a module with `run(options) -> Found`. It raises Lacks for what the machine has not, Wrong
for what must not be. Each runs in a process of its own: what one does to its CUDA context, or
leaves in memory, is gone with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]

PASSED, FAILED, LACKS = "passed", "failed", "lacks"


@dataclass(frozen=True)
class Part:
    """`name`, for --only; the module that runs it, and its arguments; what it shows. `needs`, and
    `dry` for its run without a GPU: names of needs.py; None if it has no such run. `is_long`: it
    may take all the time that is left."""

    name: str
    module: str
    about: str
    needs: tuple[str, ...] = ()
    dry: tuple[str, ...] | None = ()
    args: tuple[str, ...] = ()
    is_long: bool = False


CHANNEL = ("plugin",)
PARTS = (
    Part("rows", "part_rows", "pack, unpack and verify beside a device copy", CHANNEL, CHANNEL),
    Part("order", "part_order", "what the channel waits for: events, and its copies", CHANNEL,
         CHANNEL),
    Part("mooncake", "part_transfer", "pack, read and unpack between two processes, over Mooncake",
         (*CHANNEL, "mooncake-cuda"), (*CHANNEL, "mooncake"), ("mooncake",)),
    Part("nixl", "part_transfer", "the same over NIXL", (*CHANNEL, "nixl"), (*CHANNEL, "nixl"),
         ("nixl",)),
    Part("flashinfer", "part_flashinfer", "attention over unpacked pages is the single server's",
         (*CHANNEL, "flashinfer", "nvcc"), CHANNEL, is_long=True),
    Part("demo", "part_demo", "SGLang serves the small pair on CUDA",
         (*CHANNEL, "sglang", "mooncake-cuda", "compiler", "nvcc"), None, is_long=True),
)  # fmt: skip


@dataclass
class Found:
    """What a part that passed came to, in one line, and its figures, the chief ones last."""

    message: str
    figures: list[Record] = field(default_factory=list)


class Unpassed(Exception):
    """Why a part did not pass, and the figures that it has all the same."""

    def __init__(self, message: str, found: Found | None = None) -> None:
        super().__init__(message)
        self.found = found or Found("")


class Lacks(Unpassed):
    """The machine has not what the part needs: that is no failure."""


class Wrong(Unpassed):
    """The part has failed."""


@dataclass
class Outcome:
    """Of one part; `seconds`: how long it took; `output`: the last lines of one that has failed."""

    name: str
    verdict: str
    message: str
    seconds: float = 0.0
    figures: list[Record] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
