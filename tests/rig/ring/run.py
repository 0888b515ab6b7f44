"""Run a case with one forked process per rank: real managers, bootstrap servers, ZMQ and transfers.

SGLang is imported once, in the parent. Each rank is a fork that publishes its own ServerArgs and
rank numbers, builds SGLang's own KV pools and KV args, and calls the classes that get_kv_class
returns, as SGLang's schedulers do. Callables in `Case.special` (special.py) inject faults.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any

import pytest
from rig.ring.memory import RankReport
from rig.ring.model import Case, draft_bytes
from rig.ring.rank import LIMIT_S, Rank
from rig.ring.special import Key, Shared
from rig.ring.unserved import skip_unserved

from mixkv_demo.ports import free_port
from sglang_mixkv.engine.releases import sglang_version

REPORT_S = 3 * LIMIT_S
"""Time limit without a report. It is longer than a rank's wait for others, so that the rank can
report what it waited for."""
LOOK_S = 0.05
SIDES = "prefill", "decode"


@dataclass
class Outcome:
    prefill: list[RankReport]
    decode: list[RankReport]

    @classmethod
    def of(cls, reports: Mapping[Key, RankReport]) -> Outcome:
        return cls(*([one for key, one in reports.items() if key[0] == side] for side in SIDES))

    @property
    def wrong(self) -> list[str]:
        return [w for r in self.prefill + self.decode for w in (*r.wrong, r.error) if w]

    @property
    def statuses(self) -> set[str]:
        return {s for r in self.prefill + self.decode for s in r.status}

    @property
    def reasons(self) -> str:
        return "\n".join(reason for r in self.prefill + self.decode for reason in r.reasons)

    def total(self, *key: str) -> float:
        """Sum the series with this name and these first labels over all ranks."""
        found = [one for r in self.prefill + self.decode for one in r.counted.items()]
        return sum(value for at, value in found if at[: len(key)] == key)


class Stages:
    """A stand-in for SGLang's PP group with the one broadcast that PPConsensusStore needs."""

    def __init__(self, queue: Any, size: int) -> None:
        self._queue, self._size = queue, size

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        if value is None:
            return self._queue.get(timeout=LIMIT_S)
        for _ in range(self._size - 1):
            self._queue.put(value)
        return value


def _rank_main(
    make: type[Rank], case: Case, side: str, rank: int, ports: list[int], pipe: Any, go: Any,
    life: int,
) -> None:  # fmt: skip
    gc.freeze()  # collecting the parent's million objects would stop a rank for a second
    report = RankReport(side, rank)
    try:
        one = make(case, side, rank, ports, life)
        report = one.report
        one.start_manager()
        one.run()
        report.counted = one.counted()
        report.wrong += one.left_behind()
    except BaseException:
        report.error = traceback.format_exc()
    pipe.send(report)
    go.wait(REPORT_S)
    os._exit(0)


def ranks_of(case: Case) -> list[Key]:
    """Return the ranks of both sides."""
    prefill = case.prefills * case.prefill_tp * case.prefill_dp * case.prefill_pp
    decode = case.decode_tp * case.decode_dp
    return [*(("prefill", r) for r in range(prefill)), *(("decode", r) for r in range(decode))]


def _skip_what_0_5_21_does_not_move(case: Case) -> None:
    """Skip targets that SGLang 0.5.21 cannot move even without the plugin
    (docs/compatibility.md)."""
    if sglang_version() != "0.5.21":
        return
    if not all(case.target.index_k):
        pytest.skip("SGLang 0.5.21 does not pair index keys that some layers lack")
    if case.target_window and case.prefill_tp != case.decode_tp:
        pytest.skip("SGLang 0.5.21 does not slice a sliding-window group")


def run(case: Case) -> Outcome:
    """Run a case, and return after every rank's process has ended."""
    _skip_what_0_5_21_does_not_move(case)
    skip_unserved(case.algorithm, dcp_size=case.dcp, disaggregation_decode_enable_radix_cache=False)
    servers = start(case, [free_port() for _ in range(case.prefills)])
    try:
        reports = servers.reports()
    finally:
        servers.end()
    return Outcome.of(reports)


def start(case: Case, ports: list[int], sides: Collection[str] = SIDES) -> Servers:
    """Start the ranks of these sides. If only decode is started, prefill must already be up, and
    the caller must call `all_sent`."""
    context = mp.get_context("fork")
    shared = Shared(
        bootstrap_up=[context.Event() for _ in ports],
        all_sent=context.Event(),
        injected=context.Barrier(sum(side in sides for side, _ in ranks_of(case))),
        pp_groups={
            i: Stages(context.Queue(), case.prefill_pp)
            for i in range(case.prefills * case.prefill_tp * case.prefill_dp)
        },
    )
    for event in shared.bootstrap_up if "prefill" not in sides else ():
        event.set()
    return Servers(replace(case, shared=shared), context, ports, sides=sides)


def right(case: Case) -> Outcome:
    """Run a case, and check that every byte is correct, and that no unneeded byte is sent."""
    return check_right(case, run(case))


def check_right(case: Case, outcome: Outcome) -> Outcome:
    assert outcome.wrong == [], "\n".join([str(case), *outcome.wrong])
    assert outcome.statuses == {"success"}, outcome.reasons
    assert outcome.total("sent_bytes_total") == outcome.total("needed_bytes_total")
    assert outcome.total("sent_bytes_total") == draft_bytes(case)
    assert outcome.total("rooms_total", "warm") == case.decode_tp * len(case.requests)
    return outcome


class Servers:
    """The ranks of a case: their processes, and the pipes for their reports. `away`: ranks that a
    test has killed."""

    def __init__(
        self, case: Case, context: Any, ports: list[int], make: type[Rank] = Rank,
        sides: Collection[str] = SIDES,
    ) -> None:  # fmt: skip
        self._case, self._context, self._make = case, context, make
        self._ports, self._go = ports, context.Event()
        self._keys, self.away = [key for key in ranks_of(case) if key[0] in sides], set[Key]()
        self._processes: dict[Key, Any] = {}
        self._pipes: dict[Key, Any] = {}
        for key in self._keys:
            self._start(key, 0)

    def _start(self, key: Key, life: int) -> None:
        here, there = self._context.Pipe()
        arguments = (self._make, self._case, *key, self._ports, there, self._go, life)
        self._processes[key] = self._context.Process(target=_rank_main, args=arguments)
        self._processes[key].start()
        there.close()
        self._pipes[key] = here

    def reports(self, limit_s: float = REPORT_S) -> dict[Key, RankReport]:
        """Return all reports except those of ranks that were killed and not restarted. `limit_s`:
        the time limit without a report."""
        found: dict[Key, RankReport] = {}
        until = time.monotonic() + limit_s
        while missing := [k for k in self._keys if k not in found and k not in self.away]:
            pipes = {self._pipes[key]: key for key in missing}
            for pipe in wait(list(pipes), LOOK_S):
                key, report = pipes[pipe], self._take(pipe)
                if report is not None or (key not in self.away and self._pipes[key] is pipe):
                    found[key] = report or self._without_report(key)
                    until = time.monotonic() + limit_s
            self._look(found)
            if time.monotonic() > until:
                found |= {key: self._without_report(key) for key in missing if key not in found}
        return {key: found[key] for key in self._keys if key in found}

    def _look(self, found: dict[Key, RankReport]) -> None:
        """Let decode ranks compare once every prefill rank has reported."""
        prefill = [key for key in self._keys if key[0] == "prefill"]
        if prefill and all(key in found for key in prefill):
            self.all_sent()

    def all_sent(self) -> None:
        self._case.shared.all_sent.set()

    @staticmethod
    def _take(pipe: Any) -> RankReport | None:
        """Return a rank's report, or None if its process ended without one."""
        try:
            found: RankReport = pipe.recv()
        except (EOFError, OSError):
            return None
        return found

    def _without_report(self, key: Key) -> RankReport:
        process = self._processes[key]
        process.join(1)
        code = process.exitcode
        how = "is still running" if code is None else f"ended with exit code {code}"
        return RankReport(*key, error=f"{key} did not report: its process {how}")

    def end(self) -> None:
        self._go.set()
        for process in self._processes.values():
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
