"""What the benchmarks share: options, samples in turns, intervals of 95 %, tables and JSON.

A result is named lists of flat records. It is printed as tables, and `--json FILE` writes it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Record = dict[str, Any]
Parts = dict[str, list[Record]]
DRAWS = 1000  # of a bootstrap


def options(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=0, help="samples of each figure")
    return parser


def interleave(methods: dict[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    """`count` samples of each method. They are taken in turns, so that what else the machine does
    hits all alike, and each turn draws its order, so that none always follows the same other."""
    samples: dict[str, list[float]] = {name: [] for name in methods}
    order = random.Random(count)
    for _ in range(count):
        for name in order.sample(list(methods), len(methods)):
            samples[name].append(methods[name]())
    return samples


def interval(statistic: Callable[..., Any], *samples: Any) -> tuple[float, float]:
    """95 % of a statistic of these samples, by a bootstrap."""
    rng = np.random.default_rng(1)
    drawn = [statistic(*(rng.choice(one, len(one)) for one in samples)) for _ in range(DRAWS)]
    low, high = np.percentile(drawn, [2.5, 97.5]).tolist()
    return low, high


def line(seconds: dict[int, Any]) -> tuple[float, float]:
    """a, and b a byte, through all seconds by bytes. Least squares weigh each by the median of its
    size, since noise grows with time."""
    x = np.concatenate([np.full(len(taken), size) for size, taken in seconds.items()])
    weight = np.concatenate([np.full(len(t), 1 / np.median(t)) for t in seconds.values()])
    b, a = np.polyfit(x, np.concatenate(list(seconds.values())), 1, w=weight)
    return float(a), float(b)


def show(arguments: argparse.Namespace, parts: Parts) -> None:
    """Print the result, and write it where the options say."""
    if arguments.json:
        result = {"quick": arguments.quick, "machine": machine(), "parts": parts}
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


def machine() -> Record:
    return {
        "architecture": platform.machine(), "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(), "load": os.getloadavg()[0],
    }  # fmt: skip
