"""The table of series against its documents, and the alerts against promtool.

What the figures themselves say is tested over real transfers: tests/protocol/test_metrics.py.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from sglang_mixkv.demo.prometheus import COLON_AGAIN, expressions
from sglang_mixkv.next import series
from sglang_mixkv.series import DECODE, FAMILIES, PREFILL, divided, of_side

ROOT = Path(__file__).parents[2]
DASHBOARD, ALERTS = ROOT / "docs" / "dashboard.json", ROOT / "docs" / "alerts.yml"
DOCUMENT, ALERT_TESTS = ROOT / "docs" / "metrics.md", ROOT / "tests" / "alerts_test.yml"
NAME = re.compile(r"sglang:[a-z0-9_]+")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (scripts/prometheus.sh)"
)


def test_one_count_feeds_one_series() -> None:
    for side in (PREFILL, DECODE):
        counts = [count for family in of_side(side) for count in family.counts.values()]
        assert len(counts) == len(set(counts))
    assert list(of_side("null")) == []


def test_names_follow_prometheus() -> None:
    for family in FAMILIES:
        assert family.name.endswith("_total") == (family.kind == "counter")
        assert bool(family.label) == ("" not in family.counts)


def test_there_are_few_series() -> None:
    for side in (PREFILL, DECODE):
        assert sum(len(family.counts) for family in of_side(side)) <= 24


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [(300, 100, (1.5, 0.5)), (0, 100, (0.0, 2.0)), (300, 0, (2.0, 0.0)), (0, 0, (2.0, 0.0))],
)
def test_a_chunks_time_is_divided_by_bytes(
    target: int, draft: int, expected: tuple[float, float]
) -> None:
    assert divided(2.0, target, draft) == pytest.approx(expected)


# ---------------------------------------------------------------- documents


def row(name: str) -> str:
    """The line about one series in docs/metrics.md."""
    lines = [x for x in DOCUMENT.read_text().splitlines() if x.startswith(f"| `{name}` |")]
    assert len(lines) == 1, name
    return lines[0]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_document_has_every_series(family) -> None:
    label = f"`{family.label}`: {', '.join(family.counts)}" if family.label else ""
    unit = next((u for u in ("bytes", "seconds") if f"_{u}" in family.name), "1")
    cells = [family.kind, unit, ", ".join(family.sides), label, family.help]
    assert row(family.name) == " | ".join([f"| `{family.name}`", *cells]) + " |"


def test_no_document_names_a_series_that_is_not_there() -> None:
    ours = {family.name for family in (*FAMILIES, *series.FAMILIES)}
    for path in (DOCUMENT, DASHBOARD, ALERTS, ALERT_TESTS):
        named = {name for name in NAME.findall(path.read_text()) if "mixkv_" in name}
        assert named <= ours | {"sglang:mixkv_"}, path


def test_the_dashboard_shows_every_series() -> None:
    text = " ".join(expression.text for expression in expressions(DASHBOARD, "5m"))
    assert {family.name for family in FAMILIES} <= set(NAME.findall(text))
    assert "$" not in text


def test_sglangs_own_series_are_still_called_so() -> None:
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("SGLang is not installed")
    folder = Path(spec.origin).parent / "srt" / "observability"
    known = set(NAME.findall((folder / "metrics_collector.py").read_text()))
    for path in (DASHBOARD, ALERTS):
        for name in NAME.findall(path.read_text()):
            stem = re.sub(r"_(sum|count|bucket)$", "", name)
            assert "mixkv_" in name or {name, stem} & known, f"{path.name}: {name}"


# ---------------------------------------------------------------- alerts


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["promtool", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@needs_promtool
def test_the_rules_are_valid() -> None:
    done = promtool("check", "rules", ALERTS)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    done = promtool("test", "rules", ALERT_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("< 0.85 *", "< 0.1 *"),  # never fires
        ("< 0.85 *", "< 9 *"),  # fires on draft bytes alone
        ("< 0.9 *", "< 9 *"),  # fires on accept length alone
        ("[5m])) > 0)", "[5m])))"),  # an idle hour is no number, and neither is the day's mean
        ("[10m])) > 0", "[10m])) >= 0"),  # fires without a reason
        ("> 0.01", "> 0.05"),  # never fires
        ("max by (model_name, instance, dp_rank)", "avg by (model_name)"),  # of ranks, not requests
        ('"warm|cold"', '".+"'),  # clients that hang up hide cold drafters
        ("breaker_open) > 0", "breaker_open) >= 0"),  # fires while it is closed
    ],
)
def test_another_rule_would_be_noticed(tmp_path: Path, old: str, new: str) -> None:
    rules = ALERTS.read_text()
    assert old in rules
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "docs" / ALERTS.name).write_text(rules.replace(old, new))
    shutil.copy(ALERT_TESTS, tmp_path / "tests")
    assert promtool("test", "rules", tmp_path / "tests" / ALERT_TESTS.name).returncode != 0


def test_the_documents_relabelling_is_the_one_that_is_tried() -> None:
    (block,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (job,) = yaml.safe_load(block)["scrape_configs"]
    assert job["metric_relabel_configs"] == [COLON_AGAIN]
