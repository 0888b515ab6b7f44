"""Rows of bench_pd.py as Markdown, and as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pd_figures import Record

LINES = (
    ("requests completed / failed", ("completed", "failed"), "d"),
    ("requests/s", ("request_throughput",), ".2f"),
    ("output tokens/s", ("output_throughput",), ".1f"),
    ("input tokens/s", ("input_throughput",), ".1f"),
    ("TTFT mean / median / p99, ms", ("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms"), ".0f"),
    ("transfer in TTFT, mean, ms", ("transfer_ms",), ".1f"),
    ("share of the transfer in TTFT", ("transfer_share",), ".1%"),
    ("TPOT mean / median / p99, ms", ("mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms"), ".1f"),
    ("ITL mean / median / p99, ms", ("mean_itl_ms", "median_itl_ms", "p99_itl_ms"), ".1f"),
    ("verify rounds", ("verify_rounds",), "d"),
    ("drafts", ("drafts",), "d"),
    ("accepted drafts", ("accepted",), "d"),
    ("acceptance rate", ("accept_rate",), ".3f"),
    ("accept length", ("accept_length",), ".3f"),
    ("acceptance by position", ("by_position",), ".2f"),
)
"""Title, figures and format of each line."""


def cell(figures: Record, names: Sequence[str], form: str) -> str:
    """One or several figures; a dash where nobody reported one."""
    return " / ".join(_text(figures[name], form) for name in names)


def _text(value: Any, form: str) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, list):
        return " ".join(_text(part, form) for part in value)
    return f"{value:{form}}"


def groups(rows: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Runs of one deployment side by side: labels with the same words before the last one."""
    names = [row["label"].rpartition(" ")[0] for row in rows]
    for name in dict.fromkeys(names):
        yield name, [row for row, other in zip(rows, names, strict=True) if other == name]


def lines(rows: Sequence[Record], first: Record) -> list[list[str]]:
    """A group without its head. ``first``: the run with whose output others are compared."""
    made = [
        [title, *(cell(row["figures"], names, form) for row in rows)]
        for title, names, form in LINES
    ]
    return [*made, ["output as in the first run", *(_same_output(row, first) for row in rows)]]


def _same_output(row: Record, first: Record) -> str:
    if row["workload"] != first["workload"]:
        return "other prompts"
    return "yes" if row["figures"]["output_digest"] == first["figures"]["output_digest"] else "NO"


def markdown(rows: Sequence[Record]) -> str:
    """A table per group: a line per figure, a column per run."""
    return "\n".join(_markdown(group, rows[0]) for _, group in groups(rows))


def _markdown(group: Sequence[Record], first: Record) -> str:
    head = ["", *(row["label"] for row in group)]
    body = ["| " + " | ".join(line) + " |" for line in [head, *lines(group, first)]]
    return "\n".join([body[0], "|---|" + "---:|" * len(group), *body[1:]]) + "\n"


def draw(rows: Sequence[Record], path: Path) -> None:
    """One PNG: throughput, latencies, accept length, acceptance by position."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    labels = [row["label"] for row in rows]
    found = [row["figures"] for row in rows]
    positions = max((len(f["by_position"] or ()) for f in found), default=0)
    panels: dict[str, dict[str, list[Any]]] = {
        "output tokens/s": {"": [f["output_throughput"] for f in found]},
        "TTFT and its wait for the transfer, ms": {
            "median": [f["median_ttft_ms"] for f in found],
            "p99": [f["p99_ttft_ms"] for f in found],
            "transfer, mean": [f["transfer_ms"] for f in found],
        },
        "accept length": {"": [f["accept_length"] for f in found]},
        "acceptance by position of the draft": {
            str(i + 1): [sum((f["by_position"] or [])[i : i + 1]) for f in found]
            for i in range(positions)
        },
    }
    for axis, (title, series) in zip(axes.flat, panels.items(), strict=True):
        _bars(axis, labels, series, title)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _bars(axis: Any, labels: Sequence[str], series: dict[str, list[Any]], title: str) -> None:
    """Bars side by side for each run; none where a figure was not reported."""
    width = 0.8 / max(len(series), 1)
    for index, (name, values) in enumerate(series.items()):
        places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(labels))]
        axis.bar(places, [value or 0 for value in values], width, label=name)
    axis.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
    axis.set_title(title)
    if len(series) > 1:
        axis.margins(y=0.2)
        axis.legend(ncols=len(series), loc="upper center")
