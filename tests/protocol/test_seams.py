"""What the plugin overrides or calls inside SGLang is a seam of the release, all of it.

Found on the source: methods of ours that SGLang's classes have too, methods of SGLang's classes
called on `self`, `super()`, `kv_mgr`, `mgr` or `receiver`, and SGLang's functions imported by name.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

import sglang_mixkv
from sglang_mixkv import refusals
from sglang_mixkv.engine import releases
from sglang_mixkv.engine.backends import classes
from sglang_mixkv.tools import doctor_diff

PACKAGE = Path(sglang_mixkv.__file__).parent
BACKENDS = list(releases.here().framings)
# Their modules (nixl.py, nixl_writes.py) cannot be imported with the installed release.
UNSERVED = set(refusals.BACKENDS) - set(BACKENDS)
SOURCES = [
    PACKAGE / "plugin.py",
    PACKAGE / "cpu" / "support.py",
    *(
        path
        for path in sorted((PACKAGE / "engine").glob("*.py"))
        if path.stem.partition("_")[0] not in UNSERVED
    ),
]


def our_classes(module: str = "") -> list[type]:
    """What get_kv_class hands out; with a module, those that are made of its classes."""
    found = [made for backend in BACKENDS for made in classes(backend).values()]
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
    return [classes(b)[carriers[name]] for b in BACKENDS] if name in carriers else []


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


def test_everything_touched_is_listed() -> None:
    missing = sorted(touched() - releases.here().seams.keys())
    lines = [f"{path!r}: {releases._parameters(releases._resolve(path))}," for path in missing]
    assert not lines, "add to the release's seams:\n" + "\n".join(lines)


def test_nothing_is_listed_in_vain() -> None:
    """A method that nobody uses would refuse an SGLang for nothing."""
    seams = releases.here().seams
    listed = {path for path in seams if ".disaggregation." in path and "conn:" in path}
    assert listed - touched() == set()


def test_the_files_to_read_for_another_release_are_there() -> None:
    """doctor --against would call one that is misspelt the same in both."""
    installed = doctor_diff.installed()
    assert installed is not None
    assert [m for m in releases.modules() if not installed.lines(m)] == []


HOOKED = {
    path
    for source in (PACKAGE / "plugin.py", PACKAGE / "cpu" / "support.py")
    for path in re.findall(r'^[A-Z_]+ = "(sglang[.][\w.]+)"$', source.read_text(), re.MULTILINE)
}


assert len(HOOKED) > 12  # of none there would be no test


@pytest.mark.parametrize("path", sorted(HOOKED))
def test_what_is_hooked_is_there(path: str) -> None:
    """By a name in a string, in a serving process and in the CPU engine."""
    pkgutil.resolve_name(path)  # raises where it is not


def test_an_unlisted_use_is_found() -> None:
    source = (
        "from sglang.srt.disaggregation.utils import is_mla_backend\n"
        "def f(self, receiver):\n"
        "    self.kv_mgr.teardown()\n"
        "    receiver.failure_exception()\n"
        "    super().ensure_abort_notified()\n"
        "    is_mla_backend(1)\n"
        "    self.config.clear()\n"
    )
    found = set(called(source, "sglang_mixkv.engine.receiver")) - {None}
    assert {re.split("[.:]", seam)[-1] for seam in found} == {
        "teardown", "failure_exception", "ensure_abort_notified", "is_mla_backend",
    }  # fmt: skip


def test_refused_features_still_have_these_names() -> None:
    """refusals.py reads what is missing as off: a renamed feature would pass unnoticed."""
    from sglang.srt.environ import envs
    from sglang.srt.server_args import ServerArgs

    source = (PACKAGE / "refusals.py").read_text()
    variables = set(re.findall(r"SGLANG_[A-Z_]+", source))
    assert {name for name in variables if not hasattr(envs, name)} == set()
    attributes = set(re.findall(r"(?:\ba|args)\.(\w+)|(?:_get\(|(?:a|args), )\"(\w+)\"", source))
    names = {name for pair in attributes for name in pair if name}
    assert len(names) > 12
    args = ServerArgs(model_path="m")
    assert {name for name in names if not hasattr(args, name)} == set()


def test_plans_flags_are_sglangs() -> None:
    """The plan reads launch lines without SGLang: same spellings, same defaults."""
    from sglang.srt.server_args import ServerArgs

    from sglang_mixkv.tools import plan_flags

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    stock = {option: action for action in parser._actions for option in action.option_strings}
    args = ServerArgs(model_path="m")
    own = {"model_path", "disaggregation_mode", "config"}  # required here; known by the role
    wrong = []
    for action in plan_flags._parser()._actions:
        taken = [stock.get(o) or abbreviated(parser, o) for o in action.option_strings]
        dests = {getattr(theirs, "dest", None) for theirs in taken}
        plugins_own = "mixkv" in action.dest
        same = action.dest in own or plugins_own or getattr(args, action.dest) == action.default
        if dests != {action.dest} or not same:
            wrong.append((action.option_strings, dests, action.default))
    assert not wrong, wrong


@pytest.mark.parametrize("size", [None, 1, 16, 32, 64, 128])
@pytest.mark.parametrize(
    "backend", ["fa3", "flashmla", "trtllm_mla", "cutedsl_mla", "trtllm_mha", "hpc_ops"]
)
def test_plans_page_sizes_are_sglangs(backend: str, size: int | None) -> None:
    from sglang.srt.arg_groups.overrides import _mla_backend_page_constraints

    from sglang_mixkv.tools.plan_flags import BACKEND_FLAGS, from_line

    for flag in BACKEND_FLAGS:
        server = from_line("decode", "").with_args(page_size=size, **{flag: backend})
        theirs = _mla_backend_page_constraints(server.args).get("page_size", size)
        assert server.page_size == theirs, flag


def abbreviated(parser: argparse.ArgumentParser, option: str) -> argparse.Action | None:
    """The only action of which this is an abbreviation, None without."""
    found = {id(match[0]): match[0] for match in parser._get_option_tuples(option)}
    return next(iter(found.values())) if len(found) == 1 else None
