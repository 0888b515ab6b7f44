"""Many requests with random faults on the protocol ring: nothing lost, leaked or wrong.

    plan(seed)  ->  every rank derives the same requests, rooms and faults from it
    each rank   ->  16 requests open at a time, as a scheduler has them; pages and metadata rows
                    from free lists, so that each is used many times. Ranks of a server agree on
                    each request's status, as SGLang's do (Board)
    judge()     ->  what the ranks say, put side by side

Of requests, some are aborted, at any moment and by either side. Beside that copies and reads fail,
and messages come twice or, of a connection that is lost, not at all: of these troubles no request
may fail.

A decode rank compares a request's pages and row with the truth when it succeeds, and all of its
memory with what it should hold every COMPARE_EVERY requests and at the end. Pages of a failed
request are used again by SGLang's rule for deferred release (rig/releases.py).
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import re
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from rig.memory import RankReport
from rig.rank import free_port, left_behind
from rig.resources import SLACK, grown, resources
from rig.ring import Servers
from rig.soak_case import Meeting, Report, Soak, SoakCase
from rig.soak_rank import STUCK_S, Board
from rig.soak_sides import SoakDecode, SoakPrefill
from rig.special import Key, Shared

TIMEOUTS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "25",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "15",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "3",
    "SGLANG_MIXKV_PATIENCE": "3",
}
UNNAMED = "unknown reason"  # that of a rank which only knows that another one has failed
# Left behind: SGLang's own entries of aborted requests, and rooms that no request came for, which
# are known for a minute.
REMAINS = ("request_status", "transfer_infos", "prefix_len", "waiting left", "parts left")


def _rank_main(
    case: SoakCase, side: str, rank: int, ports: list[int], pipe: Any, go: Any, life: int
) -> None:
    report: RankReport = RankReport(side, rank)
    try:
        one = (SoakPrefill if side == "prefill" else SoakDecode)(case, side, rank, ports, life)
        report = one.report
        one.start_manager()
        one.inject()
        case.shared.idle.wait(60)
        one.run()
        case.shared.idle.wait(10 * STUCK_S)  # nobody sends any more
        report.wrong += left_behind(one.manager)
        if side == "decode":
            one.compare_idle()
        report.resources.append(resources())
    except BaseException:
        report.error = traceback.format_exc()
        case.shared.idle.abort()
    pipe.send(report)
    go.wait(60)
    os._exit(0)


@dataclass
class Verdict:
    """`problems`: empty when nothing was lost, leaked or wrong. `others`: why requests without a
    fault of their own failed."""

    soak: Soak
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)


@dataclass
class OfSoak(Shared):
    """`idle`: a barrier of all ranks. `boards`: by side."""

    idle: Any = None
    boards: dict[str, Board] = field(default_factory=dict)


class Running:
    """The servers of one soak."""

    def __init__(self, soak: Soak) -> None:
        context = mp.get_context("fork")
        shared = OfSoak(
            bootstrap_up=[context.Event()],
            all_sent=context.Event(),
            idle=context.Barrier(soak.prefill_tp + soak.decode_tp),
            boards={
                "prefill": Board(context, soak.prefill_tp, soak.requests),
                "decode": Board(context, soak.decode_tp, soak.requests),
            },
        )
        self.case = replace(soak.case(), shared=shared)
        self.servers = Servers(self.case, context, [free_port()], _rank_main)

    def verdict(self) -> Verdict:
        """Once its last rank has reported."""
        return judge(self.case, self.servers.reports(120 + self.case.soak.requests))


def run(*soaks: Soak) -> list[Verdict]:
    """All at once, since they mostly wait for timeouts; every process has ended when this
    returns."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for name, seconds in TIMEOUTS.items():
            patch.setenv(name, seconds)
        running = []
        for soak in soaks:
            running.append(Running(soak))
            stack.callback(running[-1].servers.end)
        with ThreadPoolExecutor(len(running)) as pool:
            return list(pool.map(Running.verdict, running))


def judge(case: SoakCase, reports: dict[Key, RankReport]) -> Verdict:
    """Put side by side what the ranks say."""
    found = Verdict(case.soak)
    for (side, rank), report in reports.items():
        lines = [*report.wrong, *filter(None, [report.error])]
        lines = [line for line in lines if not any(what in line for what in REMAINS)]
        found.problems += [f"{side} {rank}: {line}" for line in lines]
    complete = [r for r in reports.values() if isinstance(r, Report)]
    if len(complete) == len(reports):
        found.counts["cold"] = len(set().union(*(r.cold for r in complete if r.side == "decode")))
        for number in range(len(case.requests)):
            _judge_request(case.fault(number), number, complete, found)
        found.problems += [line for report in complete for line in _leaks(report)]
    return found


def _judge_request(
    meeting: Meeting | None, number: int, reports: list[Report], found: Verdict
) -> None:
    name = meeting.name if meeting is not None else "none"
    ends = {(r.side, r.rank): r.ended.get(number, ("lost", "")) for r in reports}
    decode = {status for (side, _), (status, _) in ends.items() if side == "decode"}
    prefill = {status for (side, _), (status, _) in ends.items() if side == "prefill"}
    succeeded = decode == {"success"}
    found.counts["succeeded" if succeeded else "failed"] += 1
    if not succeeded and meeting is None:
        texts = [r for (side, _), (_, r) in ends.items() if side == "decode" and r]
        reasons = sorted(texts, key=lambda text: UNNAMED in text)
        found.others[re.sub(r"\d+", "N", (reasons or ["?"])[0])[:120]] += 1
    where = f"request {number} ({name})"
    named = {side for (side, _), (_, reason) in ends.items() if reason and UNNAMED not in reason}
    found.problems += [
        f"{where}: {side} {rank} says {status}, {reason!r}"
        for (side, rank), (status, reason) in ends.items()
        if status not in ("success", "failed")
        or (status == "failed" and side == "decode" and side not in named)
    ]
    if succeeded and prefill != {"success"} and name not in ("prefill aborts", "abort storm"):
        found.problems.append(f"{where}: succeeded on decode, on prefill {ends}")


def _leaks(report: Report) -> list[str]:
    """What has grown since the first requests."""
    if len(report.resources) != 2:
        return [f"{report.side} {report.rank}: resources were not counted"]
    lines = grown(*report.resources, SLACK)
    return [f"{report.side} {report.rank}: {line}" for line in lines]
