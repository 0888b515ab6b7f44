"""Markdown tables of the rows that tests of faults append to MIXKV_TESTS_EVIDENCE=FILE.

    MIXKV_TESTS_EVIDENCE=FILE pytest tests/protocol/test_links.py --full
    python scripts/faults/table.py FILE [--short]

Runs of one case at one commit are one row; with --short those of one test are.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Run = dict[str, Any]
ALONE = " alone"  # of the backend, without the plugin
ENDS = "warm", "served", "cold", "failed", "gone with it"
LONG = (
    "what was done", "backend", "runs", "touched requests", "why not warm", "others",
    "slowest other", "wrong", "leaked", "commit", "test",
)  # fmt: skip
SHORT = (
    "what was done", "runs: Mooncake, NIXL", "touched: warm, cold, failed or gone",
    "others: warm, cold, failed", "slowest other",
)  # fmt: skip


def table(
    runs: list[Run],
    head: Sequence[str],
    key: Callable[[Run], Any],
    row: Callable[[list[Run]], Sequence[Any]],
) -> str:
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    rows = [head, ["---"] * len(head), *(row(runs) for runs in groups.values())]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in rows)


def case(run: Run) -> Any:
    return tuple(run[name] for name in ("what", "backend", "commit", "test"))


def test(run: Run) -> Any:
    found = re.search(r"::test_(\w+)", run["test"])
    assert found is not None, run["test"]
    return found[1].replace("_", " ") + ", stock" * is_stock(run)


def is_stock(run: Run) -> bool:
    return str(run["backend"]).endswith(ALONE)


def of_case(runs: list[Run]) -> Sequence[Any]:
    what, backend, commit, test = case(runs[0])
    reasons = Counter[str]()
    for run in runs:
        reasons += Counter(run["touched"]["reasons"])
    return (
        what, backend, len(runs), words(ends(runs, "touched")),
        "; ".join(f"{count} {reason}" for reason, count in reasons.most_common()),
        words(ends(runs, "others")), f"{slowest(runs):.2f} s",
        total(runs, "wrong"), total(runs, "leaked"), f"`{commit}`", f"`{test.rpartition('/')[2]}`",
    )  # fmt: skip


def of_test(runs: list[Run]) -> Sequence[Any]:
    touched, others = ends(runs, "touched"), ends(runs, "others")
    over_mooncake = sum(run["backend"].startswith("mooncake") for run in runs)
    warm, lost = touched["warm"] + touched["served"], touched["failed"] + touched["gone with it"]
    others_warm = others["warm"] + others["served"]
    return (
        test(runs[0]), f"{over_mooncake}, {len(runs) - over_mooncake}",
        f"{warm}, {touched['cold']}, {lost}",
        f"{others_warm}, {others['cold']}, {others['failed']}", f"{slowest(runs):.2f} s",
    )  # fmt: skip


def ends(runs: list[Run], whose: str) -> Counter[str]:
    found = Counter[str]()
    for run in runs:
        found += Counter({k: v for k, v in run[whose].items() if k not in ("reasons", "slowest")})
    return found


def words(found: Counter[str]) -> str:
    names = [*ENDS, *(name for name in found if name not in ENDS)]
    return ", ".join(f"{found[name]} {name}" for name in names if found[name])


def slowest(runs: list[Run]) -> float:
    return max(float(run["others"].get("slowest", 0.0)) for run in runs)


def total(runs: list[Run], name: str) -> int:
    return sum(int(run[name]) for run in runs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--short", action="store_true", help="one row a test")
    options = parser.parse_args()
    every = [json.loads(line) for line in options.file.read_text().splitlines()]
    if options.short:
        print(table(every, SHORT, test, of_test))
        print(f"\nIn all: {total(every, 'wrong')} wrong, {total(every, 'leaked')} leaked.")
    else:
        print(table(every, LONG, case, of_case))
