"""The package's source logs sparingly, and in SGLang's format."""

from __future__ import annotations

import ast
from pathlib import Path

import sglang_mixkv

PACKAGE = Path(sglang_mixkv.__file__).parent
FILES = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "tools" not in path.parents]


def test_only_the_banner_is_logged_at_info() -> None:
    """Only the banner is logged at INFO, and all loggers are children of `sglang`.

    Some launchers (Dynamo) add handlers to the `sglang` logger, and none to the root logger.
    """
    nodes = [(path.name, node) for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    calls = [(name, ast.unparse(node)) for name, node in nodes if isinstance(node, ast.Call)]
    assert {text for _, text in calls if text.startswith("logging.")} == {
        "logging.getLogger(f'sglang.{__name__}')"
    }
    assert [name for name, text in calls if text.startswith(("logger.log", "logger.info"))] == [
        "manager.py"
    ]
