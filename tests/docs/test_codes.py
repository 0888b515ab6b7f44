"""Every refusal, error and warning carries a code of the table in errors.py."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import sglang_mixkv
from sglang_mixkv import refusals
from sglang_mixkv.errors import _REASON_OF, CODES, REASONS, codes_in, refuse

PACKAGE = Path(sglang_mixkv.__file__).parent
TABLE = PACKAGE / "errors.py"
PAGE = (PACKAGE.parent / "docs" / "troubleshooting.md").read_text()
WITH_WHAT = (PACKAGE.parent / "docs" / "compatibility.md").read_text()
SOURCES = [p for p in sorted(PACKAGE.rglob("*.py")) if p != TABLE]
# Log lines around a value that carries a code already: a MixKVError, or a reason made of one.
AROUND = {
    "%s",
    "[%s] draft channel, %s %s: %s. From now on counted, not logged",
    "sglang-mixkv fails room %s: %s",
    "sglang-mixkv refuses prefill server %s: %s",
}


def test_the_codes_of_the_source_are_those_of_the_table() -> None:
    used = set.union(*(codes_in(path.read_text()) for path in SOURCES))
    assert used == set(CODES)


def test_the_troubleshooting_page_has_an_entry_for_each_code_in_the_tables_order() -> None:
    assert re.findall(r"^### (MIXKV-\S+)$", PAGE, re.MULTILINE) == list(CODES)
    entries = re.split(r"^### MIXKV-\S+$", PAGE.partition("## By code")[2], flags=re.MULTILINE)[1:]
    assert all(len(entry.split()) > 10 for entry in entries)


def test_the_pages_name_what_is_refused_at_start() -> None:
    rules = [re.search(r"--[a-z-]+", name) for name, *_ in refusals.ARGUMENT_RULES]
    source = Path(refusals.__file__).read_text()
    variables = re.findall(r'"(SGLANG_[A-Z_]+)"', source)
    named = {found[0] for found in rules if found} | set(variables)
    assert {name for name in named if name not in PAGE + WITH_WHAT} == set()


SPEAKERS = re.compile(r"MixKVError|refuse|releases\.stop|stop|logger\.(warning|error|exception)")


def uncoded(source: str) -> list[str]:
    """What refuses, raises or warns without a code."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        speaker = ast.unparse(call.func)
        if not SPEAKERS.fullmatch(speaker) or codes_in(ast.unparse(call)):
            continue
        if not (speaker.startswith("logger.") and ast.literal_eval(call.args[0]) in AROUND):
            found.append(f"line {call.lineno}: {ast.unparse(call)[:80]}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_said_without_a_code(path: Path) -> None:
    assert uncoded(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "raise MixKVError('this is odd')",
        "raise refuse('a', 'b', 'c', 'd')",
        "logger.warning('sglang-mixkv is tired of %s', room)",
        "releases.stop('headline', [], 'remedy')",
    ],
)
def test_a_text_without_a_code_is_noticed(line: str) -> None:
    assert uncoded(line)


def test_a_code_comes_first_and_decides_the_reason_that_is_counted() -> None:
    error = refuse("MIXKV-PAIR-02", "1", "2", "3", "4")
    assert str(error).startswith("[MIXKV-PAIR-02] expected 1; got 2.")
    assert (error.code, error.reason) == ("MIXKV-PAIR-02", "protocol")
    assert refuse("MIXKV-START-05", "1", "2", "3", "4").reason == "other"
    assert set(_REASON_OF) <= set(CODES)
    assert {*_REASON_OF.values(), "other"} == set(REASONS)


def test_codes_look_alike() -> None:
    assert all(re.fullmatch(r"MIXKV-(START|PAIR|MSG|SELF)-\d\d", code)
               for code in CODES)  # fmt: skip
