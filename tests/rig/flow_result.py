"""What became of a flow of requests (rig/flow.py), and what a test says of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import median
from typing import Any

from rig import evidence
from rig.flow_case import Ended, Flow, FlowReport
from rig.memory import RankReport
from rig.special import Key

SLACK = 1.0
"""What a whole request takes besides on two busy cores."""
LATE = re.compile(
    r"prefill \d+: left behind: .*"
    "(waiting left|parts left|request_status|transfer_infos|req_to_decode_prefix_len)"
)


@dataclass
class Result:
    """`marks`: when each action was done, by its number of ended requests. `gone`: requests whose
    decode rank was killed before they ended."""

    flow: Flow
    reports: dict[Key, RankReport]
    marks: dict[int, tuple[float, float]]
    problems: list[str]
    gone: list[int]

    @property
    def ended(self) -> list[Ended]:
        """All requests, in the order in which they began."""
        reports = [one for one in self.reports.values() if isinstance(one, FlowReport)]
        found = [one for report in reports for one in report.ended]
        return sorted(found, key=lambda one: one.began)

    def of(self, touched: bool) -> list[Ended]:
        """Requests to the server, or the decode rank, that meets the fault, or all others."""
        return [one for one in self.ended if one.is_of(self.flow.touched) is touched]

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


def untouched(result: Result, bound: float, mark: int = 80, state: str = "warm") -> None:
    """Requests to others are warm, and none of them has waited for one that is touched."""
    others = result.of(False)
    assert [one for one in others if (one.status, one.state) != ("success", state)] == []
    nobody_waited(others, bound)
    later = [one for one in others if one.began > result.marks[mark][0]]
    assert typical(later) < 3 * typical(result.before(mark, False))
