"""Drawn launch lines: a line that plan can read has the flags that bash passes to the server."""

from __future__ import annotations

import subprocess

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_mixkv.tools.plan_shell import lines_of

SET = "A=one\nB='two three'\nD=' x '\nE=\n"
PARTS = (
    "a", "--f", "=", "/", ",", "%", ":", "#", "7", "''", '""', "'q  $A'", '"q  $B"', '"\\$A \\\\"',
    '"\\" a"', "\\ ", "\\'", '\\"', "\\$A", "\\\\", "$A", "${A}", "$B", "${B}", "${C:-d e}",
    "${E:-z}", "$D", "$E", "\u00a0", "\\\n",
)  # fmt: skip
WORDS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map("".join)
BETWEEN = st.sampled_from((" ", "  ", "\t", " \\\n   ", " >/dev/null ", " 2>&1 "))
LINES = st.lists(st.tuples(WORDS, BETWEEN), max_size=6).map(lambda drawn: sum(drawn, ()))
SERVER = """exec 3>&1 >/dev/null
sglang() { printf '%s\\0' "$@" >&3; exit; }
"""


def passed_by_bash(line: str) -> list[str]:
    run = ["bash", "--norc", "-c", f"{SERVER}{SET}{line}"]
    found = subprocess.run(run, capture_output=True, check=True, text=True).stdout
    return found.split("\0")[1:-1]  # after "serve"


@settings(max_examples=500, deadline=None)
@given(LINES)
@example(("a#b", " ", "$E", " ", "7$E", " ", "#c"))
@example(("\\ #", " \\\n   ", "a"))
@example(("$B", "\t", "'q  $A'$B\"q  $B\"", " \\\n   ", "${C:-d e}"))
def test_flags_are_those_that_bash_passes(drawn: tuple[str, ...]) -> None:
    line = f"sglang serve --model-path {''.join(drawn)}"
    try:
        read, *_ = lines_of(SET + line, {}, {})
    except ValueError as error:
        if "is cut off from its command by a comment" not in str(error):
            raise
        return
    if not read.stop:
        assert read.flags == passed_by_bash(line)
