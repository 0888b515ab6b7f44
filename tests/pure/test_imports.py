"""Who may import what: the table in CONTRIBUTING.md, checked on the source and in a process."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_mixkv

ROOT = Path(sglang_mixkv.__file__).parent
HEAVY = {"sglang", "torch", "triton", "mooncake", "sgl_kernel"}

# Folder or file -> packages beyond the standard library that it may import, and of this
# package which parts ("": names of the package itself). The longest path that fits decides.
RULES: dict[str, tuple[set[str], set[str]]] = {
    "core/": ({"msgspec", "numpy"}, {"core"}),
    "transfer/": ({"msgspec", "numpy"}, {"core", "transfer"}),
    "rows/cuda.py": ({"msgspec", "numpy", "torch", "triton"}, {"core", "transfer"}),
    "config.py": ({"msgspec"}, set()),
    "compat.py": (set(), {"config"}),
    "startup.py": (set(), {"compat", "config"}),
    "managers/": (
        {"aiohttp", "msgspec", "numpy", "requests", "sglang", "zmq"},
        {"", "compat", "config", "core", "managers", "startup", "transfer"},
    ),
    "plugin.py": (set(), {"compat", "config", "cpu", "managers", "startup"}),
    "cpu/": (set(), {"cpu"}),
    "cpu/site/": ({"torch"}, set()),
    "tools/": (
        {"msgspec", "numpy", "requests", "rich"},
        {"", "compat", "config", "core", "cpu", "startup", "tools", "transfer"},
    ),
    "__main__.py": (set(), {"tools"}),
    "__init__.py": (set(), set()),
}

# What may be imported inside a function, since the module itself has to load without it.
LAZY = {
    "plugin.py": {"sglang"},
    "startup.py": {"sglang"},
    "cpu/support.py": {"sglang"},
    "engine/metrics.py": {"prometheus_client"},
    "decode/landing.py": {"sglang_mixkv.rows.cuda"},
    "tools/doctor_transfer.py": {"mooncake"},
    "tools/plan_flags.py": {"yaml"},
}


def source_files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py"))


def rule_of(file: str) -> tuple[set[str], set[str]]:
    fitting = [prefix for prefix in RULES if file == prefix or file.startswith(prefix)]
    fitting = [prefix for prefix in fitting if prefix.endswith("/") or file == prefix]
    assert fitting, f"{file} has no rule: add its folder to RULES and to CONTRIBUTING.md"
    return RULES[max(fitting, key=len)]


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Each imported module, and whether that happens when the file itself is imported."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inside = {
        id(node) for outer in ast.walk(tree) if isinstance(outer, functions)
        for node in ast.walk(outer)
    }  # fmt: skip
    for node in ast.walk(tree):
        at_import = id(node) not in inside
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:  # within cpu/site/sgl_kernel, a package of its own
                continue
            if module == "sglang_mixkv" or module == "sglang_mixkv.transfer":
                yield from ((f"{module}.{alias.name}", at_import) for alias in node.names)
            else:
                yield module, at_import


def violations(file: str, source: str) -> list[str]:
    """What a file imports that it may not."""
    outside, own = rule_of(file)
    lazy = LAZY.get(file, set())
    found = []
    for module, at_import in imports(ast.parse(source)):
        top, _, rest = module.partition(".")
        if top in sys.stdlib_module_names:
            continue
        if not at_import and (top in lazy or module in lazy):
            continue
        if module == "sglang_mixkv.rows.cuda":
            found.append(module)  # torch and Triton: only where a GPU is
        elif top == "sglang_mixkv":
            part = rest.partition(".")[0]
            is_module = bool(part) and ((ROOT / part).is_dir() or (ROOT / f"{part}.py").is_file())
            if (part if is_module else "") not in own:  # "": a name of the package itself
                found.append(module)
        elif top not in outside:
            found.append(module)
    return found


@pytest.mark.parametrize("file", source_files())
def test_a_file_imports_what_its_place_allows(file: str) -> None:
    assert violations(file, (ROOT / file).read_text()) == []


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("kv/plan.py", "import torch", "torch"),
        ("kv/plan.py", "from sglang_mixkv.prefill.peer import Peer", "sglang_mixkv.engine"),
        ("kv/plan.py", "def f():\n    import sglang.srt", "sglang.srt"),
        ("config.py", "import numpy", "numpy"),
        ("transport/base.py", "from sglang_mixkv.transfer import cuda", "transfer.cuda"),
        ("prefill/peer.py", "import torch", "torch"),
        ("prefill/peer.py", "from sglang_mixkv.tools import plan", "sglang_mixkv.tools"),
        ("plugin.py", "from sglang.srt.plugins import hook_registry", "sglang.srt.plugins"),
        ("tools/plan.py", "from sglang_mixkv.prefill.peer import Peer", "sglang_mixkv.engine"),
    ],
)
def test_a_forbidden_import_is_found(file: str, line: str, found: str) -> None:
    (module,) = violations(file, line)
    assert found in module


def test_the_pure_part_leaves_sglang_and_torch_unimported() -> None:
    """In a process of its own: nothing comes in by another module either."""
    pure = [
        "sglang_mixkv." + file.removesuffix(".py").replace("/", ".")
        for file in source_files()
        if not rule_of(file)[0] & HEAVY and not file.startswith("tools/")
        and file != "__main__.py"
    ]  # fmt: skip
    assert len(pure) > 20
    code = (
        "import importlib, sys\n"
        f"for name in {pure!r}: importlib.import_module(name)\n"
        f"print(*sorted({HEAVY!r} & {{m.split('.')[0] for m in sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_contributing_shows_every_folder() -> None:
    """The map of the code names each place that has a rule of its own."""
    text = (ROOT.parent / "CONTRIBUTING.md").read_text()
    places = {prefix.partition("/")[0] for prefix in RULES} - {"__init__.py"}
    missing = {p for p in places if f"{p}/`" not in text and f"{p}`" not in text}
    assert missing == set()
