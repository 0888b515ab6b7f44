"""The figures in docs/metrics.md agree with the present output of `status` and the dashboard. If
one of these tests fails, draw the figures again with figures.py."""

from __future__ import annotations

import json
import re
from html import unescape
from itertools import pairwise

import pytest

from sglang_mixkv.tools.status import MetricPages, Status, read, status

from .figures import DASHBOARD, FIGURES, SHOWN, axis, panels
from .pages import ROOT


def shown(name: str) -> list[str]:
    """Return the texts in a figure."""
    return [
        unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)<", (FIGURES / name).read_text())
    ]


def columns(lines: list[str]) -> list[list[str]]:
    """Return the column headings of the tables, which have dashes below them."""
    return [
        re.split("  +", above.strip())
        for above, line in pairwise(lines) if line.startswith("---")
    ]  # fmt: skip


def a_status() -> Status:
    """Return the status of a decode server that served one request from a prefill server without a
    drafter."""
    at = 'prefill="p:1",state="cold",reason="no_drafter"'
    counted = f"sglang:mixkv_prefill_rooms_total{{{at}}} 1\n"
    return status(MetricPages(read("http://d:1", counted)), {})


def test_the_figure_of_status_has_its_columns_and_texts() -> None:
    lines, now = shown("status.svg"), a_status()
    assert columns(lines) == columns(now.text().splitlines())
    (wrong,) = now.wrong
    said = f"{wrong.what.partition('1 of 1')[2]}. {wrong.remedy}"
    assert "(no_drafter)" in said
    assert said in " ".join(" ".join(lines).split())


def test_the_figure_has_the_dashboards_panels() -> None:
    texts = shown("dashboard.svg")
    assert {*SHOWN} <= {*texts}
    assert {axis(panels()[name])[0] for name in SHOWN} <= {*texts}


@pytest.mark.parametrize("name", panels())
def test_every_axis_of_the_dashboard_has_a_label_and_a_unit(name: str) -> None:
    label, unit = axis(panels()[name])
    assert label, DASHBOARD
    assert unit


def test_the_cases_of_faults_name_existing_tests() -> None:
    tests = (ROOT / "tests/protocol/test_traffic.py").read_text()
    cases = json.loads((FIGURES / "faults.json").read_text())["cases"]
    for name in {case["test"] for case in cases if "test" in case}:
        assert f"def {name}(" in tests
