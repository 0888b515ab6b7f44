"""What another SGLang changed in the files that the plugin depends on: ``doctor --against``.

The files are read, and none is imported; the other side is the installed SGLang.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from sglang_mixkv.engine.releases import modules
from sglang_mixkv.tools.doctor_checks import Finding

SECTION = "files"


@dataclass(frozen=True)
class Tree:
    """An SGLang: the folder that holds its package, and its version."""

    folder: Path
    version: str

    def lines(self, module: str) -> list[str] | None:
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


@dataclass(frozen=True)
class Change:
    """What became of one module."""

    module: str
    before: list[str] | None
    after: list[str] | None

    def unified(self, old: str, new: str) -> list[str]:
        """A unified diff; a module that is missing has no lines."""
        names = (f"{old}/{self.module}", f"{new}/{self.module}")
        return list(difflib.unified_diff(self.before or [], self.after or [], *names))

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            return "new" if self.after is not None else "gone"
        body = self.unified("", "")[2:]
        added, removed = (sum(line.startswith(sign) for line in body) for sign in "+-")
        return f"+{added} -{removed}"


def changes(old: Tree, new: Tree) -> Iterator[Change]:
    """The modules that differ."""
    for module in modules():
        change = Change(module, old.lines(module), new.lines(module))
        if change.before != change.after:
            yield change


def findings(folder: str) -> Iterator[Finding]:
    """Lines added and removed, by module: information, since most changes do not matter."""
    old, new = installed(), tree(Path(folder))
    if old is None:
        yield Finding(SECTION, "compared", "no: no SGLang is installed here")
        return
    yield Finding(SECTION, "compared", f"{old.version} -> {new.version}")
    for change in changes(old, new):
        yield Finding(SECTION, change.module, str(change))


def whole(folder: str) -> str:
    """The unified diff of all that differ; empty without an installed SGLang."""
    old, new = installed(), tree(Path(folder))
    if old is None:
        return ""
    found = (change.unified(old.version, new.version) for change in changes(old, new))
    return "".join(line if line.endswith("\n") else f"{line}\n" for part in found for line in part)
