"""Versions that have to change together."""

from __future__ import annotations

import re
import tomllib

from sglang_mixkv import __version__
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.engine.releases import SUPPORTED_SGLANG

from .pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LATEST = SUPPORTED_SGLANG[-1]


def test_one_version_of_the_plugin() -> None:
    assert PROJECT["version"] == __version__
    heads = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert __version__ in heads[:2], "the newest release in CHANGELOG.md"


def test_the_supported_sglang_is_named_everywhere() -> None:
    assert PROJECT["optional-dependencies"]["sglang"] == [f"sglang=={LATEST}"]
    assert f"lmsysorg/sglang:v{LATEST}" in (ROOT / "docker" / "Dockerfile").read_text()
    assert LATEST in (ROOT / "README.md").read_text()


def compatibility() -> list[list[str]]:
    """The rows of that section's table."""
    page = (ROOT / "docs" / "compatibility.md").read_text()
    section = page.partition("\n## Releases\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]


def test_the_compatibility_table_has_these_rows() -> None:
    mine = {row[1]: row for row in compatibility() if __version__.startswith(row[0])}
    assert sorted(mine) == sorted(SUPPORTED_SGLANG)
    assert {row[-1] for row in mine.values()} == {str(PROTOCOL[1])}
    shown = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert mine[LATEST][-2] == ", ".join(shown)
