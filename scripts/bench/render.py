"""A result of a benchmark, and records of the check on a GPU, as markdown."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]
SECONDS = ("median", "q1", "q3")
HIDDEN = ("samples",)


def table(records: list[Record]) -> str:
    """A markdown table; seconds become milliseconds, bytes MiB."""
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
    if value is None or isinstance(value, str):
        return value or ""
    if name in SECONDS:
        return f"{value * 1e3:.3g}"
    if name == "bytes":
        return f"{value / 2**20:.3g}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def checks_table(checks: list[Record]) -> str:
    """Every figure that has a target."""
    return table(
        [
            {
                "figure": check["name"],
                "target": f"at {'most' if check['at_most'] else 'least'} {check['target']:g}",
                "measured": check["value"],
                "met": check["met"],
            }
            for check in checks
        ]
    )


def machine_table(machine: Record) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    rows = {**machine, "packages": packages}
    lines = [f"| {name.replace('_', ' ')} | {value} |" for name, value in rows.items()]
    return "\n".join(["| what | value |", "|---|---|", *lines]) + "\n"


def markdown(result: Record) -> str:
    quick = "Quick run: its figures mean nothing.\n\n" if result["quick"] else ""
    tables = {"machine": machine_table(result["machine"]), "checks": checks_table(result["checks"])}
    for part, records in result["parts"].items():
        lacks = f"Not measured: {result['lacks']}\n" if result["lacks"] else ""
        tables[part] = lacks or table(records)
    parts = "\n".join(f"## {name}\n\n{text}" for name, text in tables.items())
    return f"# {result['bench']}\n\n{quick}{parts}"
