"""SGLang as a wheel has it: the parameters of its functions and the attributes of its classes, read
from the source. Nothing is installed or imported."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from sglang_mixkv.engine.releases import SUPPORTED_SGLANG, lacking

ASSEMBLED = {"sglang.srt.server_args:ServerArgs": "sglang/srt/arg_groups/fields/"}
"""Classes whose fields are those of all classes in a folder."""


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
        """True if the wheel has a module's name, or an attribute of it; also if that is unknown."""
        module, _, name = path.partition(":")
        head, _, attribute = name.partition(".")
        places = [module.replace(".", "/") + end for end in (".py", "/__init__.py")]
        inside = f"{places[0][:-3]}/{head}"
        if {f"{inside}.py", f"{inside}/__init__.py"} & {*self._zip.namelist()}:
            return not attribute or self.has(f"{module}.{head}:{attribute}")
        bodies = [self.body(file) for file in places if file in self._zip.namelist()]
        names = [*_bound(bodies[0])] if bodies else []
        try:
            return head in names and (not attribute or attribute in self.names(f"{module}:{head}"))
        except LookupError:
            return True

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
            with suppress(LookupError):  # of another package
                yield from self._lineage(*self._find(module, ast.unparse(base)))


def _attributes(owner: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
    for one in owner.body:
        targets = getattr(one, "targets", [getattr(one, "target", one)])
        yield from (getattr(one, "id", getattr(one, "name", "")) for one in targets)


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.alias):
            yield node.asname or node.name
        elif not isinstance(node, ast.Name) or isinstance(node.ctx, ast.Store):
            yield getattr(node, "id", getattr(node, "name", ""))


def taken(source: str) -> Iterator[str]:
    """Yield what a module imports from SGLang, and the attributes that it uses of that."""
    tree, found = ast.parse(source), dict[str, str]()
    for node in (one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)):
        if f"{node.module}.".startswith("sglang."):
            found |= {one.asname or one.name: f"{node.module}:{one.name}" for one in node.names}
    yield from found.values()
    for one in ast.walk(tree):
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name):
            yield from [f"{found[one.value.id]}.{one.attr}"] if one.value.id in found else []


def changes(wheel: Wheel) -> list[str]:
    """List what a wheel lacks of what the plugin and `plan` use of the newest supported SGLang."""

    def find(path: str, due: Iterable[str]) -> list[str]:
        return [name for name in wheel.names(path) if name in due]

    found = lacking(SUPPORTED_SGLANG[-1], find)
    for file in sorted(Path(__file__).parent.glob("plan*.py")):
        names = sorted(set(taken(file.read_text())))
        found += [f"{one}: {file.name} uses it; found none" for one in names if not wheel.has(one)]
    return found
