"""Draw docs/figures/status.svg and dashboard.svg from real servers, which takes about 5 minutes:

    PYTHONPATH=.:tests python -m docs.figures

Two decode servers use two prefill servers alternately. One of these has no drafter, and is removed
from the router after a minute. test_figures.py fails if the figures are out of date.
"""

from __future__ import annotations

import json
import math
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from mixkv_demo import launch
from mixkv_demo.launch import HOST, PASS_THROUGH, Launch, Topology
from mixkv_demo.pair import BOS, SEP, SYMBOLS, ask
from mixkv_demo.processes import Fleet
from mixkv_demo.prometheus import Prometheus
from mixkv_demo.servers import bring_up, silent, start
from sglang_mixkv.tools.client import request
from sglang_mixkv.tools.status import MetricPages, read, status

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
DASHBOARD = FIGURES.parent / "dashboard.json"
SHOWN = (
    "Warm share", "Cold by reason", "Accept length by state",
    "Wait for draft KV", "Requests by state", "What cold drafters cost",
)  # fmt: skip
"""The dashboard's panels that are drawn."""
COLORS = {"": "#0072b2", "warm": "#009e73", "cold": "#d55e00", "no_drafter": "#d55e00",
          "p50": "#8a7000", "p99": "#cc79a7"}  # fmt: skip
"""Colors of curves by the last part of their legend; "" for a server's only curve."""
HEAD = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" {font}>'
SANS = 'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222222"'
MONO = SANS.replace("Helvetica, Arial, sans-serif", "Menlo, Consolas, DejaVu Sans Mono, monospace")


# ---------------------------------------------------------------- drawing


def screen(text: str) -> str:
    """Draw a terminal with this text."""
    lines = text.splitlines()
    w, h = round(20 + 7.25 * max(map(len, lines))), 20 + 16 * len(lines)
    rows = [
        f'<text x="10" y="{22 + 16 * number}" xml:space="preserve">{escape(line)}</text>'
        for number, line in enumerate(lines) if line
    ]  # fmt: skip
    back = f'<rect width="{w}" height="{h}" fill="#f6f8fa"/>'
    return "\n".join([HEAD.format(w=w, h=h, font=MONO), back, *rows, "</svg>\n"])


Curve = Sequence[tuple[float, float]]
"""Points of (seconds, value)."""


@dataclass(frozen=True)
class Panel:
    """One panel of the dashboard. `label`: the axis label. `curves`: the curves by legend."""

    title: str
    label: str
    unit: str
    curves: Mapping[str, Curve]

    def tick(self, value: float) -> str:
        if self.unit == "percentunit":
            return f"{value:.0%}"
        return f"{1000 * value:g} ms" if self.unit == "s" else f"{value:g}"

    def ticks(self) -> list[float]:
        """Return about five axis ticks in steps of 1, 2, 2.5 or 5 times a power of ten."""
        most = max((v for curve in self.curves.values() for _, v in curve), default=0) or 1
        if self.unit == "percentunit":
            return [0, 0.25, 0.5, 0.75, 1]
        power = 10.0 ** math.floor(math.log10(most / 4))
        step = next(power * n for n in (1, 2, 2.5, 5, 10) if 4 * power * n >= most)
        return [step * n for n in range(math.ceil(most / step) + 1)]


def sheet(panels: Sequence[Panel], end: float, event: tuple[float, str]) -> str:
    """Draw the panels in rows of three, each with a vertical line at the event."""
    h = 266 * math.ceil(len(panels) / 3)
    lines = [
        HEAD.format(w=1200, h=h, font=SANS),
        f'<rect width="1200" height="{h}" fill="#f4f5f5"/>',
    ]
    for number, panel in enumerate(panels):
        lines.append(f'<g transform="translate({400 * (number % 3)} {266 * (number // 3)})">')
        lines += [*_panel(panel, end, event), "</g>"]
    return "\n".join([*lines, "</svg>\n"])


def _panel(panel: Panel, end: float, event: tuple[float, str]) -> Iterator[str]:
    ticks = panel.ticks()

    def x(seconds: float) -> float:
        return round(64 + 314 * seconds / end, 1)

    def y(value: float) -> float:
        return round(182 - 118 * value / ticks[-1], 1)

    yield '<rect x="4" y="4" width="392" height="258" fill="#ffffff" stroke="#d8d8d8"/>'
    yield f'<text x="14" y="22" font-weight="bold">{panel.title}</text>'
    yield f'<text x="14" y="38" fill="#666666">{panel.label}</text>'
    for value in ticks:
        yield f'<path d="M64 {y(value)}H378" stroke="#e4e4e4"/>'
        yield f'<text x="58" y="{y(value) + 4}" text-anchor="end">{panel.tick(value)}</text>'
    for seconds in range(0, int(end) + 1, 60):
        yield f'<text x="{x(seconds)}" y="198" text-anchor="middle">{seconds} s</text>'
    at, what = event
    yield f'<path d="M{x(at)} 56V182" stroke="#666666" stroke-dasharray="3 3"/>'
    yield f'<text x="{x(at)}" y="52" text-anchor="middle" fill="#666666">{what}</text>'
    # The first server's curves are wide and pale, so that equal curves of two servers are visible.
    servers = sorted({name.partition(":")[0] for name in panel.curves if ":" in name})
    wide = {name: len(servers) > 1 and name.startswith(servers[0]) for name in panel.curves}
    for row, name in enumerate(sorted(panel.curves, key=lambda name: not wide[name])):
        shows = name.rpartition(": ")[2]
        style = f'stroke="{COLORS.get("" if ":" in shows else shows, "#555555")}" '
        style += 'stroke-width="6" stroke-opacity="0.4"' if wide[name] else 'stroke-width="1.6"'
        points = "L".join(f"{x(seconds)} {y(value)}" for seconds, value in panel.curves[name])
        yield f'<path d="M{points}" fill="none" {style}/>'
        left, low = 14 + 190 * (row // 3), 214 + 15 * (row % 3)
        yield f'<path d="M{left} {low}h16" {style}/>'
        yield f'<text x="{left + 22}" y="{low + 4}">{name}</text>'


# ---------------------------------------------------------------- data


def panels() -> dict[str, dict[str, Any]]:
    """Return the dashboard's panels with an axis, by title."""
    found = json.loads(DASHBOARD.read_text())["panels"]
    return {one["title"]: one for one in found if one["type"] == "timeseries"}


def axis(panel: dict[str, Any]) -> tuple[str, str]:
    """Return the axis' label and Grafana's unit."""
    defaults = panel["fieldConfig"]["defaults"]
    return defaults["custom"]["axisLabel"], defaults["unit"]


Names = Mapping[str, str]
"""Maps real addresses to those shown in the figures."""


def named(text: str, names: Names) -> str:
    for theirs, ours in names.items():
        text = text.replace(theirs, ours)
    return text


def asked(prometheus: Prometheus, name: str, since: float, until: float, names: Names) -> Panel:
    """Query Prometheus for a panel's curves as Grafana would."""
    panel, curves = panels()[name], dict[str, Curve]()
    for target in panel["targets"]:
        text = target["expr"].replace("$__rate_interval", "20s")
        text = text.replace("$model", ".+").replace("$instance", ".+")
        found = prometheus._data(
            "/api/v1/query_range", query=text, start=since, end=until, step=4
        )["result"]  # fmt: skip
        for one in found:
            legend = re.sub(r"\{\{(\w+)\}\}", lambda at, m=one["metric"]: m.get(at[1], ""),
                            target["legendFormat"])  # fmt: skip
            points = [(t - since, float(v)) for t, v in one["values"] if v != "NaN"]
            if points:
                curves[named(legend, names)] = points
    return Panel(name, *axis(panel), curves)


def router(name: str, prefills: Sequence[tuple[Launch, int]], decodes: Sequence[Launch]) -> Launch:
    (first, port), *others = prefills
    flags = ("--policy", "random", *PASS_THROUGH[2:], "--decode", decodes[1].url)
    return replace(launch.router(first, decodes[0], port, *others, flags=flags), name=name)


def main() -> None:
    enable = ("--enable-mixkv",)
    topology = Topology(mixkv_prefill=enable, mixkv_decode=enable)
    warm, decode, port = launch.prefill_and_decode("mla", topology)
    cold, other, cold_port = launch.prefill_and_decode("mla", topology)
    cold, other = replace(launch.without_drafter(cold), name="cold"), replace(other, name="other")
    with Fleet() as fleet:
        servers = [warm, cold, decode, other]
        start(fleet, servers)
        routers = [
            router(f"router-{len(some)}", some, (decode, other))
            for some in ([(warm, port), (cold, cold_port)], [(warm, port)])
        ]
        bring_up(fleet, routers, silent)
        prometheus = Prometheus(fleet, [f"{HOST}:{one.port}" for one in servers], every="3s")
        names = {
            f"{HOST}:{warm.port}": "prefill-a:30000", f"{HOST}:{cold.port}": "prefill-b:30000",
            f"{HOST}:{decode.port}": "decode-0:30001", f"{HOST}:{other.port}": "decode-1:30001",
            f"{HOST}:{port}": "10.0.0.1:8998", f"{HOST}:{cold_port}": "10.0.0.2:8998",
        }  # fmt: skip
        source, url, left = random.Random(1), [routers[0].url], threading.Event()

        def client() -> None:
            while not left.is_set():
                some = [BOS, *source.sample(SYMBOLS, source.randint(24, 40)), SEP]
                ask(url[0], some)

        clients = [threading.Thread(target=client, daemon=True) for _ in range(4)]
        for one in clients:
            one.start()
        time.sleep(30)  # a rate needs several scrapes
        since = time.time()
        time.sleep(60)
        pages = MetricPages()
        for one in servers:
            text = request("GET", f"{one.url}/metrics", 30).text
            pages |= read(named(one.url, names), named(text, names))
        event, url[0] = time.time() - since, routers[1].url
        time.sleep(75)
        left.set()
        for one in clients:
            one.join()
        prometheus.wait_for_scrape()
        until = time.time()
        shown = [asked(prometheus, name, since, until, names) for name in SHOWN]
    (FIGURES / "status.svg").write_text(screen(status(pages, {}).text()))
    svg = sheet(shown, until - since, (event, "prefill-b leaves the router"))
    (FIGURES / "dashboard.svg").write_text(svg)


if __name__ == "__main__":
    main()
