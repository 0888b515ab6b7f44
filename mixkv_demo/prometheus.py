"""A Prometheus that scrapes the demo's servers, and the expressions of the shipped dashboard.

The binary must be in PATH (scripts/optional.sh gets Debian's). Prometheus runs in a Fleet, with
its own configuration and data folder, and ends with the Fleet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from mixkv_demo.launch import HOST
from mixkv_demo.ports import free_port
from mixkv_demo.processes import Fleet

START_TIMEOUT_S = 30.0
EVERY = "5s"
"""The interval of scrapes, and the time limit of each scrape. For a scrape, SGLang reads one file
per process and kind of series, which takes more than a second if the cores are busy."""

COLON_AGAIN = {
    "source_labels": ["__name__"],
    "regex": "sglang_(.+)",
    "target_label": "__name__",
    "replacement": "sglang:$1",
}
"""Relabelling for Prometheus before 3: prometheus_client 0.23 to 0.26 (generate_latest in
openmetrics/exposition.py) sends such a Prometheus sample names with `_` in place of `:`."""


class QueryFailed(RuntimeError):
    """Prometheus rejected an expression. The message is the one that Prometheus returned."""


@dataclass(frozen=True)
class Expression:
    """One query of a dashboard's panel."""

    panel: str
    text: str


def expressions(dashboard: Path, interval: str, model: str = ".+") -> list[Expression]:
    """Return every expression of a Grafana dashboard, with its variables replaced."""
    panels = json.loads(dashboard.read_text())["panels"]
    replaced = {"$__rate_interval": interval, "$model": model, "$instance": ".+"}
    found = []
    for panel in panels:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in replaced.items():
                text = text.replace(name, value)
            found.append(Expression(panel["title"], text))
    return found


@dataclass(frozen=True)
class Series:
    """One series of a query's result: its labels and its value."""

    labels: dict[str, str]
    value: float


class Prometheus:
    """A running Prometheus that scrapes these servers ("host:port")."""

    def __init__(
        self, fleet: Fleet, targets: Sequence[str], rules: Path | None = None, every: str = EVERY
    ) -> None:
        self._fleet, self._targets = fleet, len(targets)
        home, port = fleet.folder("prometheus-home"), free_port()
        config = {
            "global": {"scrape_interval": every, "evaluation_interval": every},
            "rule_files": [str(rules)] if rules else [],
            "scrape_configs": [
                {
                    "job_name": "sglang",
                    "static_configs": [{"targets": list(targets)}],
                    "metric_relabel_configs": [COLON_AGAIN],
                }
            ],
        }
        file = home / "prometheus.yml"
        file.write_text(json.dumps(config))  # JSON is valid YAML
        self.url = f"http://{HOST}:{port}"
        command = (
            "prometheus", f"--config.file={file}", f"--storage.tsdb.path={home / 'data'}",
            f"--web.listen-address={HOST}:{port}", "--log.level=warn",
        )  # fmt: skip
        fleet.start("prometheus", command, {})
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self._fleet.check()
            try:
                if self._get("/-/ready").status_code == requests.codes.ok:
                    return
            except requests.ConnectionError:
                pass
            time.sleep(0.2)
        raise TimeoutError(f"Prometheus is not ready after {START_TIMEOUT_S:.0f} s")

    def wait_for_scrape(self) -> None:
        """Block until every target has been scraped again, from beginning to end."""
        asked = time.time()
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self._fleet.check()
            scraped = [series.value for series in self.query("timestamp(up) and up == 1")]
            if len(scraped) == self._targets and min(scraped) > asked:
                return
            time.sleep(0.2)
        raise TimeoutError(f"no new scrape of all targets in {START_TIMEOUT_S:.0f} s")

    def _get(self, path: str, **query: str | float) -> requests.Response:
        with requests.Session() as session:
            session.trust_env = False
            return session.get(f"{self.url}{path}", params=query, timeout=30)

    def _data(self, path: str, **query: str | float) -> Any:
        answer = self._get(path, **query).json()
        if answer["status"] != "success":
            raise QueryFailed(f"{query.get('query', path)}: {answer['error']}")
        return answer["data"]

    def query(self, expression: str) -> list[Series]:
        """Return the current value of an expression. Raises QueryFailed if it is not valid."""
        found = self._data("/api/v1/query", query=expression)["result"]
        return [Series(s["metric"], float(s["value"][1])) for s in found]

    def rules(self) -> list[dict[str, Any]]:
        """Return all rules, each with the health and last error that Prometheus reports."""
        groups = self._data("/api/v1/rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]
