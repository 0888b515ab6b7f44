"""Names in a wheel of SGLang: the parameters of its functions and the attributes of its classes,
read from the source. Nothing is installed or imported."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from sglang_mixkv.engine.releases import SUPPORTED_SGLANG, lacking

ASSEMBLED = {"sglang.srt.server_args:ServerArgs": "sglang/srt/arg_groups/fields/"}
"""Maps a class to the folder with the classes that declare its fields."""


class Wheel:
    def __init__(self, path: Path) -> None:
        self._zip, self.version = zipfile.ZipFile(path), path.name.split("-")[1]
        self.body = cache(lambda file: ast.parse(self._zip.read(file)).body)

    def names(self, path: str) -> list[str]:
        """Return the parameters of a function in their order, or the attributes that a class or one
        of its bases declares or assigns. Raises LookupError if the wheel has neither."""
        module, node = self._find(*path.split(":"))
        if not isinstance(node, ast.ClassDef):
            return [one.arg for one in ast.iter_child_nodes(node.args) if isinstance(one, ast.arg)]
        owners = [owner for _, owner in self._lineage(module, node)]
        for file in self.files(ASSEMBLED[path]) if path in ASSEMBLED else ():
            owners += [one for one in self.body(file) if isinstance(one, ast.ClassDef)]
        return [name for owner in owners for name in _attributes(owner)]

    def files(self, folder: str) -> list[str]:
        return [file for file in self._zip.namelist() if file.startswith(folder)]

    def has(self, path: str) -> bool:
        """Return whether a module, submodule, class or base has the names in `path`."""
        parent, _, name = path.partition(":")
        first, *more = name.split(".")
        for module, words in ((f"{parent}.{first}", more), (parent, [first, *more])):
            for end in (".py", "/__init__.py"):
                with suppress(KeyError):
                    text = self._zip.read(module.replace(".", "/") + end).decode()
                    found = {*re.findall(r"\w+", text)}
                    with suppress(LookupError):
                        found |= {*self.names(f"{parent}:{first}")}
                    return {*words} <= found
        return False

    def _find(self, module: str, name: str) -> tuple[str, Any]:
        files, (head, _, method) = self._zip.namelist(), name.partition(".")
        places = [f"{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
        for node in (node for file in places if file in files for node in self.body(file)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if head == (alias.asname or alias.name):
                        return self._find(f"{node.module}", alias.name + name[len(head) :])
            elif getattr(node, "name", "") == head:
                for where, owner in self._lineage(module, node) if method else ():
                    for one in owner.body:
                        if getattr(one, "name", "") == method:
                            return where, one
                if not method:
                    return module, node
        raise LookupError(f"{module} has no {name}")

    def _lineage(self, module: str, node: Any) -> Iterator[tuple[str, Any]]:
        yield module, node
        for base in node.bases:
            with suppress(LookupError):  # a base in another package
                yield from self._lineage(*self._find(module, ast.unparse(base)))


def _attributes(owner: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
    for one in owner.body:
        targets = getattr(one, "targets", [getattr(one, "target", one)])
        yield from (getattr(one, "id", getattr(one, "name", "")) for one in targets)


def taken(source: str) -> Iterator[str]:
    """Yield the names that a module imports from SGLang, and the attributes that it uses."""
    nodes, found = [*ast.walk(ast.parse(source))], dict[str, str]()
    for node in (one for one in nodes if isinstance(one, ast.ImportFrom)):
        if f"{node.module}.".startswith("sglang."):
            found |= {one.asname or one.name: f"{node.module}:{one.name}" for one in node.names}
    names = ((ast.unparse(n.value), n.attr) for n in nodes if isinstance(n, ast.Attribute))
    yield from (*found.values(), *(f"{found[of]}.{name}" for of, name in names if of in found))


def changes(wheel: Wheel) -> list[str]:
    """List what the plugin and `plan` use in the newest supported SGLang but this wheel lacks."""
    found = lacking(
        SUPPORTED_SGLANG[-1], lambda path, due: [n for n in wheel.names(path) if n in due]
    )
    for file in sorted(Path(__file__).parent.glob("plan*.py")):
        names = sorted(set(taken(file.read_text())))
        found += [f"{one}: missing, and used in {file.name}" for one in names if not wheel.has(one)]
    return found
