"""The plugin's logs inside a server, judged by its source: little, and in SGLang's format."""

from __future__ import annotations

import ast
from pathlib import Path

import sglang_mixkv

PACKAGE = Path(sglang_mixkv.__file__).parent
FILES = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "tools" not in path.parents]


def test_little_is_logged_in_sglangs_format() -> None:
    """The banner, when a manager is made, is the only line below WARNING that is not DEBUG. Loggers
    are below `sglang`, since some launchers (Dynamo) give that logger handlers, and the root
    none."""
    nodes = [(path.name, node) for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    calls = [(name, ast.unparse(node)) for name, node in nodes if isinstance(node, ast.Call)]
    assert {text for _, text in calls if text.startswith("logging.")} == {
        "logging.getLogger(f'sglang.{__name__}')"
    }
    assert [name for name, text in calls if text.startswith(("logger.log", "logger.info"))] == [
        "manager.py"
    ]
