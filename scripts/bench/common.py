"""What the benchmarks share: their options, samples, the machine's description, JSON, tables.

A result file is one JSON object: `bench`, `quick`, `machine`, `checks` (target and value of
each figure that has a target) and `parts`, named lists of flat records. Times are in
seconds, in the tables in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from render import Record, markdown

DRAWS = 1000  # of a bootstrap

# What a Mooncake engine reads when it is made. No limit of the transport is lifted here.
MOONCAKE_ENV = {
    "MC_FORCE_TCP": "1",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
    "OMP_NUM_THREADS": "1",
}
PACKAGES = (
    "numpy", "torch", "triton", "sglang", "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda", "nixl", "flashinfer-python",
)  # fmt: skip


def options(description: str) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--repeats", type=int, default=0, help="samples of each figure")
    return parser


def repeats(arguments: argparse.Namespace, normally: int = 9) -> int:
    """Samples of each figure: at least 7 unless told otherwise or quick."""
    return arguments.repeats or (3 if arguments.quick else normally)


# ---------------------------------------------------------------- samples


@dataclass
class Samples:
    """Seconds of one figure, and of its parts, one value a repetition."""

    total: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, total: float, **parts: float) -> None:
        self.total.append(total)
        for name, value in parts.items():
            self.parts.setdefault(name, []).append(value)

    def record(self) -> Record:
        """Median and quartiles of the total, median of each part; all in seconds."""
        low, middle, high = np.percentile(self.total, [25, 50, 75]).tolist()
        medians = {name: float(np.median(values)) for name, values in self.parts.items()}
        return {"median": middle, "q1": low, "q3": high, "samples": len(self.total), **medians}


def ratio(taken: Samples, base: Samples) -> float:
    """The median over the turns of one method's time to another's of the same turn."""
    return float(np.median(np.divide(taken.total, base.total)))


def interleave(methods: dict[str, Callable[[Samples], None]], count: int) -> dict[str, Samples]:
    """`count` samples of each method, taken in turns, so that the machine's mood hits all; in
    an order drawn anew each turn, so that none always runs on what the same other left behind."""
    samples = {name: Samples() for name in methods}
    order = random.Random(count)
    for _ in range(count):
        for name in order.sample(list(methods), len(methods)):
            methods[name](samples[name])
    return samples


def interval(statistic: Callable[..., Any], *samples: Any) -> tuple[float, float]:
    """95 % of a statistic of these samples, as a bootstrap finds it."""
    rng = np.random.default_rng(1)
    drawn = [statistic(*(rng.choice(one, len(one)) for one in samples)) for _ in range(DRAWS)]
    low, high = np.percentile(drawn, [2.5, 97.5]).tolist()
    return low, high


def line(seconds: dict[int, Any]) -> tuple[float, float]:
    """a, and b a byte, through all seconds by bytes: least squares, each weighted by the median of
    its size, since noise grows with time."""
    x = np.concatenate([np.full(len(taken), size) for size, taken in seconds.items()])
    weight = np.concatenate([np.full(len(t), 1 / np.median(t)) for t in seconds.values()])
    b, a = np.polyfit(x, np.concatenate(list(seconds.values())), 1, w=weight)
    return float(a), float(b)


def alone(part: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a part returns, which runs in a fork of its own: a process has one rank."""
    context = mp.get_context("fork")
    here, there = context.Pipe()

    def body() -> None:
        there.send(part(*args, **options))
        os._exit(0)

    process = context.Process(target=body)
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.kill()
        process.join()


def elapsed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ---------------------------------------------------------------- results


@dataclass(frozen=True)
class Check:
    """A figure that has a target. `at_most`: the target is an upper bound."""

    name: str
    target: float
    value: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.at_most else self.value >= self.target


@dataclass
class Result:
    bench: str
    quick: bool
    parts: dict[str, list[Record]] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    lacks: str = ""
    machine: Record = field(default_factory=lambda: machine())

    def finish(self, arguments: argparse.Namespace) -> None:
        """Print the tables, and write what the options ask for."""
        self.machine.setdefault("load_at_end", os.getloadavg()[0])
        result = self.as_json()
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        print(markdown(result))

    def as_json(self) -> Record:
        checks = [{**asdict(check), "met": check.met} for check in self.checks]
        return {**asdict(self), "checks": checks}


# ---------------------------------------------------------------- the machine


def machine() -> Record:
    """What a reader must know to judge the figures; nothing that names the machine."""
    return {
        "processor": _first("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_kib("MemTotal") / 2**20, 1),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "memcpy_gb_s": round(_memcpy() / 1e9, 1),
        "load_at_start": os.getloadavg()[0],
    }


def _first(path: str, key: str) -> str:
    """The value of the first `key : value` line of a /proc file; empty if there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def _kib(key: str) -> int:
    return int((_first("/proc/meminfo", key) or "0").split()[0])


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _memcpy(size: int = 32 << 20) -> float:
    """Bytes a second of a copy between two places in memory, one thread, best of five."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    return size / min(elapsed(lambda: np.copyto(target, source)) for _ in range(5))
