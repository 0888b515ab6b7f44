"""Rows of what was done to whom, and what requests saw of it.

A run prints its row, and appends it to the file that MIXKV_TESTS_EVIDENCE names, as a line of JSON.
`scripts/faults/table.py` makes a table of such a file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILE_ENV = "MIXKV_TESTS_EVIDENCE"
ROOT = Path(__file__).parents[2]


def kind(reason: str) -> str:
    """A reason without what is another one's each time."""
    return re.sub(r"\d[\d.:]*", "N", reason)[:160]


def outcomes(ended: Iterable[tuple[str, str, str]]) -> dict[str, Any]:
    """How many were warm, cold or failed, and why; of (status, state, reason) each."""
    found, reasons = Counter[str](), Counter[str]()
    for status, state, reason in ended:
        name = (state or "served") if status == "success" else status
        found[name] += 1
        if name not in ("warm", "served"):
            reasons[f"{name}: {kind(reason)}"] += 1
    return {**found, "reasons": dict(reasons)}


def publish(row: dict[str, Any]) -> None:
    row = {**row, "test": os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]}
    print(json.dumps(row))
    if file := os.environ.get(FILE_ENV):
        line = json.dumps({**row, "commit": _commit()})
        with open(file, "a") as lines:
            lines.write(line + "\n")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
