"""Traffic on the protocol ring: a schedule of requests, a disturbance, and a check.

    run(Traffic(...), at={60: lambda ring: ring.stop(("prefill", 1))}, what="...")  ->  Result

Schedule (traffic_case.py): a steady flow of requests to several prefill servers, or many of random
sizes, with pages and metadata rows from free lists, so that each is used many times.
Disturbance: what the test does to processes and links, by the number of requests that have ended;
or, drawn from a seed, requests that are aborted, and copies, reads and messages that fail.
Check: each request's pages and row when it succeeds, all memory that no request has, and what ranks
hold at the end (traffic_rank.py); what became of each request: Result, and the functions after it.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import re
import signal
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from rig import evidence, model
from rig.memory import RankReport
from rig.model import Case
from rig.rank import LIMIT_S, free_port
from rig.ring import Servers, ranks_of
from rig.special import Key
from rig.stages import Stop
from rig.traffic_case import BEGUN, DONE, ENDED, READY, STARTS, OfTraffic, Traffic
from rig.traffic_rank import DecodeRank, Ended, PrefillRank

RUN_S = 240
BOOTSTRAPPING = 1  # of SGLang's KVPoll
TIMEOUTS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "3",
}
SLACK = 1.0
"""What a whole request takes besides on two busy cores."""
LATER = "(waiting left|parts left|request_status|transfer_infos|prefix_len)"
"""SGLang's own entries of requests that were aborted, and rooms that no request came for, which
are known for a minute."""
LATE = re.compile(rf"prefill \d+: left behind: .*{LATER}")
UNNAMED = "unknown reason"  # that of a rank which only knows that another one has failed
ABORTED = "prefill aborts", "abort storm"


# ---------------------------------------------------------------- the disturbance


def _main(
    case: Case, side: str, rank: int, ports: list[int], pipe: Any, go: Any, life: int
) -> None:
    gc.freeze()  # a million objects of the parent: to look at them stops a rank for a second
    report = RankReport(side, rank)
    try:
        one = (PrefillRank if side == "prefill" else DecodeRank)(case, side, rank, ports, life)
        report = one.report
        one.start_manager()
        case.shared.states[side][rank] = READY
        one.run()
        one.look_at_what_is_left()
    except BaseException:
        report.error = traceback.format_exc()
        case.shared.over.value = 1
    pipe.send(report)
    go.wait(LIMIT_S)
    os._exit(0)


Act = Callable[["Ring"], None]


class Ring(Servers):
    """The processes of one traffic, until `end`, and what a test may do to them."""

    def __init__(self, traffic: Traffic) -> None:
        context, case = mp.get_context("fork"), traffic.case()

        def cells(*shape: int, value: int = 0) -> np.ndarray[Any, Any]:
            """Memory that all processes share: each is a fork of this one."""
            memory = context.RawArray("b", [value] * int(np.prod(shape)))
            return np.frombuffer(memory, np.int8).reshape(shape)

        sizes = {"prefill": case.prefill_tp, "decode": case.decode_tp}
        ranks = [side for side, _ in ranks_of(case)]
        self.traffic, self.away = traffic, set[Key]()
        self.shared = OfTraffic(
            bootstrap_up=[context.Event() for _ in range(traffic.prefills)],
            stages=cells(traffic.requests), closed=cells(len(ranks)), stop=Stop(context),
            states={side: cells(ranks.count(side)) for side in sizes},
            statuses={
                side: cells(tp, traffic.requests, value=BOOTSTRAPPING) for side, tp in sizes.items()
            },
            channel_ports=[free_port() * traffic.same_ports for _ in ranks],
            acted=context.RawValue("b", 0), over=context.RawValue("b", 0),
        )  # fmt: skip
        ports = [free_port() for _ in range(traffic.prefills)]
        super().__init__(replace(case, shared=self.shared), context, ports, _main)

    def stop(self, *keys: Key) -> None:
        self._signal(signal.SIGSTOP, *keys)

    def go_on(self, *keys: Key) -> None:
        self._signal(signal.SIGCONT, *keys)

    def _signal(self, number: signal.Signals, *keys: Key) -> None:
        for key in keys:
            os.kill(self._processes[key].pid, number)

    def close_port(self, key: Key) -> None:
        """The draft channel's; everything else of the rank goes on."""
        self.shared.closed[key[1]] = 1
        time.sleep(0.3)

    def open_port(self, key: Key) -> None:
        self.shared.closed[key[1]] = 0

    def at_stage(self, stage: str, act: Callable[[], object]) -> None:
        """Once a room that is `held` is there (rig/stages.py)."""
        self.shared.stop.act(stage, act)

    def kill(self, *keys: Key) -> None:
        self.away.update(keys)
        for side, rank in keys:
            self._processes[side, rank].kill()
            self._processes[side, rank].join()
            self.shared.states[side][rank] = DONE

    def start(self, *keys: Key) -> None:
        """Anew, where they were killed; all ranks of a server at once."""
        states = self.shared.states
        for side, rank in keys:
            states[side][rank] = STARTS
            if side == "prefill":
                self.shared.bootstrap_up[rank // self.traffic.prefill_tp].clear()
        for key in keys:
            self._start(key, 1)
        self.away.difference_update(keys)
        deadline = time.monotonic() + LIMIT_S
        while any(states[side][rank] == STARTS for side, rank in keys):
            if time.monotonic() > deadline:
                raise TimeoutError("the ranks did not start")
            time.sleep(0.02)

    def result(self, at: Mapping[int, Act]) -> Result:
        """Every process has ended on return."""
        marks: dict[int, tuple[float, float]] = {}
        problems: list[str] = []
        acting = threading.Thread(target=self._act, args=(at, marks, problems))
        acting.start()
        try:
            reports = self._all_reports(RUN_S + self.traffic.requests * self.traffic.is_random)
        finally:
            self.shared.over.value = 1
            acting.join()
            self.go_on(*(key for key in self._keys if key not in self.away))
            self.end()
        for (side, rank), report in reports.items():
            lines = [*report.wrong, *filter(None, [report.error])]
            problems += [f"{side} {rank}: {line}" for line in lines]
        gone = np.flatnonzero(self.shared.stages == BEGUN).tolist()
        return Result(self.traffic, reports, marks, problems, gone)

    def _all_reports(self, limit_s: float) -> dict[Key, RankReport]:
        """Those of ranks that were killed for good are missing."""
        found: dict[Key, RankReport] = {}
        deadline = time.monotonic() + limit_s
        while missing := [k for k in self._keys if k not in found and k not in self.away]:
            for key in missing:
                pipe = self._pipes[key]
                if not pipe.poll(0.05):
                    continue
                report = self._take(key)
                if report is not None or (key not in self.away and self._pipes[key] is pipe):
                    found[key] = report or RankReport(*key, error=f"{key} did not report")
            if self.shared.acted.value and self._is_done():
                self.shared.over.value = 1
            if self.shared.over.value:
                deadline = min(deadline, time.monotonic() + LIMIT_S)
            if time.monotonic() > deadline:
                return found | {k: RankReport(*k, error=f"{k} hangs") for k in missing}
        return found

    def _is_done(self) -> bool:
        """Whether each decode rank has ended its requests, or was killed for good."""
        return bool((self.shared.states["decode"] == DONE).all())

    def _act(self, at: Mapping[int, Act], marks: dict[int, Any], problems: list[str]) -> None:
        for number, act in sorted(at.items()):
            while np.count_nonzero(self.shared.stages == ENDED) < number:
                if self.shared.over.value or self._is_done():
                    problems.append(f"the traffic ended before {number} requests had")
                    self.shared.over.value = 1
                    return
                time.sleep(0.001)
            began = time.monotonic()
            try:
                act(self)
            except Exception:
                problems.append(traceback.format_exc())
            marks[number] = began, time.monotonic()
        self.shared.acted.value = 1


def run(traffic: Traffic, at: Mapping[int, Act], what: str) -> Result:
    """`at`: what is done once so many requests have ended; `what`: the same, in words, for the
    table of evidence."""
    result = Ring(traffic).result(at)
    is_tcp = model.BACKEND == "nixl" and os.environ.get("UCX_TLS") == "tcp"
    backend = model.BACKEND + "-tcp" * is_tcp + " alone" * traffic.stock
    evidence.publish({"what": what, "backend": backend, **result.row()})
    return result


def run_beside(*several: Traffic) -> list[Result]:
    """All at once, since random ones mostly wait for timeouts."""
    with ExitStack() as stack, ThreadPoolExecutor(len(several)) as pool:
        rings = []
        for traffic in several:
            rings.append(Ring(traffic))
            stack.callback(rings[-1].end)
        return list(pool.map(lambda ring: ring.result({}), rings))


# ---------------------------------------------------------------- the check


@dataclass
class Result:
    """`marks`: when each action was done, by its number of ended requests. `gone`: requests whose
    decode rank was killed before they ended."""

    traffic: Traffic
    reports: dict[Key, RankReport]
    marks: dict[int, tuple[float, float]]
    problems: list[str]
    gone: list[int]

    def seen_by(self, side: str) -> list[Ended]:
        """What each of its ranks saw of each request, in the order in which they began."""
        reports = [report for (of, _), report in self.reports.items() if of == side]
        found = [one for report in reports for one in getattr(report, "ended", ())]
        return sorted(found, key=lambda one: one.began)

    @property
    def ended(self) -> list[Ended]:
        return self.seen_by("decode")

    def of(self, touched: bool) -> list[Ended]:
        """Requests to the server, or the decode rank, that meets the fault, or all others."""
        side, rank = self.traffic.touched
        of = self.traffic.server_of if side == "prefill" else self.traffic.decode_of
        return [one for one in self.ended if (of(one.number) == rank) is touched]

    def since(self, mark: int, touched: bool = True) -> list[Ended]:
        """Of these, those that began after an action was done."""
        return [one for one in self.of(touched) if one.began > self.marks[mark][1]]

    def during(self, mark: int, touched: bool = True) -> list[Ended]:
        """Of these, those that began and ended meanwhile: one that is there when the fault ends
        may be served."""
        began, ended = self.marks[mark]
        of = self.of(touched)
        return [one for one in of if began < one.began and one.began + one.seconds < ended]

    def before(self, mark: int, touched: bool = True) -> list[Ended]:
        """Of these, those that ended before an action began."""
        start = self.marks[mark][0]
        return [one for one in self.of(touched) if one.began + one.seconds < start]

    def found(self, *, late: bool = True) -> list[str]:
        """What is wrong, or left. Not `late`: without what messages leave for a time that come when
        their request has ended, SGLang's and ours."""
        return [line for line in self.problems if late or not LATE.match(line)]

    def row(self) -> dict[str, Any]:
        """Of the table of evidence: requests that had not ended when the fault came. Touched are
        those to the server that meets it."""
        first = min((began for began, _ in self.marks.values()), default=0.0)
        touched, others = (
            [one for one in self.of(which) if one.began + one.seconds >= first]
            for which in (True, False)
        )
        leaked = [one for one in self.found(late=False) if "leaks: " in one or "left behind" in one]
        return {
            "touched": {**_outcomes(touched), "gone with it": len(self.gone)},
            "others": _outcomes(others),
            "wrong": len(self.found(late=False)) - len(leaked),
            "leaked": len(leaked),
        }


def _outcomes(requests: list[Ended]) -> dict[str, Any]:
    slowest = max((one.seconds for one in requests), default=0.0)
    ends = evidence.outcomes((one.status, one.state, one.reason) for one in requests)
    return {**ends, "slowest": round(slowest, 2)}


def typical(requests: list[Ended]) -> float:
    return median(one.seconds for one in requests)


def states(requests: list[Ended]) -> set[str]:
    return {one.state for one in requests}


def failed(requests: list[Ended]) -> list[Ended]:
    return [one for one in requests if one.status != "success"]


def nobody_waited(requests: list[Ended], bound: float) -> None:
    assert [one for one in requests if one.seconds > bound + SLACK] == []


def untouched(result: Result, bound: float, mark: int = 80) -> None:
    """Requests to others are warm, and none of them has waited for one that is touched."""
    others = result.of(False)
    assert [one for one in others if (one.status, one.state) != ("success", "warm")] == []
    nobody_waited(others, bound)
    later = [one for one in others if one.began > result.marks[mark][0]]
    assert typical(later) < 3 * typical(result.before(mark, False))


def judge(result: Result) -> tuple[list[str], Counter[str]]:
    """Of random traffic: what was lost, leaked or wrong, and how many requests ended how. Each ends
    on all ranks. It fails only where it met a fault, and decode knows a reason."""
    problems = [line for line in result.problems if not re.search(LATER, line)]
    counts, seen = Counter[str](), defaultdict[int, tuple[list[Ended], ...]](lambda: ([], []))
    for which, side in enumerate(("prefill", "decode")):
        for one in result.seen_by(side):
            seen[one.number][which].append(one)
    for number in range(result.traffic.requests):
        (prefill, decode), met = seen[number], result.traffic.meeting(number).name
        succeeded, reasons = not failed(decode), {one.reason for one in failed(decode)}
        if succeeded:
            is_right = not failed(prefill) or met in ABORTED
        else:
            is_right = bool(met) and any(UNNAMED not in (why or UNNAMED) for why in reasons)
        lost = len(prefill) + len(decode) < len(result.reports)
        stuck = [one for one in (*prefill, *decode) if one.status not in ("success", "failed")]
        if lost or stuck or not is_right:
            problems.append(f"request {number} ({met}): prefill {prefill}, decode {decode}")
        counts["succeeded" if succeeded else "failed"] += 1
        counts["cold"] += succeeded and "cold" in states(decode)
    return problems, counts
