"""docs/flags.md, and the table of flags in README.md, from `sglang_mixkv/config.py`.

python scripts/docs/flags.py            # rewrite both
python scripts/docs/flags.py --check    # exit status 1 unless both are current
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from sglang_mixkv import config

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "flags.md"
README = ROOT / "README.md"

# What config.py reads from the environment alone: no flag, since no deployment should need it.
ENVIRONMENT_ONLY = {
    config.ALLOW_UNTESTED_ENV: "Start with an SGLang release that is not in "
    "[the table](compatibility.md). Its seams are still checked.",
    config.STATS_DIR_ENV: "A folder in which each process keeps a JSON file of its counters: bytes "
    "of target and draft handed to the transport, ranges, dropped messages. Off when empty.",
}

HEAD = """# Flags and variables

Generated from `sglang_mixkv/config.py` by `scripts/docs/flags.py`; `python -m sglang.launch_server
--help` prints the same.

A flag wins over its variable, a variable over the default. `python -m sglang_mixkv doctor` with
the server's flags prints every value and where it came from. In a file for `--config` a flag
stands without its dashes: `enable-mixkv: true`.
"""

TAIL = f"""
Booleans are `1`, `true`, `yes`, `on` or `0`, `false`, `no`, `off`; other text is an error.
`{config.ENABLE_ENV}` is for launchers that know no plugin flags; it has to be in the environment
of every process of the server, on every node. SGLang's own `SGLANG_PLUGINS`, where it is set, has
to name `mixkv`.

Which flags and variables of SGLang an opted-in server refuses is in
[troubleshooting](troubleshooting.md#the-server-does-not-start).
"""


def flags() -> list[tuple[str, str, str, str]]:
    """(flag with its values, variable, default, help) of each flag, as the parser knows them."""
    parser = argparse.ArgumentParser(add_help=False)
    config.add_flags(parser)
    variables = {option.flag: option.environ for option in config.OPTIONS}
    defaults = {option.flag: getattr(config.Config(), option.field) for option in config.OPTIONS}
    found = []
    for action in parser._actions:
        flag = action.option_strings[0]
        values = "" if action.nargs == 0 else " " + "\\|".join(action.choices or ["N"])
        variable = variables.get(flag, config.ENABLE_ENV)
        text = re.sub(r" \[[^\[\]]*env: \w+\]$", "", action.help or "")
        found.append((f"`{flag}{values}`", f"`{variable}`", str(defaults.get(flag, "off")), text))
    return found


def table(rows: list[tuple[str, ...]], *head: str) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "".join(f"{line.replace('|  |', '| |')}\n" for line in lines)


def document() -> str:
    """The text of docs/flags.md."""
    known = {value for name, value in vars(config).items() if name.endswith("_ENV")}
    if known - {config.ENABLE_ENV} != ENVIRONMENT_ONLY.keys():
        raise SystemExit(f"ENVIRONMENT_ONLY does not describe the variables of config.py: {known}")
    only = [(f"`{name}`", text) for name, text in ENVIRONMENT_ONLY.items()]
    tables = [
        table(flags(), "flag", "variable", "default", "meaning"),
        table(only, "variable only", "meaning"),
    ]
    return "\n".join([HEAD, *tables]) + TAIL


def stale_in_readme(text: str) -> list[str]:
    """Rows of README.md's table that are not as they should be, and missing ones.

    Its last column is its own; flag, variable and default are the code's.
    """
    wanted = [f"| {' | '.join(row[:3])} |" for row in flags()]
    rows = [line for line in text.splitlines() if re.match(r"\| `--[a-z-]*mixkv", line)]
    return [
        *(row for row in rows if not row.startswith(tuple(wanted))),
        *(row for row in wanted if not any(line.startswith(row) for line in rows)),
    ]


def main(argv: list[str]) -> int:
    """Write, or compare; 1 when something is not current."""
    stale = stale_in_readme(README.read_text())
    for row in stale:
        print(f"README.md's table of flags is not current: {row}")
    wanted = document()
    if "--check" not in argv:
        DOCUMENT.write_text(wanted)
    elif DOCUMENT.read_text() != wanted:
        stale.append("docs/flags.md")
        print("docs/flags.md is not current: python scripts/docs/flags.py")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
