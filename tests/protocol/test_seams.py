"""seams.py lists everything in SGLang that the plugin overrides, calls, hooks or reads.

The tests find these uses in the plugin's source: methods that override SGLang's, calls of SGLang's
methods, calls of functions imported from SGLang, and every attribute whose name a class in the
table has, whatever variable it is read from.
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
# Attribute names that SGLang's classes have but that the plugin uses only on other objects: those
# of Python, the plugin's own, and a model's configuration.
OF_OTHERS = {
    "__class__", "__module__", "add", "close", "current", "get", "name", "run", "set", "value",
    "_connect", "config", "free_slots", "port", "reset", "size", "staging", "store",
    "architectures", "layer_types",
}  # fmt: skip


@cache
def stock_methods() -> set[str]:
    """Return the methods of the base classes that SGLang's backends share."""
    from sglang.srt.disaggregation.common import conn

    kinds = ("Manager", "Sender", "Receiver", "BootstrapServer")
    owners = [owner for kind in kinds for owner in getattr(conn, f"CommonKV{kind}").__mro__]
    return {
        name for owner in owners if owner.__module__.startswith("sglang.")
        for name, value in vars(owner).items() if isinstance(value, FUNCTIONS)
    }  # fmt: skip


def overridden() -> set[str]:
    return {name for ours in OURS for name in vars(ours)} & stock_methods()


def called(source: str) -> Iterator[str]:
    """Yield what this source calls in SGLang: a method's name, or a function's path."""
    tree = ast.parse(source)
    imported = {
        alias.name: f"{node.module}:{alias.name}" for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.")
        for alias in node.names
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in stock_methods():
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
        found |= set(called(path.read_text()))
    return found


def test_every_used_function_of_sglang_is_listed() -> None:
    assert touched() - METHODS - set(SEAMS) - OF_OTHERS == set()
    assert set(HOOKS) <= {path.replace(":", ".") for path in SEAMS}


def test_every_listed_seam_is_used_and_there_are_few() -> None:
    """An unused seam could make the plugin refuse a release of SGLang needlessly, and every seam
    has to be reviewed for each release."""
    assert METHODS - touched() == set()
    assert len(SEAMS) <= 50


@pytest.mark.parametrize("kind", manager.MIXINS)
def test_every_parameter_that_a_mixin_names_is_listed(kind: str) -> None:
    """A mixin's methods name parameters in their signature, or read them with `kwargs.get`."""
    ours, owner = manager.MIXINS[kind], f":CommonKV{kind.title().replace('_', '')}."
    listed = {path.rpartition(".")[2]: names for path, names in SEAMS.items() if owner in path}
    listed.pop("__init__", None)  # its parameters are passed on by place
    methods = {name: method for name, method in vars(ours).items() if name in listed}
    for name, method in methods.items():
        (_, *own) = inspect.signature(method).parameters.values()
        named = {one.name for one in own if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
        assert named <= {*listed[name]}, name
    read = {
        ast.literal_eval(node.args[0])
        for node in ast.walk(ast.parse(Path(inspect.getfile(ours)).read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "kwargs.get"
    }
    assert read <= {name for names in listed.values() for name in names}
    assert bool(read) == (kind in ("sender", "receiver"))


@pytest.mark.parametrize("target", [one for one in HOOKS if not HOOKS[one].startswith("plugin.")])
def test_a_hook_calls_the_function_for_its_method(target: str) -> None:
    """The docstring of a hook's function names all of SGLang's methods that it wraps."""
    module, _, name = HOOKS[target].rpartition(".")
    function = pkgutil.resolve_name(f"sglang_mixkv.{module}:{name}")
    words = set(re.findall(r"\w+", inspect.getdoc(function) or ""))
    assert ("Wrap" in words, target.rpartition(".")[2] in words) == (True, True)


@cache
def rules_ask_for() -> set[str]:
    """Return the argument names that the rules read. A rule treats a missing argument as off, so
    the table must list every argument."""
    asked = Asked()
    for rule in releases.rules():
        with suppress(TypeError):  # a rule compares the text with a number
            rule.applies(asked)
    assert len(asked.names) >= 20
    return asked.names


class Asked:
    """A stand-in for ServerArgs that records the names that are read. All values are truthy, so
    that a rule evaluates all operands of an `and`."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> str:
        self.names.add(name)
        return "nixl" if name.endswith("_backend") else "set"


def test_the_tables_agree_with_the_installed_release(tmp_path: Path) -> None:
    """tests/pure/engine/test_releases.py relies on tables made from each release's source. For the
    installed release, these tables agree with the imported modules."""
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
MODULES = [*SOURCES, PACKAGE / "refusals.py", PACKAGE / "draft" / "window.py"]


def attributes_of(path: Path) -> Iterator[str]:
    """Yield the name of each attribute that a module reads or sets, also by getattr or hasattr."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            yield str(getattr(node.args[1], "value", None))


def test_every_attribute_of_sglang_is_listed() -> None:
    """An attribute name that SGLang's classes have must be in ATTRIBUTES or in OF_OTHERS."""
    used = {name for path in MODULES for name in attributes_of(path)}
    theirs = {n for n in used for owner in OWNERS.values() if releases.has_attribute(owner, n)}
    methods = {path.rpartition(".")[2] for path in SEAMS}
    assert theirs - LISTED - methods - OF_OTHERS == set()
    assert OF_OTHERS - used == set()
    computed = {*SIZES, *SCALES, *rules_ask_for()}
    assert computed - LISTED == {"disaggregation_decode_draft_bootstrap"}, "in no release yet"


def test_every_listed_attribute_is_used() -> None:
    text = "\n".join(path.read_text() for path in MODULES if path.name != "seams.py")
    words = set(re.findall(r"\w+", text)) | rules_ask_for()
    assert LISTED - words == set()
    assert len(LISTED) <= 141


def renamed(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Rename an attribute of SGLang's class, declared or assigned there or in a base class."""
    if isinstance(owner, EnumMeta):  # an enum's members cannot be deleted
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
def test_a_renamed_attribute_stops_the_start(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in LATER.get(releases.sglang_version(), ()):
        pytest.skip("this release does not have the attribute")
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
def test_the_cpu_engines_hook_targets_exist(path: str) -> None:
    pkgutil.resolve_name(path)  # raises if the path does not exist
