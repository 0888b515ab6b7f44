"""What the plugin overrides, calls or hooks inside SGLang is listed in seams.py, all of it.

Found on the source: methods of ours that SGLang's classes have too, methods of SGLang's classes
called on `self`, `super()`, `kv_mgr`, `mgr`, `manager` or `receiver`, and SGLang's functions
imported by name; attributes of the classes in the table, on what has one of CARRIERS' names.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
import runpy
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum, EnumMeta
from functools import cache
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import sglang

import sglang_mixkv
from sglang_mixkv.engine import manager, releases
from sglang_mixkv.engine.bootstrap import SIZES
from sglang_mixkv.engine.draft_pool import SCALES
from sglang_mixkv.engine.seams import ATTRIBUTES, HOOKS, LATER, SEAMS
from sglang_mixkv.guards.early_sends import EarlySends
from sglang_mixkv.guards.room_reuse import RoomUse
from sglang_mixkv.tools.against import Wheel

PACKAGE = Path(sglang_mixkv.__file__).parent
ROOT = PACKAGE.parent
seams = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "seams.py")))
SOURCES = [PACKAGE / "plugin.py", *sorted(PACKAGE.glob("engine/*.py"))]
SOURCES += sorted(PACKAGE.glob("guards/*.py"))
OURS = (*manager.MIXINS.values(), EarlySends, RoomUse)
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
    assert set(HOOKS) <= {path.replace(":", ".") for path in SEAMS}


def test_nothing_is_listed_in_vain_and_there_are_few() -> None:
    """Each is work with each release of SGLang, and one that nobody uses would refuse an SGLang for
    nothing."""
    assert METHODS - touched() == set()
    assert len(SEAMS) <= 50


@cache
def rules_ask_for() -> set[str]:
    """Rules read what is missing as off: the table has it."""
    asked = Asked()
    for rule in releases.rules():
        with suppress(TypeError):  # of a comparison with a number
            rule.applies(asked)
    assert len(asked.names) >= 20
    return asked.names


class Asked:
    """Arguments whose names are noted as rules read them. What they answer opens each `and`."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> str:
        self.names.add(name)
        return "nixl" if name.endswith("_backend") else "set"


def test_the_installed_release_is_as_its_source_says(tmp_path: Path) -> None:
    """tests/pure/engine/test_releases.py knows each release from its source alone; compare it with
    the release that runs."""
    root = Path(next(iter(sglang.__path__))).parent
    path = tmp_path / f"sglang-{releases.sglang_version()}-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in root.glob("sglang/srt/**/*.py"):
            archive.write(file, file.relative_to(root))
    wheel, written = Wheel(path), json.loads((ROOT / "tests/pure/engine/seams.json").read_text())
    for function in SEAMS:
        named = inspect.signature(pkgutil.resolve_name(function)).parameters
        assert [n for n in wheel.names(function) if n != "cls"] == [*named], function
    for name, found in seams.table([path]).items():
        of_all = written.get(name)
        if isinstance(of_all, dict):
            (of_all,) = [one for key, one in of_all.items() if wheel.version in key.split()]
        assert found == (wheel.version if name == "releases" else of_all), name


# ---------------------------------------------------------------- attributes

OWNERS = {path: pkgutil.resolve_name(path) for path in ATTRIBUTES}
LISTED = {name for names in ATTRIBUTES.values() for name in names}
HOLDERS = CARRIERS | {
    "a", "args", "asking", "flags", "found", "info", "kv", "kv_args", "obj", "one", "pool", "queue",
    "req", "request", "scheduler", "sender", "spec", "table", "tables", "whole", "_class", "first",
    "parallel", "envs", "chunk", "KVPoll", "DisaggregationMode", "HookRegistry", "config", "tier",
    "storage_config",
}  # fmt: skip
"""Names of what may be SGLang's, here."""
MODULES = [*SOURCES, PACKAGE / "refusals.py", PACKAGE / "draft" / "window.py"]


def attributes_of(path: Path) -> Iterator[str]:
    """What a module reads or sets of something that may be SGLang's, by its name or by text."""
    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    is_mixin = module in {ours.__module__ for ours in OURS}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            whose, name = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            whose, name = node.args[0], getattr(node.args[1], "value", None)
        else:
            continue
        holder = re.sub(r"\(.*\)$", "", ast.unparse(whose)).rpartition(".")[2]
        if (
            holder in HOLDERS
            or re.match("get_|resolved_view", holder)
            or (is_mixin and holder == "self" and name not in OWN_OF_MIXINS)
        ):
            yield str(name)


OWN_OF_MIXINS = {
    "aborted", "backend", "decode_channel", "handle", "local", "mixkv_rows", "plan",
    "prefill_channel", "servers", "_first", "_pages", "_sent",
}  # fmt: skip


def test_every_attribute_of_sglang_is_listed() -> None:
    """In each release that is served: one that is gone is no use of another class either."""
    used = {name for path in MODULES for name in attributes_of(path)}
    theirs = {n for n in used for owner in OWNERS.values() if releases.has_attribute(owner, n)}
    methods = {path.rpartition(".")[2] for path in SEAMS}
    assert (
        theirs - LISTED - methods - {"__class__", "name", "port", "architectures", "set"} == set()
    )
    asked = {*SIZES, *SCALES, *rules_ask_for()}  # by names that are computed
    assert asked - LISTED == set()


def test_no_attribute_is_listed_in_vain() -> None:
    text = "\n".join(path.read_text() for path in MODULES if path.name != "seams.py")
    words = set(re.findall(r"\w+", text)) | rules_ask_for()
    assert LISTED - words == set()
    assert len(LISTED) <= 137


def renamed(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """As in an SGLang that calls it otherwise: declared or assigned, in the class or a base."""
    if isinstance(owner, EnumMeta):  # whose members cannot be deleted
        members = {one.name.replace(name, f"{name}_"): one.value for one in owner}
        monkeypatch.setattr(f"{owner.__module__}.{owner.__name__}", Enum(owner.__name__, members))
        return
    for one in owner.__mro__:
        if name in vars(one):
            monkeypatch.setattr(one, f"{name}_", vars(one)[name], raising=False)
            monkeypatch.delattr(one, name)
        monkeypatch.delitem(vars(one).get("__annotations__", {}), name, raising=False)
        for value in vars(one).values():
            if name in (code := getattr(value, "__code__", SimpleNamespace(co_names=()))).co_names:
                names = tuple(f"{n}_" if n == name else n for n in code.co_names)
                monkeypatch.setattr(value, "__code__", code.replace(co_names=names))


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, names in ATTRIBUTES.items() for name in names]
)
def test_one_that_was_renamed_ends_the_start(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in LATER.get(releases.sglang_version(), ()):
        pytest.skip("this release does not have it")
    before = releases.problems()
    assert before == []
    renamed(monkeypatch, OWNERS[path], name)
    assert any(path in line and repr(name) in line for line in releases.problems())
    with pytest.raises(SystemExit, match="MIXKV-START-01"):
        releases.check(SimpleNamespace())


ENGINE = importlib.import_module("mixkv_cpu.support")


@pytest.mark.parametrize(
    "path", sorted(v for v in vars(ENGINE).values() if str(v).startswith("sglang.srt."))
)
def test_what_the_cpu_engine_hooks_is_there(path: str) -> None:
    pkgutil.resolve_name(path)  # raises where it is not
