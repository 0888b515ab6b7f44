"""The dashboard, the alerts and the pages name existing metrics, and alerts fire when they should.

tests/pure/test_series.py tests the metrics' values, and tests/protocol/test_metrics.py tests them
over real transfers.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from mixkv_demo.prometheus import expressions
from sglang_mixkv.decode.cold import ColdReason
from sglang_mixkv.series import PREFIX, SERIES

from .pages import PAGES, ROOT, bash

DASHBOARD, ALERTS = ROOT / "docs" / "dashboard.json", ROOT / "docs" / "alerts.yml"
ALERT_TESTS = ROOT / "tests" / "alerts_test.yml"
LABELS = {PREFIX + one.name: {*one.labels} for one in SERIES}
LABELS |= {
    f"{name}_{part}": labels | {"le"}
    for name, labels in LABELS.items() if name.endswith("_seconds")
    for part in ("bucket", "sum", "count")
}  # fmt: skip
EVERYWHERE = {"model_name", "engine_type", "instance"}  # set by SGLang or by Prometheus
NAME, RULE = re.compile(r"sglang:[a-z0-9_]+"), re.compile(r"sglang_mixkv:[a-z0-9_:]+")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (scripts/optional.sh)"
)


@pytest.mark.parametrize("path", [DASHBOARD, ALERTS, ALERT_TESTS, *PAGES], ids=lambda p: p.name)
def test_metrics_rules_and_labels_in_the_documents_exist(path: Path) -> None:
    """A selector with a wrong name matches nothing, without an error."""
    text = path.read_text().replace('\\"', '"')
    assert {name for name in NAME.findall(text) if "mixkv_" in name} <= LABELS.keys()
    for name, selector in re.findall(r"(sglang:mixkv_\w+)\{([^}]*)\}", text):
        own = {*re.findall(r"(\w+)=~?", selector)} - {"tp_rank"}
        assert own <= LABELS[name] | EVERYWHERE, name
    recorded = re.findall(r"(?m)^ *- record: (\S+)$", ALERTS.read_text())
    assert {*RULE.findall(text)} <= {*recorded}


def test_troubleshooting_lists_each_cold_reason_once() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line[:3] == "| `"]
    listed = [reason for row in rows for reason in re.findall("`([a-z_]+)`", row)]
    assert sorted(listed) == sorted(ColdReason)


def test_sglangs_own_metrics_have_these_names() -> None:
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("SGLang is not installed")
    folder = Path(spec.origin).parent / "srt" / "observability"
    known = set(NAME.findall((folder / "metrics_collector.py").read_text()))
    for name in NAME.findall(DASHBOARD.read_text() + ALERTS.read_text()):
        stem = re.sub(r"_(sum|count|bucket)$", "", name)
        assert "mixkv_" in name or {name, stem} & known, name


# ---------------------------------------------------------------- evaluated by Prometheus


def promtool(*arguments: str | Path) -> None:
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def panels() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in expressions(DASHBOARD, "5m"):
        assert "$" not in one.text
        found.setdefault(one.panel, []).append(one.text)
    return found


@needs_promtool
def test_panels_have_valid_queries_with_correct_values(tmp_path: Path) -> None:
    """The requests of one prefill server are all warm, with 4 tokens per round. Some requests of
    another one are cold, with 1 token per round."""
    labels = 'model_name="m", instance="d:1", prefill="%s", state="%s", reason="%s"'
    counts = {
        ("a:1", "warm", ""): (100, 400), ("b:2", "warm", ""): (200, 800),
        ("b:2", "cold", "lost"): (60, 60), ("b:2", "cold", "read"): (40, 40),
    }  # fmt: skip
    # per second; sums of these rates are exact in any order
    series = [
        {"series": f"sglang:mixkv_{name}_total{{{labels % at}}}", "values": f"0+{60 * step}x20"}
        for at, steps in counts.items()
        for name, step in zip(("verify_rounds", "accepted_tokens"), steps, strict=True)
    ]
    expected = {
        "Accept length by prefill server": [(', prefill="a:1"', 4), (', prefill="b:2"', 4)],
        "What cold drafters cost": [("", 1 - 3.25 / 4)],
        "Accept length by state": [(', state="warm"', 4), (', state="cold"', 1)],
        "Wait for draft KV": [("", 0.0075)],
    }
    for rank, bound in ((0, "0.005"), (1, "0.01")):  # waits below 5 ms, and from 5 to 10 ms
        series += [
            {"series": f'sglang:mixkv_wait_seconds_bucket{{model_name="m", instance="d:1", '
                       f'tp_rank="{rank}", le="{le}"}}', "values": f"0+{60 * (le >= bound)}x20"}
            for le in ("0.005", "0.01", "Inf")
        ]  # fmt: skip
    tests = [
        {"expr": panels()[panel][0], "eval_time": "15m",
         "exp_samples": [{"labels": f'{{instance="d:1"{at}}}', "value": v} for at, v in samples]}
        for panel, samples in expected.items()
    ]  # fmt: skip
    texts = [text for panel in panels().values() for text in panel]
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(texts)]
    groups = {"groups": [{"name": "panels", "rules": rules}]}
    one = {"interval": "1m", "input_series": series, "promql_expr_test": tests}
    (tmp_path / "rules.yml").write_text(json.dumps(groups))
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps({"rule_files": ["rules.yml"], "tests": [one]}))
    promtool("test", "rules", file)


def test_each_alert_has_a_page_and_a_remedy() -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    table = (ROOT / "docs" / "metrics.md").read_text()
    alerts = [rule for rule in rules if "alert" in rule]
    rows = re.findall(r"(?m)^\| `(MixKV\w+)` \| [^|]+ \| [^|]+ \| ([^|]{15,}) \|$", table)
    assert sorted(name for name, _ in rows) == sorted({rule["alert"] for rule in alerts})
    for rule in alerts:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        heads = re.findall(r"(?m)^#+ (.*)$", (ROOT / page).read_text())
        assert anchor in {head.lower().replace(" ", "-") for head in heads}


def test_the_command_in_deploy_md_makes_a_valid_prometheus_rule() -> None:
    (block,) = (b for b in bash(ROOT / "docs" / "deploy.md") if "PrometheusRule" in b.text)
    text = 'kubectl() { [ "$1" = get ] || cat; }\n' + block.text
    done = subprocess.run(["bash", "-euc", text], cwd=ROOT, capture_output=True, check=True)
    made = yaml.safe_load(done.stdout)
    assert made["metadata"]["labels"] == {"release": "monitoring"}
    rules = made["spec"]["groups"][0]["rules"]
    assert rules[0]["expr"] == yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"][0]["expr"]
    urls = {rule["annotations"]["runbook_url"] for rule in rules if "alert" in rule}
    assert all(url.startswith("https://git.example.com/sglang-mixkv/docs/") for url in urls)


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    """tests/alerts_test.yml, which promtool runs, has every alert."""
    alerts = re.findall(r"(?m)^ *- alert: (\S+)$", ALERTS.read_text())
    assert [alert for alert in alerts if alert not in ALERT_TESTS.read_text()] == []
    promtool("test", "rules", ALERT_TESTS)
