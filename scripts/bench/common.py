"""Helpers that the benchmarks share: options, tables and JSON.

A result has named lists of flat records. It is printed as tables. `--json FILE` also writes it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Parts = dict[str, list[Record]]


def options(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--repeats", type=int, default=0, help="samples of each figure")
    return parser


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
