"""Helpers that the benchmarks share: options, turns, tables and JSON.

A result has named lists of flat records. It is printed as tables. `--json FILE` also writes it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))  # the rig

Record = dict[str, Any]
Parts = dict[str, list[Record]]
Result = TypeVar("Result")


def options(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--repeats", type=int, default=0, help="samples of each figure")
    return parser


def take_turns(
    ways: Mapping[str, Callable[[], Result]], turns: int, warm_up: int
) -> dict[str, list[Result]]:
    """Call each way once per turn, in a random order. Return the results of all turns after those
    to warm up, by way."""
    found: dict[str, list[Result]] = {way: [] for way in ways}
    draw = random.Random(turns)
    for _ in range(warm_up + turns):
        for way in draw.sample([*ways], len(ways)):
            found[way].append(ways[way]())
    return {way: results[warm_up:] for way, results in found.items()}


def show(arguments: argparse.Namespace, parts: Parts) -> None:
    """Print the result, and write it to the file of --json."""
    if arguments.json:
        result = {"quick": arguments.quick, "parts": parts}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.quick:
        print("Quick run: its figures mean nothing.\n")
    for name, records in parts.items():
        print(f"## {name}\n\n{table(records)}")


def table(records: list[Record]) -> str:
    names = list(dict.fromkeys(name for record in records for name in record))
    rows = [names, ["---"] * len(names)]
    rows += [[_cell(record.get(name, "")) for name in names] for record in records]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
