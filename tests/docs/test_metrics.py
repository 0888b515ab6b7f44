"""The dashboard, the alerts and their page name series that exist; alerts fire when they should.

What each series counts is tested in tests/pure/test_series.py and over real transfers in
tests/protocol/test_metrics.py.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from mixkv_demo.prometheus import expressions
from sglang_mixkv.series import PREFIX, SERIES

from .pages import ROOT

DASHBOARD, ALERTS = ROOT / "docs" / "dashboard.json", ROOT / "docs" / "alerts.yml"
PAGE, ALERT_TESTS = ROOT / "docs" / "metrics.md", ROOT / "tests" / "alerts_test.yml"
OURS = {PREFIX + one.name for one in SERIES}
NAME, RULE = re.compile(r"sglang:[a-z0-9_]+"), re.compile(r"sglang_mixkv:[a-z0-9_:]+")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (scripts/prometheus.sh)"
)


@pytest.mark.parametrize(
    "path", [PAGE, DASHBOARD, ALERTS, ALERT_TESTS, *sorted((ROOT / "docs").glob("*.md"))],
    ids=lambda path: path.name,
)  # fmt: skip
def test_only_series_that_exist_are_named(path: Path) -> None:
    named = {name for name in NAME.findall(path.read_text()) if "mixkv_" in name}
    assert named <= OURS


def test_the_dashboard_shows_every_series() -> None:
    text = " ".join(expression.text for expression in expressions(DASHBOARD, "5m"))
    assert OURS - set(NAME.findall(text)) == set()
    assert "$" not in text


def test_labels_that_are_selected_exist() -> None:
    """A selector on a label that a series lacks matches nothing, and nobody notices."""
    everywhere = {"model_name", "engine_type", "instance"}  # of SGLang, and of each scrape
    labels = {PREFIX + one.name: {*one.labels, *everywhere} for one in SERIES}
    for path in (DASHBOARD, ALERTS):
        text = path.read_text().replace('\\"', '"')
        for name, selector in re.findall(r"(sglang:mixkv_\w+)\{([^}]*)\}", text):
            assert set(re.findall(r"(\w+)=~?", selector)) <= labels[name], f"{path.name}: {name}"


def test_rules_that_are_used_are_recorded() -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    used = set(RULE.findall("".join(path.read_text() for path in (DASHBOARD, ALERTS, PAGE))))
    assert used <= recorded


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


def panels() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in expressions(DASHBOARD, "5m"):
        found.setdefault(one.panel, []).append(one.text)
    return found


@needs_promtool
def test_the_dashboards_expressions_are_valid(tmp_path: Path) -> None:
    texts = [text for panel in panels().values() for text in panel]
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(texts)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = promtool("check", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_panels_of_draft_health_show_what_they_say(tmp_path: Path) -> None:
    """One server's requests are all warm, at 4 tokens a round; some of another's are cold, at 1."""
    labels = 'model_name="m", instance="d:1", prefill="%s", state="%s", reason="%s"'
    counts = {
        ("a:1", "warm", ""): (100, 400), ("b:2", "warm", ""): (200, 800),
        ("b:2", "cold", "lost"): (60, 60), ("b:2", "cold", "read"): (40, 40),
    }  # fmt: skip
    # a second; sums of such rates are exact in any order
    series = [
        {"series": f"sglang:mixkv_{name}_total{{{labels % at}}}", "values": f"0+{60 * step}x20"}
        for at, steps in counts.items()
        for name, step in zip(("verify_rounds", "accepted_tokens"), steps, strict=True)
    ]
    recorded = {"warm_tokens:increase2h": 30, "warm_rounds:increase2h": 10,
                "past_warm_accept_length:avg1d": 4}  # fmt: skip
    series += [
        {"series": f'sglang_mixkv:{name}{{model_name="m", prefill="a:1"}}', "values": f"{value}x20"}
        for name, value in recorded.items()
    ]
    expected = {
        "Accept length by prefill server": [
            ('{instance="d:1", prefill="a:1"}', 4), ('{instance="d:1", prefill="b:2"}', 4)
        ],
        "What cold drafters cost": [('{instance="d:1"}', 1 - 3.25 / 4)],
        "Accept length beside its past": [('{model_name="m", prefill="a:1"}', 0.75)],
        "Accept length by state": [
            ('{instance="d:1", state="warm"}', 4), ('{instance="d:1", state="cold"}', 1)
        ],
    }  # fmt: skip
    tests = [
        {"expr": panels()[panel][0], "eval_time": "15m",
         "exp_samples": [{"labels": at, "value": value} for at, value in samples]}
        for panel, samples in expected.items()
    ]  # fmt: skip
    one = {"interval": "1m", "input_series": series, "promql_expr_test": tests}
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"tests": [one]}))
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert all(rule.get("alert", "") in ALERT_TESTS.read_text() for rule in rules)
    done = promtool("test", "rules", ALERT_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
