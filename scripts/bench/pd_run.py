"""Runs of bench_serving against a router, each one a row in ``runs.jsonl`` of one folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pd_client
import pd_figures
from common import machine
from pd_figures import Record
from rich.console import Console

from mixkv_demo.progress import QUIET_S
from sglang_mixkv.tools import simulated
from sglang_mixkv.tools.pages import fetch

WARMUP = 1
T = TypeVar("T")
Watch = Callable[[Callable[[], T]], T]
"""Makes a blocking call, and gives it up when there is no use in waiting for it."""


class BenchFailed(RuntimeError):
    """bench_serving ended without a result; the message has its last lines."""


class Runner:
    """``workload``: what has to be equal for two runs to be compared."""

    def __init__(self, folder: Path, workload: Record, console: Console) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.workload = workload
        self._console = console

    @property
    def rows(self) -> list[Record]:
        """All runs so far, the last one of each label."""
        return pd_figures.load(self.folder / "runs.jsonl")

    def run(
        self,
        label: str,
        url: str,
        options: Sequence[str],
        metrics: str,
        env: Mapping[str, str] | None = None,
        watch: Watch[Any] = lambda call: call(),
    ) -> None:
        """Send the workload and append the row. ``metrics``: a page with the prefill's."""
        output = self.folder / "bench_serving.jsonl"
        about = machine()
        made_up = simulated.reason(url)
        if made_up:
            raise BenchFailed(made_up)
        before = fetch(metrics)
        replies = self._drive(label, self._command(url, options, output), env or {}, watch)
        result = json.loads(output.read_text().splitlines()[-1])
        row = {
            "label": label,
            "workload": self.workload,
            "figures": pd_figures.figures(result, replies[WARMUP:], before, fetch(metrics)),
            "machine": {**about, "load_at_end": os.getloadavg()[0]},
        }
        pd_figures.append(self.folder / "runs.jsonl", row)

    def _command(self, url: str, options: Sequence[str], output: Path) -> list[str]:
        return [
            *(sys.executable, str(Path(pd_client.__file__))),
            *("--backend", "sglang", "--base-url", url, *options),
            *("--num-prompts", str(self.workload["prompts"])),
            *("--max-concurrency", str(self.workload["max_concurrency"])),
            *("--warmup-requests", str(WARMUP), "--disable-tqdm"),
            *("--output-details", "--output-file", str(output)),
        ]

    def _drive(
        self, label: str, command: list[str], env: Mapping[str, str], watch: Watch[Any]
    ) -> list[Record]:
        """Run bench_serving to its end and collect the replies; it does not outlive this call."""
        log = self.folder / "bench_serving.log"
        replies: list[Record] = []
        total, reported = WARMUP + self.workload["prompts"], time.monotonic()
        with log.open("w") as out:
            child = subprocess.Popen(
                command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=out, text=True
            )

            def read() -> int:
                nonlocal reported
                for line in child.stdout or ():
                    if reply := pd_client.parse(line):
                        replies.append(reply)
                        if time.monotonic() - reported > QUIET_S:
                            reported = time.monotonic()
                            self._console.print(f"  {label}: {len(replies)} of {total} requests")
                    else:
                        print(line, end="", file=out, flush=True)
                return child.wait()

            try:
                status = watch(read)
            finally:
                child.kill()
                child.wait()
        if status:
            end = "\n".join(log.read_text().splitlines()[-10:])
            raise BenchFailed(f"bench_serving ended with status {status}; {log} ends with:\n{end}")
        return replies
