"""What another SGLang changed of what the plugin depends on: ``doctor --against``.

A function of SGLang's that is relied on is compared by its source, with what the transfer backends'
classes define in its place; a module whose rules are restated as a whole. The sources are read, and
nothing is imported; the other side is the installed SGLang.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sglang_mixkv.engine.behaviour import BEHAVIOURS
from sglang_mixkv.engine.releases import modules
from sglang_mixkv.engine.seams import RESTATED, SEAMS
from sglang_mixkv.refusals import BACKENDS
from sglang_mixkv.tools.doctor_checks import Finding
from sglang_mixkv.tools.sources import Body, Tree, body, installed, overrides, tree

FUNCTIONS, MODULES = DIFFS = ("functions", "modules")
"""What `whole` prints."""

TABLES = {
    "changed seams": {seam.path: seam.why for seam in SEAMS},
    "changed behaviours": {one.function: one.sentence for one in BEHAVIOURS},
}
"""Section of the report -> function -> why it is relied on."""


class Change(NamedTuple):
    """A source in two releases. An empty side: it is not there."""

    names: tuple[str, str]
    before: list[str]
    after: list[str]

    def diff(self) -> Iterator[str]:
        for line in difflib.unified_diff(self.before, self.after, *self.names):
            yield line if line.endswith("\n") else f"{line}\n"


def _value(before: object, after: object, changes: list[Change]) -> str:
    """Lines added and removed in all, where both sides have it."""
    if not before:
        return "new"
    if not after:
        return "gone"
    lines = [line for change in changes for line in list(change.diff())[2:]]
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return f"+{added} -{removed}"


def _bodies(side: Tree, path: str) -> dict[str, Body]:
    """The source of a function, and of the backends' methods in its place by theirs."""
    own = body(side, path)
    found = {path: own} if own else {}
    for backend in BACKENDS:
        for other in overrides(side, path, f"sglang.srt.disaggregation.{backend}.conn"):
            found[other.place] = other
    return found


def _of_function(old: Tree, new: Tree, path: str) -> list[Change]:
    """What changed in a function; one that has moved as it was did not."""
    before, after = _bodies(old, path), _bodies(new, path)
    changes = []
    for key in dict.fromkeys((*before, *after)):
        one, other = (side.get(key, Body(key, [])) for side in (before, after))
        if one.lines != other.lines:
            names = (f"{old.version}/{one.place}", f"{new.version}/{other.place}")
            changes.append(Change(names, one.lines, other.lines))
    return changes


def _of_module(old: Tree, new: Tree, module: str) -> list[Change]:
    before, after = old.lines(module) or [], new.lines(module) or []
    names = (f"{old.version}/{module}", f"{new.version}/{module}")
    return [Change(names, before, after)] if before != after else []


def findings(folder: str) -> Iterator[Finding]:
    """What changed: information, since most changes do not matter."""
    old, new = installed(), tree(Path(folder))
    if old is None:
        yield Finding("changes", "compared", "no: no SGLang is installed here")
        return
    yield Finding("changes", "compared", f"{old.version} -> {new.version}")
    for section, table in TABLES.items():
        yield from _of_table(section, table, old, new)
    found = {module: _of_module(old, new, module) for module in RESTATED}
    yield Finding("changed modules", "in all", f"{_share(found)} whose rules are restated")
    for module, changes in found.items():
        if changes:
            value = _value(old.lines(module), new.lines(module), changes)
            yield Finding("changed modules", module, value)


def _of_table(section: str, table: dict[str, str], old: Tree, new: Tree) -> Iterator[Finding]:
    found = {path: _of_function(old, new, path) for path in table}
    yield Finding(section, "in all", _share(found))
    for path, why in table.items():
        before, after = _bodies(old, path), _bodies(new, path)
        if found[path]:
            yield Finding(section, path, f"{_value(before, after, found[path])}: {why}")
        elif not after:
            yield Finding(section, path, f"not found in either: {why}")


def _share(found: dict[str, list[Change]]) -> str:
    return f"{sum(map(bool, found.values()))} of {len(found)}"


def whole(folder: str, what: str = FUNCTIONS) -> str:
    """The unified diff of the functions, or of their whole modules and RESTATED; empty without an
    installed SGLang."""
    old, new = installed(), tree(Path(folder))
    if old is None:
        return ""
    if what == MODULES:
        changes = [change for module in modules() for change in _of_module(old, new, module)]
    else:
        paths = dict.fromkeys(path for table in TABLES.values() for path in table)
        changes = [change for path in paths for change in _of_function(old, new, path)]
    return "".join(line for change in changes for line in change.diff())
