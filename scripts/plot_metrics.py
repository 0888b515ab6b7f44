#!/usr/bin/env python3
"""Draw docs/metrics.png: the dashboard's panels over live servers of the small pair.

    source scripts/env.sh && source scripts/prometheus.sh && mixkv_prometheus
    python scripts/plot_metrics.py

Needs matplotlib beside the demo's dependencies. Takes the start of two servers and --seconds.
"""

from __future__ import annotations

import argparse
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mixkv_demo.launch import HOST, Topology
from mixkv_demo.pair import prompts
from mixkv_demo.processes import Fleet
from mixkv_demo.prometheus import Expression, Prometheus, Series, expressions
from mixkv_demo.servers import Deployment, disaggregated

DOCS = Path(__file__).parents[1] / "docs"
FLAGS = ("--enable-metrics",)
STEP_S = 5.0
UNITS = {
    "Bps": "bytes/s", "bytes": "bytes", "s": "s/s", "ms": "ms", "mbytes": "MiB", "reqps": "1/s",
}  # fmt: skip

Curves = list[tuple[Expression, list[Series]]]


def load(deployment: Deployment, seconds: float, side_by_side: int) -> None:
    """Ask the fixed prompts again and again."""
    deadline = time.monotonic() + seconds
    endless = itertools.cycle(prompts())
    with ThreadPoolExecutor(side_by_side) as pool:
        while time.monotonic() < deadline:
            list(pool.map(deployment.ask, itertools.islice(endless, side_by_side)))


def measure(seconds: float) -> tuple[float, Curves]:
    """When it began (unix seconds), and every curve of the dashboard."""
    with Fleet() as fleet:
        topology = Topology(
            ("--tp", "2", *FLAGS), ("--tp", "1", *FLAGS), *[("--enable-mixkv",)] * 2
        )
        deployment = disaggregated(fleet, "mla", topology)
        targets = [f"{HOST}:{server.port}" for server in deployment.servers]
        prometheus = Prometheus(fleet, targets, DOCS / "alerts.yml")
        start = time.time()
        load(deployment, seconds / 2, 1)
        load(deployment, seconds / 2, 4)
        prometheus.wait_for_scrape()
        queries = expressions(DOCS / "dashboard.json", "30s")
        found = [(q, prometheus.range(q.text, start, time.time(), STEP_S)) for q in queries]
    return start, found


def legend(expression: Expression, series: Series) -> str:
    text = expression.legend
    for name, value in series.labels.items():
        text = text.replace(f"{{{{{name}}}}}", Path(value).name if "/" in value else value)
    return text


def draw(start: float, curves: Curves, path: Path) -> None:
    """A plot a panel, three in a row."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys(expression.panel for expression, _ in curves))
    rows = -(-len(panels) // 3)
    figure, axes = pyplot.subplots(rows, 3, figsize=(15, 2.6 * rows), layout="constrained")
    for axis, panel in zip(axes.flat, panels, strict=False):
        draw_panel(axis, start, [curve for curve in curves if curve[0].panel == panel])
        axis.set_title(panel, fontsize=10)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    figure.savefig(path, dpi=75)


def draw_panel(axis: Any, start: float, curves: Curves) -> None:
    for expression, found in curves:
        for series in found:
            when, values = zip(*series.points, strict=True)
            label = legend(expression, series)
            axis.plot([t - start for t in when], values, label=label, linewidth=1.2)
        axis.set_ylabel(UNITS.get(expression.unit, ""), fontsize=8)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("s", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
    handles = axis.get_legend_handles_labels()[0]
    if not handles:
        axis.text(0.5, 0.5, "no data: nothing failed", ha="center", transform=axis.transAxes)
    elif len(handles) <= 6:
        axis.legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120, help="of load (default 120)")
    parser.add_argument("--out", type=Path, default=DOCS / "metrics.png")
    options = parser.parse_args()
    draw(*measure(options.seconds), options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
