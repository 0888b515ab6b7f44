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
    """`name`, for --only; the module that runs it, and its arguments; what it shows. `is_long`: it
    may take all the time that is left."""

    name: str
    module: str
    about: str
    needs_gpu: bool = False
    args: tuple[str, ...] = ()
    is_long: bool = False


PARTS = (
    Part("kernels", "part_kernels", "the copy kernel writes what numpy writes"),
    Part("bandwidth", "part_bandwidth", "pack and scatter beside the device's own copy", True),
    Part("order", "part_order", "pack and scatter wait for the other streams"),
    Part("flashinfer", "part_flashinfer", "scatter beside FlashInfer's paged append", True),
    Part("memory", "part_memory", "a send goes on where the GPU has no memory left"),
    Part("mooncake", "part_transfer", "KV in GPU memory over Mooncake", args=("mooncake",)),
    Part("nixl", "part_transfer", "KV in GPU memory over NIXL", args=("nixl",)),
    Part("demo", "part_demo", "SGLang serves the small pair on CUDA", True, is_long=True),
)


@dataclass
class Found:
    """What a part that passed says in one line, and its figures. `short`: those for a table."""

    says: str
    figures: list[Record] = field(default_factory=list)
    short: list[Record] = field(default_factory=list)


class Unpassed(Exception):
    """Why a part did not pass, and the figures that it has all the same."""

    def __init__(self, says: str, found: Found | None = None) -> None:
        super().__init__(says)
        self.found = found or Found("")


class Lacks(Unpassed):
    """The machine has not what the part needs: that is no failure."""


class Wrong(Unpassed):
    """The part has failed."""


@dataclass
class Outcome:
    """Of one part; `seconds`: how long it took; `output`: the last lines of one that has failed or
    was cut."""

    name: str
    verdict: str
    says: str
    seconds: float = 0.0
    figures: list[Record] = field(default_factory=list)
    short: list[Record] = field(default_factory=list)
    output: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, verdict: str, says: str, found: Found) -> Outcome:
        return cls(name, verdict, says, figures=found.figures, short=found.short)
