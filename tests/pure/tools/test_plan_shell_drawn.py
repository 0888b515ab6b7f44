"""Drawn launch lines: a line that plan can read has the flags that bash passes to the server."""

from __future__ import annotations

import subprocess
from shutil import which

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_mixkv.tools.plan_shell import lines_of
from sglang_mixkv.tools.plan_text import split

SET = "A=one\nB='two three'\nD=' x '\nE=\n"
PARTS = (
    "a", "--f", "=", "/", ",", "%", ":", "#", "7", "''", '""', "'q  $A'", '"q  $B"', '"\\$A \\\\"',
    '"\\" a"', "\\ ", "\\'", '\\"', "\\$A", "\\\\", "$A", "${A}", "$B", "${B}", "${C:-d e}",
    "${E:-z}", "${E-z}", "{a,b}", "$D", "$E", "\u00a0", "\\\n",
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


STATEMENTS = (
    "A=8", "A=4  # four", "A+=1", "A=", "export A=2", "unset A", "A=$(echo 3)", "A=${B:-7}",
    "A=8; A=4",
    "true && A=5", '[ -n "$P" ] && A=2', "((A=A+1))", "(( A = 3 ))", "{ A=3; }", "A=2 true",
    "for A in 2 4; do true; done", 'case "$P" in x) A=1;; *) A=2;; esac', "read A <<< 5", "let A=3",
    "printf -v A 3", "printf a", 'echo "A=$A"', "eval A=3", "declare A=9", ": ${A:=6}", "f", "g",
    "export SGLANG_X=1", "SGLANG_X=6", '[ -n "$P" ] && export SGLANG_X=8', "export -n SGLANG_X",
    "export $(echo SGLANG_X=7)", 'export "SGLANG_X=$A"', "g() { export SGLANG_X=4; }", "set -a",
    "ARGS=(--tp $A)", "ARGS=(\n  --tp 2\n  --dp 4  # don't\n)", "ARGS+=(--dp 2)", "E='--dp 8'",
    "E=$A",
    "C='sglang serve --tp 2'", 'C="$C --dp 4"', "C=(sglang serve --tp 2)", "C+=(--dp 2)",
)  # fmt: skip
LAUNCHES = (
    "sglang serve --tp $A", "sglang serve --tp ${A:-5}", "sglang serve --tp ${A-5}",
    "sglang serve --dp 6",
    "SGLANG_X=3 sglang serve --tp 8", "A=7 sglang serve --tp ${A:-3}", 'sglang serve "${ARGS[@]}"',
    "sglang serve ${ARGS[@]}", "$C", "$C --dp 2", '"${C[@]}"', "sglang serve $E",
    "true && sglang serve --dp 7",
    "{ sglang serve --tp $A; }", "(A=7; sglang serve --tp ${A:-2})", "sglang serve > >(:) --tp $A",
    "f() { sglang serve --tp ${A:-5}; }", "f --model-path m --tp 3",
    'f() { sglang serve --dp 3 "$@"; }', "f() {\nsglang serve --tp 9\n}",
)  # fmt: skip
BLOCKS = (
    'if [ -n "$P" ]; then\n%s\nfi',
    "f() {\n%s\n}",
    "for i in 1 2; do\n  %s\ndone",
    "(\n%s\n)",
)
ONE = st.sampled_from(STATEMENTS) | st.sampled_from(LAUNCHES)
SCRIPTS = st.lists(
    ONE
    | st.tuples(st.sampled_from(BLOCKS), st.lists(ONE, min_size=1, max_size=3).map("\n".join)).map(
        lambda drawn: drawn[0] % drawn[1]
    ),
    max_size=5,
)
LAUNCHED = """FUNCNEST=9
exec 3>&1 >/dev/null 2>&1
sglang() { printf '%s\\0' "${SGLANG_X-none}" "$@" >&3; printf '\\n' >&3; }
"""


@settings(max_examples=500, deadline=None)
@given(SCRIPTS, st.sampled_from(LAUNCHES))
@example(["C=(sglang serve --tp 2)", "C+=(--dp 2)"], '"${C[@]}"')
@example(["C='sglang serve --tp 2'"], "$C --dp 2")
@example(["f() {\nsglang serve --tp 9\n}", "export SGLANG_X=1"], "f")
@example(["A=4", "((A=A+1))"], "sglang serve --tp $A")
@example(["(\nA=4\n)"], "sglang serve --tp ${A-5}")
@example(["A=4", "true && A=5"], "sglang serve --tp $A")
def test_a_scripts_launch_is_the_one_that_bash_runs(drawn: list[str], launch: str) -> None:
    """If `plan` reads a script, the server has the flags and variables of each that bash starts,
    whether its branches are taken or not."""
    script = "\n".join([*drawn, launch])
    try:
        read = split(script, "prefill")
    except ValueError:
        return
    if not read.launcher:
        return
    for taken in ("", "x"):
        run = [str(which("bash")), "--norc", "-c", LAUNCHED + script]
        env = {"PATH": "", "P": taken}
        found = subprocess.run(run, capture_output=True, text=True, env=env, cwd="/", check=False)
        launched = {tuple(line.split("\0")[:-1]) for line in found.stdout.splitlines()}
        assert launched <= {(read.environ.get("SGLANG_X", "none"), "serve", *read.flags)}
