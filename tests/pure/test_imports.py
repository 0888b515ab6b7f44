"""Who may import what: the table in CONTRIBUTING.md, checked on the source and in a process."""

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
    "draft/rows_gpu.py": ({"numpy", "torch"}, {"draft.cuda", "draft.kernels", "draft.slot_format"}),
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
    "__main__.py": (set(), {"tools"}),
    "__init__.py": (set(), set()),
    "mixkv_cpu/": ({"mixkv_cpu"}, set()),
    "mixkv_cpu/kernels/": ({"torch"}, set()),
    "mixkv_cpu/site/": ({"mixkv_cpu", "torch"}, set()),
    "mixkv_demo/": ({"mixkv_cpu", "mixkv_demo", "requests", "rich"},
                    {"__main__", "config", "tools.client", "tools.pages"}),
}  # fmt: skip

# What may be imported inside a function, since the module itself has to load without it.
LAZY = {
    "plugin.py": {"sglang"},
    "mixkv_cpu/support.py": {"nixl", "sgl_kernel", "sglang"},
    "channel/mooncake.py": {"mooncake"},
    "channel/nixl.py": {"nixl"},
    "engine/handover.py": {"sglang"},
    "engine/metrics.py": {"prometheus_client", "sglang"},
    "tools/doctor_read.py": {"sglang_mixkv.draft.rows", "torch"},
    "tools/pages.py": {"prometheus_client"},
    "tools/plan_line.py": {"sglang", "torch", "yaml"},
    "tools/plan_server.py": {"huggingface_hub", "sglang"},
}


def source_files(*beside: str) -> list[str]:
    """Of the plugin, by their paths in it; of these packages beside it, by theirs from the root."""
    found = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    found += [path.relative_to(ROOT) for name in beside for path in (ROOT / name).rglob("*.py")]
    return sorted(map(str, found))


def text_of(file: str) -> str:
    return ((ROOT if file.startswith(BESIDE) else PACKAGE) / file).read_text()


def rule_of(file: str) -> tuple[set[str], set[str]]:
    fitting = [prefix for prefix in RULES if file == prefix or file.startswith(prefix)]
    fitting = [prefix for prefix in fitting if prefix.endswith("/") or file == prefix]
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


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Each imported module, and whether that happens when the file itself is imported."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inside = {
        id(node) for outer in ast.walk(tree) if isinstance(outer, functions)
        for node in ast.walk(outer)
    }  # fmt: skip
    for node in ast.walk(tree):
        yield from ((module, id(node) not in inside) for module in imported(node))


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


@pytest.mark.parametrize("file", source_files(*BESIDE))
def test_a_file_imports_what_its_place_allows(file: str) -> None:
    assert violations(file, text_of(file)) == []


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("draft/routes.py", "import torch", "torch"),
        ("draft/routes.py", "from sglang_mixkv.prefill import machine", "sglang_mixkv.prefill"),
        ("draft/layout.py", "def f():\n    import sglang.srt", "sglang.srt"),
        ("draft/rows.py", "from sglang_mixkv.channel.slots import SlotPool", "channel.slots"),
        ("config.py", "import numpy", "numpy"),
        ("channel/slots.py", "from sglang_mixkv.draft.facts import Row", "draft.facts"),
        ("channel/mooncake.py", "import importlib\nimportlib.import_module('sglang')", "sglang"),
        ("prefill/machine.py", "import torch", "torch"),
        ("prefill/worker.py", "from sglang.srt.environ import envs", "sglang.srt"),
        ("prefill/machine.py", "from sglang_mixkv.engine import rank", "sglang_mixkv.engine"),
        ("prefill/machine.py", "from sglang_mixkv.decode import machine", "sglang_mixkv.decode"),
        ("decode/worker.py", "def f():\n    import torch", "torch"),
        ("decode/machine.py", "from sglang_mixkv.prefill import machine", "sglang_mixkv.prefill"),
        ("refusals.py", "def f():\n    import sglang", "sglang"),
        ("plugin.py", "from sglang.srt.plugins import hook_registry", "sglang.srt.plugins"),
        ("plugin.py", "def f():\n    from mixkv_cpu import support", "mixkv_cpu"),
        ("mixkv_cpu/support.py", "import sglang", "sglang"),
        ("mixkv_cpu/support.py", "from sglang_mixkv import config", "sglang_mixkv.config"),
        ("mixkv_demo/pair.py", "from sglang_mixkv.tools import plan", "sglang_mixkv.tools.plan"),
        ("tools/plan.py", "from sglang_mixkv.prefill import machine", "sglang_mixkv.prefill"),
        ("tools/doctor.py", "from sglang_mixkv.engine import manager", "engine.manager"),
        ("engine/releases.py", "import sglang", "sglang"),
    ],
)
def test_a_forbidden_import_is_found(file: str, line: str, found: str) -> None:
    (module,) = violations(file, line)
    assert found in module


def importers(package: str) -> set[str]:
    """Files of the plugin that import it anywhere."""
    return {
        file
        for file in source_files()
        for module, _ in imports(ast.parse(text_of(file)))
        if module.partition(".")[0] == package
    }


def test_one_folder_imports_sglang_and_two_files_torch() -> None:
    """Beside the entry point's hooks, a process of the doctor's, and the plan, which asks SGLang's
    parser; read off the source."""
    plan = {"tools/plan_line.py", "tools/plan_server.py"}
    outside = {file for file in importers("sglang") if not file.startswith("engine/")}
    assert outside == {"plugin.py", *plan}
    of_torch = {file for file in importers("torch") if not file.startswith("engine/")}
    rows = {"draft/rows.py", "draft/rows_gpu.py"}
    assert of_torch == {*rows, "tools/doctor_read.py", "tools/plan_line.py"}
    assert importers("triton") == {"draft/kernels.py"}


def test_the_plugin_knows_nothing_of_what_stands_beside_it() -> None:
    """Neither by an import nor by a name in a string: the wheel has none of it."""
    assert [f for f in source_files() for name in BESIDE if name in text_of(f)] == []


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
    text = (ROOT / "CONTRIBUTING.md").read_text()
    places = {prefix.partition("/")[0] for prefix in RULES} - {"__init__.py"}
    missing = {p for p in places if f"{p}/`" not in text and f"{p}`" not in text}
    assert missing == set()
