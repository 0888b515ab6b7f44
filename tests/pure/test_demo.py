"""The report of the demo's runs, and the ports of its servers."""

from __future__ import annotations

import io
from itertools import chain, islice

import pytest
from rich.console import Console

from mixkv_demo import ports, report
from mixkv_demo.client import Answer

RIGHT, OTHER = (Answer((1, 2, 3, last), 1, (), seconds=1.0) for last in (4, 9))


@pytest.mark.parametrize(
    ("name", "answer", "found"),
    [("stock", RIGHT, 0), ("stock", OTHER, 1), ("stock", None, 0), ("mixkv", RIGHT, 0),
     ("mixkv", OTHER, 1), ("mixkv", None, 1)],
)  # fmt: skip
def test_only_a_stock_run_may_have_failed_requests(
    name: str, answer: Answer | None, found: int
) -> None:
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


def test_the_report_fits_80_columns() -> None:
    shares, shown = [0.99, 0.98, 0.94], io.StringIO()
    runs = [
        report.Run(name, 3.911, shares, True, 0, 1234.5, 98_765_432, 98_765_432)
        for name in ("single", "stock", "mixkv")
    ]
    Console(file=shown, width=80).print(report.table(runs, "title"))
    lines = [line for line in shown.getvalue().splitlines() if "0.99 0.98 0.94" in line]
    assert len(lines) == len(runs)
    assert all(line.count("98,765,432") == 2 for line in lines)


def test_servers_that_start_together_derive_no_port_twice() -> None:
    """A server's ports are not yet bound when those of other servers are drawn."""
    drawn = islice(ports.shuffled(range(9_000, 10_750)), 50)
    used = [*chain.from_iterable((port + one for one in ports._DERIVED) for port in drawn)]
    assert len(used) == len(set(used))
