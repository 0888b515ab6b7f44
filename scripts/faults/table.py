"""A Markdown table of the rows that tests of faults append to MIXKV_TESTS_EVIDENCE=FILE.

    MIXKV_TESTS_EVIDENCE=FILE pytest tests/protocol/test_links.py --full
    python scripts/faults/table.py FILE

Runs of one test at one commit are one row.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HEAD = (
    "what was done", "backend", "runs", "touched requests", "why not warm", "others",
    "slowest other", "wrong", "leaked", "commit", "test",
)  # fmt: skip
ORDER = "warm", "served", "cold", "failed"


def table(lines: Iterable[str]) -> str:
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in lines:
        row = json.loads(line)
        key = tuple(row[name] for name in ("what", "backend", "commit", "test"))
        groups.setdefault(key, []).append(row)
    rows = [HEAD, ("---",) * len(HEAD), *(_row(*group) for group in groups.items())]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _row(key: tuple[str, ...], runs: list[dict[str, Any]]) -> tuple[str, ...]:
    what, backend, commit, test = key
    reasons = Counter[str]()
    for run in runs:
        reasons += Counter(run["touched"]["reasons"])
    slowest = max(run["others"].get("slowest", 0.0) for run in runs)
    return (
        what, backend, str(len(runs)), _ends(run["touched"] for run in runs),
        "; ".join(f"{count} {reason}" for reason, count in reasons.most_common()),
        _ends(run["others"] for run in runs), f"{slowest:.2f} s" if slowest else "",
        str(sum(run["wrong"] for run in runs)), str(sum(run["leaked"] for run in runs)),
        f"`{commit}`", f"`{test.rpartition('/')[2]}`",
    )  # fmt: skip


def _ends(runs: Iterable[dict[str, Any]]) -> str:
    found = Counter[str]()
    for run in runs:
        found += Counter({k: v for k, v in run.items() if k not in ("reasons", "slowest")})
    names = [*ORDER, *(name for name in found if name not in ORDER)]
    return ", ".join(f"{found[name]} {name}" for name in names if found[name])


if __name__ == "__main__":
    print(table(Path(sys.argv[1]).read_text().splitlines()))
