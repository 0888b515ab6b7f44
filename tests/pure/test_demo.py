"""The demo's evaluation of its runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mixkv_demo import report
from mixkv_demo.client import Answer

RIGHT, OTHER = (Answer((1, 2, 3, last), 1, (), seconds=1.0) for last in (4, 9))


@pytest.mark.parametrize(
    ("name", "answer", "found"),
    [("stock", RIGHT, 0), ("stock", OTHER, 1), ("stock", None, 0), ("mixkv", RIGHT, 0),
     ("mixkv", OTHER, 1), ("mixkv", None, 1)],
)  # fmt: skip
def test_requests_may_fail_with_stock_alone(name: str, answer: Answer | None, found: int) -> None:
    reference = [RIGHT, RIGHT]
    runs = [
        report.summarise("single", reference, reference, None),
        report.summarise(name, [RIGHT, answer], reference, None),
    ]
    assert len(report.shortcomings(runs)) == found
    assert runs[1].failed == (answer is None)
    shown = io.StringIO()
    Console(file=shown).print(report.table(runs, "title"))
    assert ("1 failed" in shown.getvalue()) == (answer is None)
