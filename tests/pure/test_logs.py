"""What the plugin logs inside a server, read off its source: little, and in SGLang's format."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_mixkv

PACKAGE = Path(sglang_mixkv.__file__).parent
FILES = sorted(
    path for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).parts[0] not in ("tools", "__main__.py")
)  # fmt: skip
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}

# Calls that would give the plugin handlers, levels or output of its own.
OWN_OUTPUT = {
    "addHandler", "basicConfig", "captureWarnings", "dictConfig", "fileConfig", "print",
    "setLevel", "setLoggerClass", "StreamHandler", "FileHandler",
}  # fmt: skip


def calls(source: str) -> Iterator[tuple[str, str, ast.Call]]:
    """Each call: the function around it, the name called, the call."""

    def walk(node: ast.AST, around: str) -> Iterator[tuple[str, str, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            name = child.name if isinstance(child, ast.FunctionDef) else around
            if isinstance(child, ast.Call):
                function = child.func
                called = getattr(function, "attr", None) or getattr(function, "id", "")
                yield around, called, child
            yield from walk(child, name)

    yield from walk(ast.parse(source), "")


def logged(source: str) -> Iterator[tuple[str, str]]:
    """(function, level) of each logging call."""
    for around, called, call in calls(source):
        base = getattr(call.func, "value", None)
        if called in LEVELS and isinstance(base, ast.Name) and base.id in ("logger", "logging"):
            yield around, called


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_handlers_levels_or_output_of_its_own(path: Path) -> None:
    source = path.read_text()
    assert {called for _, called, _ in calls(source)} & OWN_OUTPUT == set()
    loggers = [ast.unparse(call) for _, called, call in calls(source) if called == "getLogger"]
    # below `sglang`: some launchers (Dynamo) give that logger handlers, and the root none
    assert loggers in ([], ["logging.getLogger(f'sglang.{__name__}')"])


def test_one_line_at_info_and_that_is_the_banner() -> None:
    """Below WARNING there is the banner, when a manager is made; the rest is DEBUG."""
    found = {(path.name, *line) for path in FILES for line in logged(path.read_text())}
    found = {line for line in found if line[-1] in ("info", "log")}
    assert found == {("manager.py", "__init__", "log")}


def test_a_line_a_request_would_be_found() -> None:
    source = "def send(self):\n    logger.info('sent %s', self.room)\n    print(1)"
    assert list(logged(source)) == [("send", "info")]
    assert "print" in {called for _, called, _ in calls(source)} & OWN_OUTPUT
