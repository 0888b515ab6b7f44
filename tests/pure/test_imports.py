"""Who may import what, checked on the source and in a process."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_mixkv

PACKAGE = Path(sglang_mixkv.__file__).parent
ROOT = PACKAGE.parent
BESIDE = ("mixkv_cpu", "mixkv_demo")
HEAVY = {"sglang", "torch", "triton", "mooncake", "nixl", "sgl_kernel"}

# Folder or file -> packages beyond the standard library that it may import, and of the plugin
# which parts ("": names of the package itself). The longest path that fits decides.
RULES: dict[str, tuple[set[str], set[str]]] = {
    "errors.py": (set(), set()),
    "config.py": ({"msgspec"}, {"errors"}),
    "refusals.py": (set(), {"config"}),
    "series.py": (set(), {"errors"}),
    "draft/": ({"msgspec", "numpy"}, {"channel.messages", "draft", "errors"}),
    "draft/rows.py": ({"numpy", "torch"}, {"draft.slot_format"}),
    "draft/cuda.py": (set(), set()),
    "draft/kernels.py": ({"triton"}, {"draft.slot_format"}),
    "draft/rows_gpu.py": ({"numpy", "torch"}, {"draft"}),
    "channel/": ({"msgspec", "zmq"}, {"channel", "errors"}),
    "prefill/": ({"msgspec", "numpy", "zmq"}, {"channel", "draft", "prefill"}),
    "decode/": ({"msgspec", "numpy", "zmq"}, {"channel", "decode", "draft", "errors"}),
    "engine/": (
        {"aiohttp", "msgspec", "sglang", "torch"},
        {"", "channel", "config", "decode", "draft", "engine", "errors", "prefill", "refusals",
         "series"},
    ),
    "engine/releases.py": (set(), {"", "config", "engine.seams", "refusals"}),  # SGLang by name
    "engine/seams.py": (set(), set()),
    "plugin.py": (set(), {"config", "engine", "refusals"}),
    "tools/": (
        {"msgspec", "numpy", "requests", "zmq"},
        {"", "channel", "config", "draft", "engine.releases", "errors", "refusals", "series",
         "tools"},
    ),
    "__main__.py": (set(), {"", "tools"}),
    "__init__.py": (set(), set()),
    "mixkv_cpu/": ({"mixkv_cpu"}, set()),
    "mixkv_cpu/kernels/": ({"torch"}, set()),
    "mixkv_cpu/site/": ({"mixkv_cpu", "torch"}, set()),
    "mixkv_demo/": ({"mixkv_cpu", "mixkv_demo", "requests", "rich"},
                    {"__main__", "config", "series", "tools.client", "tools.status_pages"}),
    "mixkv_demo/one_gpu/": ({"mixkv_demo", "torch"}, set()),
}  # fmt: skip

# What may be imported inside a function, since the module itself has to load without it.
LAZY = {
    "plugin.py": {"sglang"},
    "mixkv_cpu/support.py": {"nixl", "sgl_kernel", "sglang"},
    "mixkv_demo/one_gpu/support.py": {"sglang"},
    "channel/mooncake.py": {"mooncake"},
    "channel/nixl.py": {"nixl"},
    "engine/handover.py": {"sglang"},
    "engine/metrics.py": {"prometheus_client", "sglang"},
    "engine/releases.py": {"sglang"},
    "tools/doctor_read.py": {"sglang_mixkv.draft.rows", "torch"},
    "tools/plan_line.py": {"sglang", "torch", "yaml"},
    "tools/plan_server.py": {"huggingface_hub", "sglang"},
    "tools/status_pages.py": {"prometheus_client"},
}


FILES = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
FILES += [path.relative_to(ROOT) for name in BESIDE for path in (ROOT / name).rglob("*.py")]


def text_of(file: str) -> str:
    return ((ROOT if file.startswith(BESIDE) else PACKAGE) / file).read_text()


def rule_of(file: str) -> tuple[set[str], set[str]]:
    fitting = [p for p in RULES if file == p or (p.endswith("/") and file.startswith(p))]
    assert fitting, f"{file} has no rule: add its folder to RULES and to CONTRIBUTING.md"
    return RULES[max(fitting, key=len)]


def is_package(module: str) -> bool:
    return (ROOT / module.replace(".", "/")).is_dir()


def imported(node: ast.AST) -> Iterator[str]:
    """Modules that this statement, or call of importlib, names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        module = node.module or ""
        names = (f"{module}.{alias.name}" for alias in node.names)
        yield from names if is_package(module) else (module,)
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
        yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant))


def imports(node: ast.AST, at_import: bool = True) -> Iterator[tuple[str, bool]]:
    """Each imported module, and whether that happens when the file itself is imported."""
    yield from ((module, at_import) for module in imported(node))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from imports(child, at_import and not isinstance(node, functions))


def is_allowed(module: str, own: set[str]) -> bool:
    """Whether this part of the package is, or lies in, one of these."""
    rest = module.removeprefix("sglang_mixkv").removeprefix(".")
    if not is_package(module) and not (ROOT / (module.replace(".", "/") + ".py")).is_file():
        rest = rest.rpartition(".")[0]  # a name in a module
    return any(rest == place or (place and rest.startswith(f"{place}.")) for place in own)


def violations(file: str, source: str) -> list[str]:
    """What a file imports that it may not."""
    outside, own = rule_of(file)
    lazy = LAZY.get(file, set())
    found = []
    for module, at_import in imports(ast.parse(source)):
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names:
            continue
        if not at_import and (top in lazy or module in lazy):
            continue
        if not (is_allowed(module, own) if top == "sglang_mixkv" else top in outside):
            found.append(module)
    return found


@pytest.mark.parametrize("file", sorted(map(str, FILES)))
def test_a_file_imports_what_its_place_allows(file: str) -> None:
    """And names nothing that stands beside the package: the wheel has none of it."""
    assert violations(file, text_of(file)) == []
    assert file.startswith(BESIDE) or not [name for name in BESIDE if name in text_of(file)]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("draft/routes.py", "import torch"),
        ("draft/layout.py", "def f():\n    import sglang.srt"),
        ("draft/rows.py", "from sglang_mixkv.channel.slots import SlotPool"),
        ("channel/mooncake.py", "import importlib\nimportlib.import_module('sglang')"),
        ("prefill/machine.py", "from sglang_mixkv.decode import machine"),
        ("plugin.py", "from sglang.srt.plugins import hook_registry"),
        ("tools/doctor.py", "from sglang_mixkv.engine import manager"),
    ],
)
def test_a_forbidden_import_is_found(file: str, line: str) -> None:
    assert len(violations(file, line)) == 1


def test_the_pure_part_leaves_sglang_and_torch_unimported() -> None:
    """In a process of its own: nothing comes in by another module either."""
    pure = [
        "sglang_mixkv." + file.removesuffix(".py").replace("/", ".")
        for file in map(str, FILES)
        if not file.startswith(("tools/", "__main__.py", *BESIDE)) and not rule_of(file)[0] & HEAVY
    ]
    assert len(pure) > 20
    code = (
        "import importlib, sys\n"
        f"for name in {pure!r}: importlib.import_module(name)\n"
        f"print(*sorted({HEAVY!r} & {{m.split('.')[0] for m in sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
