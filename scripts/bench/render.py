"""Turn result files into markdown: `render.py RESULT.json... [--into DOCUMENT]`.

With --into, each table that has markers in the document replaces what stands between them:

    <!-- bench:NAME:begin -->  ...  <!-- bench:NAME:end -->

NAME: `machine`, `checks`, or a bench and a part, as in `cost.lines`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
SECONDS = (
    "plain", "median", "q1", "q3", "plan", "pack", "wire", "signal", "scatter", "grant",
    "written", "total",
)  # fmt: skip
HIDDEN = ("grant", "samples")


def table(records: list[Record]) -> str:
    """A markdown table; seconds become milliseconds, bytes MiB, lists words."""
    if not records:
        return "Not measured.\n"
    names = [name for name in dict.fromkeys(n for r in records for n in r) if name not in HIDDEN]
    lines = ["| " + " | ".join(map(_title, names)) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(_cell(n, r.get(n, "")) for n in names) + " |" for r in records]
    return "\n".join(lines) + "\n"


def _title(name: str) -> str:
    words = name.replace("_", " ")
    return f"{words}, ms" if name in SECONDS else "MiB" if name == "bytes" else words


def _cell(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if value == "" or isinstance(value, str):
        return str(value)
    if name in SECONDS:
        return f"{value * 1e3:.3g}"
    if name == "bytes":
        return f"{value / 2**20:.3g}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def machine_table(results: list[Record]) -> str:
    """The machine of the first result, with the load of every one."""
    found = dict(results[0]["machine"])
    packages = ", ".join(f"{k} {v}" for k, v in found.pop("packages", {}).items())
    loads = "; ".join(
        f"{r['bench']} {r['machine']['load_at_start']:.1f} to {r['machine']['load_at_end']:.1f}"
        for r in results
    )
    rows = [(k.replace("_", " "), v) for k, v in found.items() if not k.startswith("load")]
    rows += [("packages", packages), ("load average, start to end", loads)]
    lines = ["| what | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows if v != "")]
    return "\n".join(lines) + "\n"


def checks_table(results: list[Record]) -> str:
    """Every figure that has a target."""
    rows = [
        {
            "figure": check["name"],
            "target": ("at most " if check["at_most"] else "at least ") + f"{check['target']:g}",
            "measured": check["value"],
            "met": check["met"],
        }
        for result in results
        for check in result["checks"]
    ]
    return table(rows)


def tables(results: list[Record]) -> dict[str, str]:
    """Every table by the name of its marker."""
    found = {"machine": machine_table(results), "checks": checks_table(results)}
    for result in results:
        for part, records in result["parts"].items():
            name = f"{result['bench']}.{part}"
            found[name] = (
                f"Not measured: {result['lacks']}\n" if result["lacks"] else table(records)
            )
    return found


def markdown(result: Record) -> str:
    """One result as a document of its own."""
    quick = "Quick run: its figures mean nothing.\n\n" if result["quick"] else ""
    parts = "\n".join(f"## {name}\n\n{text}" for name, text in tables([result]).items())
    return f"# {result['bench']}\n\n{quick}{parts}"


def fill(document: str, found: dict[str, str]) -> str:
    """The document with each table between its markers. Raises KeyError if it has none of any."""
    filled = 0
    for name, text in found.items():
        begin, end = f"<!-- bench:{name}:begin -->", f"<!-- bench:{name}:end -->"
        block = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        document, count = block.subn(lambda _, b=begin, t=text, e=end: f"{b}\n{t}{e}", document)
        filled += count
    if not filled:
        raise KeyError(f"no markers for any of {list(found)}")
    return document


def load(paths: Iterable[Path]) -> list[Record]:
    return [json.loads(path.read_text()) for path in paths]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, help="document whose markers are filled")
    arguments = parser.parse_args()
    results = load(arguments.results)
    if arguments.into:
        arguments.into.write_text(fill(arguments.into.read_text(), tables(results)))
    else:
        print("\n".join(map(markdown, results)))


if __name__ == "__main__":
    main()
