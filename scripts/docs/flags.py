"""What docs/deploy.md lists of flags and variables, from `sglang_mixkv/config.py`.

python scripts/docs/flags.py            # rewrite them
python scripts/docs/flags.py --check    # exit status 1 unless they are current
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from sglang_mixkv import config
from sglang_mixkv.channel import planes

DOCUMENT = Path(__file__).parents[2] / "docs" / "deploy.md"
BEGIN, END = "<!-- flags:begin -->\n", "<!-- flags:end -->"

# What is read from the environment alone: no flag, since few deployments need it.
ENVIRONMENT_ONLY = {
    config.ALLOW_UNTESTED_ENV: "Start with an SGLang that is "
    "[refused](compatibility.md#releases). Each difference is logged.",
    config.STATS_DIR_ENV: "A folder in which each process keeps a JSON file of its counters. "
    "Off when empty.",
    config.PORT_ENV: "On prefill: the channel of the rank on GPU n listens on this port plus "
    "n. Default: a free port.",
    planes.PLANE_ENV: "`mooncake` or `nixl`: what decode reads slots with, the same on "
    "both sides. Default: [by the transfer backend](#mooncake-or-nixl).",
    config.PATIENCE_ENV: "A factor on the channel's [times](protocol.md#times). Default: 1.",
}


def flags() -> list[tuple[str, str, str, str]]:
    """(flag with its values, variable, default, help) of each flag, as the parser knows them."""
    parser = argparse.ArgumentParser(add_help=False)
    config.add_flags(parser)
    variables = {option.flag: option.environ for option in config.OPTIONS}
    defaults = {option.flag: getattr(config.Config(), option.field) for option in config.OPTIONS}
    found = []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:  # a removed one
            continue
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


def tables() -> str:
    """What stands between the markers."""
    known = {value for name, value in vars(config).items() if name.endswith("_ENV")}
    if known - {config.ENABLE_ENV} != ENVIRONMENT_ONLY.keys() - {planes.PLANE_ENV}:
        raise SystemExit(f"ENVIRONMENT_ONLY does not describe the variables of config.py: {known}")
    only = "".join(f"* `{name}`: {text}\n" for name, text in ENVIRONMENT_ONLY.items())
    head = "Variables without a flag:\n\n"
    return table(flags(), "flag", "variable", "default", "meaning") + "\n" + head + only


def filled(text: str) -> str:
    """A document with these tables between its markers."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{tables()}{END}{rest.partition(END)[2]}"


def main(argv: list[str]) -> int:
    """Write, or compare; 1 when the document is not current."""
    present = DOCUMENT.read_text()
    wanted = filled(present)
    if "--check" not in argv:
        DOCUMENT.write_text(wanted)
    elif present != wanted:
        print("docs/deploy.md is not current: python scripts/docs/flags.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
