"""Generate a file's mutants, by Cosmic Ray's operators and four more, and run tests on them."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import runpy
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cosmic_ray.operators.provider as core
import hypothesis
import parso
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator

OUTPUT = "output.txt"  # of the last tests, in their copy of the checkout
KILLED_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


class Own(Operator):
    """Base class of operators that replace a node's children."""

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        for child, _ in self.changes(node):
            yield child.start_pos, child.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        child, code = next(itertools.islice(self.changes(node), index, None))
        before = child.get_first_leaf().prefix  # a statement's prefix has its indentation
        node.children[node.children.index(child)] = parso.parse(before + code)
        return node


class Delete(Own):
    """Replaces calls, del, raise, bare return, and assignments that outlive the function with
    `pass`."""

    def changes(self, node: Any) -> Iterator[tuple[Any, str]]:
        for one in node.children if node.type == "simple_stmt" else ():
            called = one.type in ("atom_expr", "power") and one.children[-1].type == "trailer"
            if called or one.type in ("del_stmt", "raise_stmt") or one == "return" or kept(one):
                yield one, "pass"


class Negate(Own):
    """Negates conditions that no other operator negates, and membership tests."""

    def changes(self, node: Any) -> Iterator[tuple[Any, str]]:
        children = getattr(node, "children", ())
        for word, test in itertools.pairwise(children):
            asked = word in ("if", "elif", "while") and node.type != "argument"
            if asked and test.type not in ("comparison", "not_test"):
                yield test, f"not ({code_of(test)})"
            if node.type == "comparison" and code_of(word) in ("in", "not in"):
                yield word, "in" if word.type == "comp_op" else "not in"


class Nothing(Own):
    """Makes a function return None."""

    def changes(self, node: Any) -> Iterator[tuple[Any, str]]:
        if node.type == "return_stmt" and code_of(node.children[1]) not in FALSE:
            yield node.children[1], "None"


class Arguments(Own):
    """Drops a keyword argument of a call, or swaps two adjacent arguments."""

    def changes(self, node: Any) -> Iterator[tuple[Any, str]]:
        if node.type != "trailer" or node.children[0] != "(" or node.children[1] == ")":
            return
        inner = node.children[1]
        given = inner.children[::2] if inner.type == "arglist" else [inner]
        for at, one in enumerate(given):
            if is_keyword(one) and one.children[0].value not in SILENT:
                yield inner, ", ".join(code_of(g) for g in given[:at] + given[at + 1 :])
        if node.get_previous_leaf().value in ORDERLESS:
            return
        for at, (one, other) in enumerate(itertools.pairwise(given)):
            if not (is_keyword(one) or is_keyword(other)) and code_of(one) != code_of(other):
                swapped = [*given[:at], other, one, *given[at + 2 :]]
                yield inner, ", ".join(map(code_of, swapped))


ORDERLESS = ("max", "min", "gcd")
SILENT = ("strict", "daemon", "name", "exc_info", "frozen", "slots", "gc")
FALSE = ("None", "False", "0", "()", "[]", "{}", '""')
OWN = {one.__name__: one for one in (Delete, Negate, Nothing, Arguments)}


def code_of(node: Any) -> str:
    return node.get_code(include_prefix=False)


def is_keyword(node: Any) -> bool:
    return node.type == "argument" and (node.children[1] == "=" or node.children[0] == "**")


def kept(node: Any) -> bool:
    """Return True if the statement assigns to an attribute or an element, or adds to a name."""
    if node.type != "expr_stmt" or node.children[1].type == "annassign":
        return False
    return node.children[0].type != "name" or node.children[1] != "="


class Mutant(NamedTuple):
    file: str
    line: int
    function: str
    operator: str
    occurrence: int

    def code(self, root: Path) -> str:
        source = (root / self.file).read_text()
        return mutate_code(source, operator(self.operator), self.occurrence)

    def change(self, root: Path) -> tuple[str, str]:
        """Return the lines that differ, before and after."""
        old, new = (root / self.file).read_text().splitlines(), self.code(root).splitlines()
        while old and new and old[0] == new[0]:
            del old[0], new[0]
        while old and new and old[-1] == new[-1]:
            del old[-1], new[-1]
        return " ".join(" ".join(old).split()), " ".join(" ".join(new).split())


def operator(name: str) -> Operator:
    return OWN[name]() if name in OWN else core.OperatorProvider()[name]()


def mutants(root: Path, file: str, config: dict[str, Any]) -> list[Mutant]:
    found: list[Mutant] = []
    operators = {name: operator(name) for name in config["operators"]}
    counts = dict.fromkeys(operators, 0)
    skipped: set[int] = set()
    for node in ast_nodes(get_ast((root / file).read_text())):
        if id(node.parent) in skipped or says_nothing(node, config["skip"]):
            skipped.add(id(node))
        for name, one in operators.items():
            for start, _ in one.mutation_positions(node):
                if id(node) not in skipped:
                    found.append(Mutant(file, start[0], function_of(node), name, counts[name]))
                counts[name] += 1
    return found


def says_nothing(node: Any, skip: dict[str, list[str]]) -> bool:
    """Return True if no behaviour depends on the node: types, texts, decorators, SILENT arguments,
    and the functions and calls in `skip`."""
    above = node.parent
    if node.type in ("decorator", "fstring", "assert_stmt", "import_from"):
        return True
    if above is None:
        return False
    if node.type == "funcdef" and node.name.value in skip["functions"]:
        return True
    if node.type == "if_stmt" and code_of(node.children[1]) == "TYPE_CHECKING":
        return True
    if node is getattr(above, "annotation", None) or (
        above.type == "annassign" and node is above.children[1]
    ):
        return True
    if above.type in ("tfpdef", "classdef") and node.type not in ("suite", "name", "operator"):
        return True
    if is_keyword(node) and node.children[0].value in SILENT:
        return True
    if above.type == "raise_stmt" and node.type in ("atom_expr", "power"):
        return True  # the error's message
    inside = node.type == "simple_stmt" and code_of(node)
    return bool(inside) and inside.startswith(tuple(skip["calls"]))


def function_of(node: Any) -> str:
    names = []
    while node := node.parent:
        if node.type in ("funcdef", "classdef"):
            names.append(node.name.value)
    return ".".join(reversed(names))


def run_tests(tests: list[str], root: Path, copy: Path) -> int:
    """Run tests in this process, a fork, on the package in a copy of the checkout, until one
    fails, and write their output to OUTPUT there. Return an exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    ctypes.CDLL(None).prctl(KILLED_WITH_PARENT, signal.SIGKILL)
    output = os.open(copy / OUTPUT, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for fd in range(3):
        os.dup2(output, fd)
    os.chdir(copy)
    scratch = copy / "tmp"
    shutil.rmtree(scratch, ignore_errors=True)  # left by the last run, if it was killed
    scratch.mkdir()
    os.environ |= {
        "TMPDIR": str(scratch),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # loading plugins takes as long as many tests
        "PYTHONPATH": f"{copy}:{os.getenv('PYTHONPATH', '')}",
    }
    here = {str(root), str(root / "tests"), str(root / "scripts")}
    others = [path for path in sys.path if path not in here]
    sys.path[:] = [str(copy), str(copy / "tests"), *others]
    if not str(importlib.import_module("sglang_mixkv").__file__).startswith(str(copy)):
        return 1
    hypothesis.configuration.set_hypothesis_home_dir(copy / ".hypothesis")
    quick = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("quick", derandomize=True, database=None, phases=quick)
    hypothesis.settings.load_profile("quick")
    modules = [test for test in tests if not test.startswith("scripts/")]
    if modules and pytest.main(["-xqpno:cacheprovider", "-ppytest_timeout", *modules]):
        return 1
    for script in tests:
        if script in modules:
            continue
        sys.argv = script.split()
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                return 1
    return 0
