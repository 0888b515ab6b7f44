"""A steady flow of requests to several prefill servers, and what is done to them meanwhile.

    run(Flow(...), at={60: lambda ring: ring.stop(("prefill", 1))})  ->  Result

Between the requests the test acts on processes and links, by the number of requests that have
ended. Ranks of a server do not wait for each other, as SGLang's do: here the target goes on without
a rank that only sends draft KV.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rig import evidence
from rig.flow_case import BEGUN, Flag, Flow, FlowReport, OfFlow
from rig.flow_rank import FlowRank
from rig.flow_result import Result
from rig.memory import RankReport
from rig.model import Case
from rig.rank import LIMIT_S, free_port
from rig.ring import Servers, ranks_of
from rig.special import Key
from rig.stages import Stop

RUN_S = 240

TIMEOUTS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "3",
}


def _main(
    case: Case, side: str, rank: int, ports: list[int], pipe: Any, go: Any, life: int
) -> None:
    gc.freeze()  # a million objects of the parent: to look at them stops a rank for a second
    report: RankReport = FlowReport(side, rank)
    try:
        one = FlowRank(case, side, rank, ports, life)
        report = one.report
        one.start_manager()
        case.shared.ready[ranks_of(case).index((side, rank))] = 1
        one.run()
        one.look_at_what_is_left()
    except BaseException:
        report.error = traceback.format_exc()
        case.shared.over.set()
    pipe.send(report)
    go.wait(LIMIT_S)
    os._exit(0)


class Ring(Servers):
    """What a test may do to the processes."""

    def __init__(self, case: Case, context: Any, ports: list[int]) -> None:
        self.away: set[Key] = set()
        self.acting = False
        super().__init__(case, context, ports, _main)

    def stop(self, *keys: Key) -> None:
        self._signal(signal.SIGSTOP, *keys)

    def go_on(self, *keys: Key) -> None:
        self._signal(signal.SIGCONT, *keys)

    def close_port(self, key: Key) -> None:
        """The draft channel's; everything else of the rank goes on."""
        self._case.shared.closed[key[1]] = 1
        time.sleep(0.3)

    def open_port(self, key: Key) -> None:
        self._case.shared.closed[key[1]] = 0

    def at_stage(self, stage: str, act: Callable[[], object]) -> None:
        """Once a room that is `held` is there (rig/stages.py)."""
        self._case.shared.stop.act(stage, act)

    def _signal(self, number: signal.Signals, *keys: Key) -> None:
        for key in keys:
            os.kill(self._processes[key].pid, number)

    def kill(self, *keys: Key) -> None:
        self.away.update(keys)
        for key in keys:
            self._processes[key].kill()
            self._processes[key].join()

    def start(self, *keys: Key) -> None:
        """Anew, where they were killed; all ranks of a server at once."""
        for side, rank in keys:
            if side == "prefill":
                self._case.shared.bootstrap_up[rank // 2].clear()
        for key in keys:
            self._case.shared.ready[self._keys.index(key)] = 0
            self._start(key, 1)
        self.away.difference_update(keys)
        self.wait_until_ready(keys)

    def wait_until_ready(self, keys: Any = ()) -> None:
        numbers = [self._keys.index(key) for key in keys or self._keys]
        deadline = time.monotonic() + LIMIT_S
        while not all(self._case.shared.ready[n] for n in numbers):
            if time.monotonic() > deadline:
                raise TimeoutError("the ranks did not start")
            time.sleep(0.02)

    def all_reports(self) -> dict[Key, RankReport]:
        found: dict[Key, RankReport] = {}
        over, deadline = self._case.shared.over, time.monotonic() + RUN_S
        done = self._case.shared.done
        while missing := [k for k in self._keys if k not in found and k not in self.away]:
            for key in missing:
                pipe = self._pipes[key]
                if pipe.poll(0.05):
                    report = self._take(key)
                    if report is not None:
                        found[key] = report
                    elif key not in self.away and self._pipes[key] is pipe:
                        found[key] = RankReport(*key, error=f"{key} did not report")
            ended = (flag or ("decode", rank) in self.away for rank, flag in enumerate(done))
            if not self.acting and all(ended):
                over.set()
            if over.is_set():
                deadline = min(deadline, time.monotonic() + LIMIT_S)
            if time.monotonic() > deadline:
                return found | {k: RankReport(*k, error=f"{k} hangs") for k in missing}
        return found


Act = Callable[[Ring], None]


def run(flow: Flow, at: Mapping[int, Act], what: str) -> Result:
    """`at`: what is done once so many requests have ended; `what`: the same, in words. Every
    process has ended on return."""
    context = mp.get_context("fork")
    case = flow.case()
    shared = OfFlow(
        flow=flow,
        bootstrap_up=[context.Event() for _ in range(flow.prefills)],
        stages=context.RawArray("b", flow.requests),
        ready=context.RawArray("b", len(ranks_of(case))),
        closed=context.RawArray("b", 2 * flow.prefills),
        channel_ports=[free_port() if flow.same_ports else 0 for _ in range(2 * flow.prefills)],
        counts=context.RawArray("i", flow.decodes),
        done=context.RawArray("b", flow.decodes),
        acted=Flag(context),
        over=Flag(context),
        stop=Stop(context),
    )
    case = replace(case, shared=shared)
    marks: dict[int, tuple[float, float]] = {}
    problems: list[str] = []
    ring = Ring(case, context, [free_port() for _ in range(flow.prefills)])
    acting = threading.Thread(target=lambda: problems.extend(_act(ring, case, at, marks)))
    acting.start()
    try:
        reports = ring.all_reports()
    finally:
        case.shared.over.set()
        acting.join()
        ring.go_on(*(key for key in ranks_of(case) if key not in ring.away))
        ring.end()
    for (side, rank), report in reports.items():
        lines = [*report.wrong, *filter(None, [report.error])]
        problems += [f"{side} {rank}: {line}" for line in lines]
    gone = [number for number, stage in enumerate(shared.stages) if stage == BEGUN]
    result = Result(flow, reports, marks, problems, gone)
    evidence.publish({"what": what, "backend": backend_of(case), **result.row()})
    return result


def backend_of(case: Case) -> str:
    is_tcp = case.backend == "nixl" and os.environ.get("UCX_TLS") == "tcp"
    return case.backend + "-tcp" * is_tcp + " alone" * (not case.prefill_mixkv)


def _act(
    ring: Ring, case: Case, at: Mapping[int, Act], marks: dict[int, tuple[float, float]]
) -> Iterator[str]:
    counts, over = case.shared.counts, case.shared.over
    for number, act in sorted(at.items()):
        while sum(counts) < number:
            if over.is_set():
                yield f"the flow ended before {number} requests had"
                return
            time.sleep(0.001)
        ring.acting, began = True, time.monotonic()
        try:
            act(ring)
        except Exception:
            yield traceback.format_exc()
        marks[number] = began, time.monotonic()
        ring.acting = False
    case.shared.acted.set()
