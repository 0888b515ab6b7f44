"""The tables of flags in docs/deploy.md are made of config.py; that they are current is a hook of
test_lint.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.docs import flags as script
from sglang_mixkv import config

ROOT = Path(__file__).parents[2]


def test_a_new_flag_makes_them_stale(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = config.Setting("port", "SGLANG_MIXKV_NEW", "a number", int, "Something.", "--mixkv-new")
    monkeypatch.setattr(config, "SETTINGS", (*config.SETTINGS, new))
    assert script.main(["--check"]) == 1
    assert "docs/deploy.md is not current" in capsys.readouterr().out
    new_row = "| `--mixkv-new` | `SGLANG_MIXKV_NEW` | a number | | Something. |"
    assert new_row in script.tables()


def test_no_document_names_a_flag_or_variable_that_is_none() -> None:
    """Everywhere in the docs, not in the tables alone."""
    flags = {setting.flag for setting in config.SETTINGS}
    sources = "".join(path.read_text() for path in (ROOT / "sglang_mixkv").rglob("*.py"))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = path.read_text()
        assert set(re.findall(r"--(?:enable-)?mixkv[a-z-]*[a-z]", text)) - flags == set(), path
        variables = set(re.findall(r"SGLANG_[A-Z_]*MIXKV[A-Z_]*[A-Z]", text))
        assert {name for name in variables if name not in sources} == set(), path
