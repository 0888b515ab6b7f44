"""Run `sglang.launch_server` with faults in the drafter's KV, for tests.

While the file named by TEST_CORRUPT_WHILE exists, K and V are swapped when slots are packed, with
correct stamps and sums. (A different order of rows would change nothing, since attention reads K
and V of a row together.) With TEST_POISON_POOL, the drafter's pool contains large numbers instead
of zeros.

SGLang's child processes also import this file. Tests must not, since it changes the process.
"""

from __future__ import annotations

import copy
import os
import runpy
from pathlib import Path
from typing import Any

from sglang_mixkv.draft.rows import DraftRows

WHILE, POISON = "TEST_CORRUPT_WHILE", "TEST_POISON_POOL"
_init, _pack = DraftRows.__init__, DraftRows.pack


def init(self: DraftRows, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    for entry in self.entries if POISON in os.environ else ():
        entry.fill_(0x42)  # 48.5 in bfloat16


def pack(self: DraftRows, *args: Any) -> None:
    rows = copy.copy(self)
    if WHILE in os.environ and Path(os.environ[WHILE]).exists():
        rows._pools = self._pools[::-1]
    _pack(rows, *args)


DraftRows.__init__, DraftRows.pack = init, pack  # type: ignore[method-assign]

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
