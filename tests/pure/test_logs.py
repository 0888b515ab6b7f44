"""What the plugin logs inside a server, read off its source: little, and in SGLang's format."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import sglang_mixkv

PACKAGE = Path(sglang_mixkv.__file__).parent
FILES = [
    path for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).parts[0] not in ("tools", "__main__.py")
]  # fmt: skip

# Calls that would give the plugin handlers, levels or output of its own.
OWN_OUTPUT = {
    "addHandler", "basicConfig", "captureWarnings", "dictConfig", "fileConfig", "print",
    "setLevel", "setLoggerClass", "StreamHandler", "FileHandler",
}  # fmt: skip


def calls(source: str) -> Iterator[tuple[str, str]]:
    """Of each call what is called, and as what: (`info`, `logger.info('a')`)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            function = node.func
            called = getattr(function, "attr", None) or getattr(function, "id", "")
            yield called, ast.unparse(node)


def test_little_is_logged_in_sglangs_format() -> None:
    """Below WARNING there is the banner, when a manager is made; the rest is DEBUG. Loggers are
    below `sglang`: some launchers (Dynamo) give that logger handlers, and the root none."""
    found = [(path.name, *call) for path in FILES for call in calls(path.read_text())]
    loggers = {text for _, called, text in found if called == "getLogger"}
    assert loggers == {"logging.getLogger(f'sglang.{__name__}')"}
    assert [one for one in found if one[1] in OWN_OUTPUT] == []
    assert [one[0] for one in found if one[2].startswith(("logger.info", "logging.info"))] == []
    assert [one[0] for one in found if one[2].startswith("logger.log")] == ["manager.py"]
