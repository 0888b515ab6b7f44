"""What the plugin overrides, calls or hooks inside SGLang is listed in seams.py, all of it.

Found on the source: methods of ours that SGLang's classes have too, methods of SGLang's classes
called on `self`, `super()`, `kv_mgr`, `mgr`, `manager` or `receiver`, and SGLang's functions
imported by name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType

import pytest

import sglang_mixkv
from sglang_mixkv.engine import classes, releases
from sglang_mixkv.engine.rooms import RoomUse
from sglang_mixkv.engine.seams import HOOKS, SEAMS

PACKAGE = Path(sglang_mixkv.__file__).parent
SOURCES = [PACKAGE / "plugin.py", *sorted((PACKAGE / "engine").glob("*.py"))]
OURS = (*classes._MIXINS.values(), RoomUse)
METHODS = {path.rpartition(".")[2] for path in SEAMS if ".conn:" in path}
FUNCTIONS = (FunctionType, staticmethod, classmethod)
CARRIERS = {"kv_mgr", "mgr", "manager", "receiver"}


@cache
def stock_methods() -> set[str]:
    """Of the classes that SGLang's backends have in common."""
    from sglang.srt.disaggregation.common import conn

    kinds = ("Manager", "Sender", "Receiver", "BootstrapServer")
    owners = [owner for kind in kinds for owner in getattr(conn, f"CommonKV{kind}").__mro__]
    return {
        name for owner in owners if owner.__module__.startswith("sglang.")
        for name, value in vars(owner).items() if isinstance(value, FUNCTIONS)
    }  # fmt: skip


def overridden() -> set[str]:
    return {name for ours in OURS for name in vars(ours)} & stock_methods()


def called(source: str, *, is_mixin: bool) -> Iterator[str]:
    """What a module of ours takes of SGLang: a method by its name, a function by its path."""
    tree = ast.parse(source)
    imported = {
        alias.name: f"{node.module}:{alias.name}" for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.")
        for alias in node.names
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in stock_methods():
            whose = ast.unparse(node.value).rpartition(".")[2].lstrip("_")
            if whose in CARRIERS or (is_mixin and re.match(r"self$|super\(", whose)):
                yield node.attr
        if isinstance(node, ast.Call):
            name, _, method = ast.unparse(node.func).partition(".")
            home = pkgutil.resolve_name(imported[name]) if name in imported else None
            if not method and isinstance(home, FUNCTIONS):
                yield imported[name]
            elif inspect.isclass(home) and hasattr(home, method):
                yield f"{imported[name]}.{method}"


def touched() -> set[str]:
    found = overridden()
    for path in SOURCES:
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        is_mixin = module in {ours.__module__ for ours in OURS}
        found |= set(called(path.read_text(), is_mixin=is_mixin))
    return found


def test_everything_touched_is_listed() -> None:
    assert touched() - METHODS - set(SEAMS) == set()
    assert set(HOOKS) <= set(SEAMS)


def test_nothing_is_listed_in_vain_and_there_are_few() -> None:
    """Each is work with each release of SGLang, and one that nobody uses would refuse an SGLang for
    nothing."""
    assert METHODS - touched() == set()
    assert len(SEAMS) <= 40


ENGINE = importlib.import_module("mixkv_cpu.support")


@pytest.mark.parametrize(
    "path", sorted(v for v in vars(ENGINE).values() if str(v).startswith("sglang.srt."))
)
def test_what_the_cpu_engine_hooks_is_there(path: str) -> None:
    pkgutil.resolve_name(path)  # raises where it is not


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
