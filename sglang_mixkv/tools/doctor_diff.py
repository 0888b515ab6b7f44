"""What another SGLang changed in the files that the plugin depends on: ``doctor --against``.

The files are read, and none is imported; the other side is the installed SGLang.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from sglang_mixkv.engine.releases import modules
from sglang_mixkv.tools.doctor_checks import Finding

Lines = list[str] | None


class Tree(NamedTuple):
    """An SGLang: the folder that holds its package, and its version."""

    folder: Path
    version: str

    def lines(self, module: str) -> Lines:
        """A module's lines, None without such a module."""
        place = self.folder.joinpath(*module.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file.read_text(errors="replace").splitlines(keepends=True)
        return None


def tree(folder: Path) -> Tree:
    """The SGLang in this folder, as pip unpacks it."""
    found = metadata.distributions(name="sglang", path=[str(folder)])
    return Tree(folder, next((each.version for each in found), "unknown"))


def installed() -> Tree | None:
    """The SGLang of this environment, None without."""
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        return None
    return tree(Path(found.origin).parents[1])


def _changes(old: Tree, new: Tree) -> Iterator[tuple[str, Lines, Lines]]:
    """The modules that differ, before and after."""
    for module in modules():
        before, after = old.lines(module), new.lines(module)
        if before != after:
            yield module, before, after


def findings(folder: str) -> Iterator[Finding]:
    """Lines added and removed, by module: information, since most changes do not matter."""
    old, new = installed(), tree(Path(folder))
    if old is None:
        yield Finding("files", "compared", "no: no SGLang is installed here")
        return
    yield Finding("files", "compared", f"{old.version} -> {new.version}")
    for module, before, after in _changes(old, new):
        body = list(difflib.unified_diff(before or [], after or []))[2:]
        added, removed = (sum(line.startswith(sign) for line in body) for sign in "+-")
        value = "new" if before is None else "gone" if after is None else f"+{added} -{removed}"
        yield Finding("files", module, value)


def whole(folder: str) -> str:
    """The unified diff of all that differ; empty without an installed SGLang."""
    old, new = installed(), tree(Path(folder))
    if old is None:
        return ""
    lines: list[str] = []
    for module, before, after in _changes(old, new):
        names = (f"{old.version}/{module}", f"{new.version}/{module}")
        lines += difflib.unified_diff(before or [], after or [], *names)
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
