"""`sglang.launch_server` that packs wrong draft KV, its stamps right, while a file exists: K where
V belongs. With a variable, the drafter's pool holds large numbers where a fresh one holds zeros.

SGLang's child processes import this file as well.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

from sglang_mixkv.draft.rows import HEADER, DraftRows

WHILE = "TEST_CORRUPT_WHILE"
POISON = "TEST_POISON_POOL"
_init, _pack = DraftRows.__init__, DraftRows.pack


def init(self: DraftRows, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    for entry in self.entries if POISON in os.environ else ():
        entry.fill_(0x42)  # 48.5 in bfloat16


def pack(self: DraftRows, rows: Any, heads: range, slot: Any, stamp: int) -> None:
    _pack(self, rows, heads, slot, stamp)
    size = len(rows) * self.bytes_per_head * len(heads)
    if Path(os.environ[WHILE]).exists():
        payload = slot[HEADER : HEADER + size]
        payload.copy_(payload.roll(size // 2))


DraftRows.__init__, DraftRows.pack = init, pack  # type: ignore[method-assign]

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
