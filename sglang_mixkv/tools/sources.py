"""Functions in the source of an SGLang, found by ast: nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import NamedTuple

Lines = list[str] | None
Name = tuple[str, str]
"""A module, and a name at its top level."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Tree(NamedTuple):
    """An SGLang: the folder that holds its package, and its version."""

    folder: Path
    version: str

    def lines(self, module: str) -> Lines:
        """A module's lines, None without such a module."""
        file = self._file(module)
        return None if file is None else file.read_text(errors="replace").splitlines(keepends=True)

    def _file(self, module: str) -> Path | None:
        place = self.folder.joinpath(*module.split("."))
        files = (place.with_suffix(".py"), place / "__init__.py")
        return next((file for file in files if file.is_file()), None)

    def package(self, module: str) -> str:
        """The package that a module's relative imports start from."""
        file = self._file(module)
        is_package = file is not None and file.name == "__init__.py"
        return module if is_package else module.rpartition(".")[0]


class Body(NamedTuple):
    """A function's source, decorators included. `place`: module:name where it is defined."""

    place: str
    lines: list[str]


def tree(folder: Path) -> Tree:
    """The SGLang in this folder, as pip unpacks it."""
    found = metadata.distributions(name="sglang", path=[str(folder)])
    return Tree(folder, next((each.version for each in found), "unknown"))


def installed() -> Tree | None:
    """The SGLang of this environment, None without."""
    found = find_spec("sglang")
    if found is None or found.origin is None:
        return None
    return tree(Path(found.origin).parents[1])


def body(tree: Tree, path: str) -> Body | None:
    """The function at `module:name` or `module:Class.name`. One that is inherited, or imported by
    name, is found where it is defined. None where that does not find it."""
    module, _, name = path.partition(":")
    first, _, method = name.partition(".")
    home = _home(tree, module, first)
    if home is None:
        return None
    if not method:
        return _body(tree, *home, _defined(tree, *home))
    for owner in _classes(tree, *home):
        if own := [node for node in _statements(owner.body) if _defines(node, method)]:
            return _body(tree, home[0], f"{home[1]}.{method}", own)
    inherited = (body(tree, f"{at}:{base}.{method}") for at, base in _bases(tree, *home))
    return next(filter(None, inherited), None)


def overrides(tree: Tree, path: str, module: str) -> Iterator[Body]:
    """What classes of this module, derived from the path's class, define in place of its method."""
    origin, _, name = path.partition(":")
    owner, _, method = name.partition(".")
    home = _home(tree, origin, owner)
    if home is None or not method:
        return
    classes = [node for node in _parsed(tree, module) if isinstance(node, ast.ClassDef)]
    for node in classes:
        own = [each for each in _statements(node.body) if _defines(each, method)]
        if own and _derives(tree, (module, node.name), home):
            yield _body(tree, module, f"{node.name}.{method}", own)


@cache
def _parsed(tree: Tree, module: str) -> list[ast.stmt]:
    """A module's statements, those under `if` and `try` too; none where it cannot be parsed."""
    try:
        return list(_statements([ast.parse("".join(tree.lines(module) or []))]))
    except SyntaxError:  # a newer Python's
        return []


def _statements(nodes: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """Statements and those inside them, but for what functions and classes have inside."""
    for node in nodes:
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.expr)):
            yield from _statements(ast.iter_child_nodes(node))


def _defines(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.Assign):
        return any(isinstance(each, ast.Name) and each.id == name for each in node.targets)
    return isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and node.name == name


def _defined(tree: Tree, module: str, name: str) -> list[ast.stmt]:
    """All statements of a module that define this name: one each under `if` and `else`."""
    return [node for node in _parsed(tree, module) if _defines(node, name)]


def _classes(tree: Tree, module: str, name: str) -> list[ast.ClassDef]:
    return [node for node in _defined(tree, module, name) if isinstance(node, ast.ClassDef)]


def _home(tree: Tree, module: str, name: str) -> Name | None:
    """Where the function or class of this name in this module, which may import it, is defined."""
    if _defined(tree, module, name):
        return module, name
    for node in _parsed(tree, module):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    source = "." * node.level + (node.module or "")
                    source = resolve_name(source, tree.package(module))
                    itself = (source, alias.name) == (module, name)  # a module of this package
                    return None if itself else _home(tree, source, alias.name)
    return None


def _bases(tree: Tree, module: str, name: str) -> Iterator[Name]:
    """Each base class that is named without a module."""
    for node in _classes(tree, module, name):
        for base in node.bases:
            home = _home(tree, module, ast.unparse(base).partition("[")[0])
            if home and home != (module, name):
                yield home


def _derives(tree: Tree, one: Name, ancestor: Name) -> bool:
    bases = list(_bases(tree, *one))
    return ancestor in bases or any(_derives(tree, base, ancestor) for base in bases)


def _body(tree: Tree, module: str, name: str, nodes: list[ast.stmt]) -> Body:
    lines = tree.lines(module) or []
    found: list[str] = []
    for node in nodes:
        above = [each.lineno for each in getattr(node, "decorator_list", [])]
        found += lines[min([node.lineno, *above]) - 1 : node.end_lineno]
    return Body(f"{module}:{name}", found)
