"""What the plugin overrides or calls inside SGLang is a seam of the release, all of it.

Found on the source: methods of ours that SGLang's classes have too, methods of SGLang's classes
called on `self`, `super()`, `kv_mgr`, `mgr` or `receiver`, and SGLang's functions imported by name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType

import pytest

import sglang_mixkv
from sglang_mixkv.engine import releases
from sglang_mixkv.engine.classes import mixed
from sglang_mixkv.engine.seams import HOOKS, SEAMS

PACKAGE = Path(sglang_mixkv.__file__).parent
SOURCES = [PACKAGE / "plugin.py", *sorted((PACKAGE / "engine").glob("*.py"))]
KINDS = ("manager", "sender", "receiver", "bootstrap_server")
LISTED = set(SEAMS)


@cache
def made(kind: str) -> type:
    """The mixin over the class that SGLang's backends have in common."""
    from sglang.srt.disaggregation.common import conn
    from sglang.srt.disaggregation.utils import KVClassType

    names = dict(zip(KINDS, ("Manager", "Sender", "Receiver", "BootstrapServer"), strict=True))
    stock = getattr(conn, f"CommonKV{names[kind]}")
    return mixed(stock, "any", KVClassType(kind).value)


def our_classes(module: str = "") -> list[type]:
    """What get_kv_class hands out; with a module, those that are made of its classes."""
    found = list(map(made, KINDS))
    return [c for c in found if not module or module in {owner.__module__ for owner in c.__mro__}]


def is_ours(owner: type) -> bool:
    return owner.__module__.startswith("sglang_mixkv")


def stock_seam(made: type, name: str) -> str | None:
    """The method of this name that one of our classes inherits from SGLang, None without."""
    for owner in made.__mro__:
        if not is_ours(owner) and owner.__module__.startswith("sglang."):
            found = vars(owner).get(name)
            if isinstance(found, (FunctionType, staticmethod, classmethod)):
                return f"{owner.__module__}:{owner.__qualname__}.{name}"
    return None


def overridden() -> Iterator[str | None]:
    """Methods that one of our classes and one of SGLang's below it define."""
    for made in our_classes():
        for owner in filter(is_ours, made.__mro__):
            for name, value in vars(owner).items():
                if isinstance(value, FunctionType):
                    yield stock_seam(made, name)


def carried(node: ast.expr, module: str) -> list[type]:
    """Our classes that an expression can be an instance of."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
        return our_classes(module)
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    if name == "self":
        return our_classes(module)
    carriers = {"mgr": "manager", "kv_mgr": "manager", "manager": "manager", "receiver": "receiver"}
    name = name.removeprefix("_")
    return [made(carriers[name])] if name in carriers else []


def called(source: str, module: str) -> Iterator[str | None]:
    """What a module of ours takes of SGLang by name."""
    tree = ast.parse(source)
    imported = {
        alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("sglang.") for alias in node.names
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from (stock_seam(made, node.attr) for made in carried(node.value, module))
        if isinstance(node, ast.Call):
            yield imported_seam(node.func, imported)


def imported_seam(function: ast.expr, imported: dict[str, str]) -> str | None:
    """A called function of SGLang, or method of a class of SGLang, that was imported by name."""
    if isinstance(function, ast.Name) and function.id in imported:
        home = imported[function.id]
        found = getattr(importlib.import_module(home), function.id)
        return f"{home}:{function.id}" if isinstance(found, FunctionType) else None
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        home = imported.get(function.value.id, "")
        owner = getattr(importlib.import_module(home), function.value.id) if home else None
        if inspect.isclass(owner) and hasattr(owner, function.attr):
            return f"{home}:{function.value.id}.{function.attr}"
    return None


def touched() -> set[str]:
    found = set(overridden())
    for path in SOURCES:
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found |= set(called(path.read_text(), module))
    return {seam for seam in found if seam}


def methods(paths: Iterable[str]) -> set[str]:
    """Without the class of SGLang's that has them: releases differ in whether the common one does,
    or the abstract one below it."""
    return {re.sub(r"disaggregation\.(base|common)\.conn:(Base|Common)", "", p) for p in paths}


def test_everything_touched_is_listed() -> None:
    assert sorted(methods(touched()) - methods(LISTED)) == []


def test_nothing_is_listed_in_vain() -> None:
    """A method that nobody uses would refuse an SGLang for nothing."""
    listed = {path for path in LISTED if ".disaggregation." in path and "conn:" in path}
    assert methods(listed) - methods(touched()) == set()


def test_there_are_few_seams() -> None:
    """Each is work with each release of SGLang. What is hooked is one."""
    assert len(SEAMS) <= 40
    assert set(HOOKS) <= LISTED


ENGINE = (PACKAGE.parent / "mixkv_cpu" / "support.py").read_text()


@pytest.mark.parametrize(
    "path", re.findall(r'^[A-Z_]+ = "(sglang[.][\w.]+)"$', ENGINE, re.MULTILINE)
)
def test_what_the_cpu_engine_hooks_is_there(path: str) -> None:
    pkgutil.resolve_name(path)  # raises where it is not


def test_an_unlisted_use_is_found() -> None:
    source = (
        "from sglang.srt.disaggregation.utils import is_mla_backend\n"
        "def f(self, receiver):\n"
        "    self.kv_mgr.update_status()\n"
        "    receiver.failure_exception()\n"
        "    super().ensure_abort_notified()\n"
        "    is_mla_backend(1)\n"
        "    self.config.clear()\n"
    )
    found = set(called(source, "sglang_mixkv.engine.receiver")) - {None}
    assert {re.split("[.:]", seam)[-1] for seam in found} == {
        "update_status", "failure_exception", "ensure_abort_notified", "is_mla_backend",
    }  # fmt: skip


class Asked:
    """Arguments whose names are noted as rules read them. What they answer opens each `and`."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> str:
        self.names.add(name)
        return "nixl" if name.endswith("_backend") else "set"


def test_refused_features_still_have_these_names() -> None:
    """Rules read what is missing as off: a renamed feature would pass unnoticed."""
    from sglang.srt.environ import envs
    from sglang.srt.server_args import ServerArgs

    asked = Asked()
    for rule in releases.rules():
        with suppress(TypeError):  # of a comparison with a number
            rule.applies(asked)
    assert len(asked.names) > 20
    args = ServerArgs(model_path="m")
    gone = {name for name in asked.names if not hasattr(args, name)}
    assert gone == set() or releases.sglang_version() != releases.SUPPORTED_SGLANG[-1]
    assert hasattr(envs, "SGLANG_RUST_SERVER")
