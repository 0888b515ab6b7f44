"""Generate docs/deploy.md's table of flags and variables from `sglang_mixkv/config.py`.

python scripts/docs/flags.py            # rewrite it
python scripts/docs/flags.py --check    # exit status 1 if it is not current
"""

from __future__ import annotations

import sys
from pathlib import Path

from sglang_mixkv import config

DOCUMENT = Path(__file__).parents[2] / "docs" / "deploy.md"
BEGIN, END = "<!-- flags:begin -->\n", "<!-- flags:end -->"

LINKS = {
    "an SGLang that is refused": "compatibility.md#releases",
    "the channel's times": "protocol.md#times",
    "by the transfer backend": "#mooncake-or-nixl",
}
"""Words in the descriptions, and where the documents explain them."""


def settings() -> list[tuple[str, ...]]:
    """(flag, variable, values, default, meaning) of each setting."""
    found = []
    for one in config.SETTINGS:
        text = one.help
        for words, place in LINKS.items():
            text = text.replace(words, f"[{words}]({place})")
        flag = f"`{one.flag}`" if one.flag else ""
        default = "off" if one.default is False else str(one.default or "")
        found.append((flag, f"`{one.environ}`", one.words, default, text))
    return found


def table(rows: list[tuple[str, ...]], *head: str) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "".join(f"{line.replace('|  |', '| |')}\n" for line in lines)


def tables() -> str:
    """What stands between the markers."""
    return table(settings(), "flag", "variable", "values", "default", "meaning")


def filled(text: str) -> str:
    """A document with these tables between its markers."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{tables()}{END}{rest.partition(END)[2]}"


def main(argv: list[str]) -> int:
    """Write the table, or compare it; return 1 if the document is not current."""
    present = DOCUMENT.read_text()
    wanted = filled(present)
    if "--check" not in argv:
        DOCUMENT.write_text(wanted)
    elif present != wanted:
        print("docs/deploy.md is not current: run python scripts/docs/flags.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
