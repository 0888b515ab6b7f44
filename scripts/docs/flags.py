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
BEGIN, END = "<!-- flags:begin -->", "<!-- flags:end -->"

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


def readme(text: str) -> str:
    """README.md with its table renewed: the first clause of each help text."""
    rows = [(*row[:3], re.split(r"[:;.]", row[3])[0]) for row in flags()]
    made = table(rows, "flag", "environment", "default", "")
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"README.md lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n{made}{END}{after}"


def main(argv: list[str]) -> int:
    """Write, or compare; 1 when something is not current."""
    wanted = {DOCUMENT: document(), README: readme(README.read_text())}
    old = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if "--check" in argv:
        for path in old:
            print(f"{path.relative_to(ROOT)} is not current: python scripts/docs/flags.py")
        return int(bool(old))
    for path in old:
        path.write_text(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
