"""The import rules of the package, checked in the source and in a separate process."""

from __future__ import annotations

import ast
import graphlib
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

NEED_AN_ENGINE = ("engine/", "guards/", "draft/rows.py", "draft/rows_gpu.py", "draft/kernels.py")
LIGHT = ("engine/releases.py", "engine/seams.py")

# Folder or file -> the third-party packages and the parts of the plugin that it may import. A part
# "" means names of the package itself. The rule with the longest matching path applies.
RULES: dict[str, tuple[set[str], set[str]]] = {
    "errors.py": (set(), set()),
    "background.py": (set(), set()),
    "config.py": ({"msgspec"}, {"errors"}),
    "refusals.py": (set(), {"config"}),
    "series.py": (set(), {"", "decode.cold", "errors"}),
    "draft/": ({"msgspec", "numpy"}, {"draft", "errors"}),
    # channel.data_plane only for the type of Store.plane
    "draft/copier.py": ({"msgspec"}, {"channel.data_plane", "draft"}),
    "draft/rows.py": ({"numpy", "torch"}, {"draft"}),
    "draft/cuda.py": (set(), set()),
    "draft/kernels.py": ({"triton"}, {"draft.slot_format"}),
    "draft/rows_gpu.py": ({"numpy", "torch"}, {"draft"}),
    "channel/": ({"msgspec", "zmq"}, {"channel", "draft", "errors"}),
    "channel/loop.py": (set(), {"background", "channel", "draft.copier"}),
    "channel/mooncake.py": ({"mooncake"}, {"channel", "errors"}),
    "channel/nixl.py": ({"msgspec", "nixl"}, {"channel", "errors"}),
    "prefill/": ({"msgspec", "numpy", "zmq"}, {"channel", "draft", "prefill"}),
    "decode/": ({"msgspec", "numpy", "zmq"}, {"channel", "decode", "draft", "errors"}),
    "guards/": (
        {"sglang", "torch"},
        {"background", "channel.actions", "draft.cuda", "errors", "guards", "series"},
    ),
    "engine/": (
        {"aiohttp", "msgspec", "prometheus_client", "sglang", "torch"},
        {"", "background", "channel", "config", "decode", "draft", "engine", "errors", "guards",
         "prefill", "refusals", "series"},
    ),
    "engine/releases.py": ({"sglang"}, {"", "config", "engine.seams", "refusals"}),
    "engine/seams.py": (set(), set()),
    "plugin.py": ({"sglang"}, {"config", "engine", "refusals"}),
    "tools/": (
        {"msgspec", "numpy", "prometheus_client", "requests", "zmq"},
        {"", "channel", "config", "decode.cold", "draft", "engine.releases", "errors", "refusals",
         "series", "tools"},
    ),
    "tools/doctor_read.py": (
        {"msgspec", "numpy", "torch", "zmq"}, {"", "channel", "config", "draft", "errors", "tools"},
    ),
    "tools/plan_": (
        {"dynamo", "huggingface_hub", "msgspec", "sglang", "torch", "yaml"},
        {"", "channel", "config", "decode.compare", "draft", "engine.releases", "errors",
         "refusals", "tools"},
    ),
    "__main__.py": (set(), {"", "tools"}),
    "__init__.py": (set(), set()),
    "mixkv_cpu/": ({"mixkv_cpu"}, set()),
    "mixkv_cpu/support.py": ({"mixkv_cpu", "nixl", "sgl_kernel", "sglang"}, set()),
    "mixkv_cpu/kernels/": ({"torch"}, set()),
    "mixkv_cpu/site/": ({"mixkv_cpu", "torch"}, set()),
    "mixkv_demo/": ({"mixkv_cpu", "mixkv_demo", "msgspec", "requests", "rich"},
                    {"__main__", "config", "series", "tools.client", "tools.status"}),
    "mixkv_demo/one_gpu/": ({"mixkv_demo", "sglang", "torch"}, set()),
}  # fmt: skip

FILES = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
FILES += [path.relative_to(ROOT) for name in BESIDE for path in (ROOT / name).rglob("*.py")]


def text_of(file: str) -> str:
    return ((ROOT if file.startswith(BESIDE) else PACKAGE) / file).read_text()


def rule_of(file: str) -> tuple[set[str], set[str]]:
    fitting = [p for p in RULES if file == p or (p[-1] in "/_" and file.startswith(p))]
    assert fitting, f"{file} has no rule: add its folder to RULES and to CONTRIBUTING.md"
    return RULES[max(fitting, key=len)]


def is_package(module: str) -> bool:
    return (ROOT / module.replace(".", "/")).is_dir()


def imported(node: ast.AST) -> Iterator[str]:
    """Yield the modules that an import statement, or a call of importlib, names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        module = node.module or ""
        names = (f"{module}.{alias.name}" for alias in node.names)
        yield from names if is_package(module) else (module,)
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
        yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant))


def is_allowed(module: str, own: set[str]) -> bool:
    """Return True if the module is one of these parts of the plugin or lies in one of them."""
    rest = module.removeprefix("sglang_mixkv").removeprefix(".")
    if not is_package(module) and not (ROOT / (module.replace(".", "/") + ".py")).is_file():
        rest = rest.rpartition(".")[0]  # drops a name within a module
    return any(rest == place or (place and rest.startswith(f"{place}.")) for place in own)


def violations(file: str, source: str) -> list[str]:
    """Return the imports of a file that RULES does not allow."""
    outside, own = rule_of(file)
    modules = (module for node in ast.walk(ast.parse(source)) for module in imported(node))
    return [
        module
        for module in modules
        if (top := module.partition(".")[0]) not in sys.stdlib_module_names
        and not (is_allowed(module, own) if top == "sglang_mixkv" else top in outside)
    ]


@pytest.mark.parametrize("file", sorted(map(str, FILES)))
def test_a_file_imports_only_what_its_rule_allows(file: str) -> None:
    """A file imports only what RULES allows, and the package does not mention mixkv_cpu or
    mixkv_demo, which the wheel lacks."""
    assert violations(file, text_of(file)) == []
    assert file.startswith(BESIDE) or not [name for name in BESIDE if name in text_of(file)]


def test_a_forbidden_import_is_found() -> None:
    for file, line in (
        ("draft/layout.py", "def f():\n    import sglang.srt"),
        ("draft/rows.py", "from sglang_mixkv.channel.slots import SlotPool"),
        ("channel/mooncake.py", "import importlib\nimportlib.import_module('sglang')"),
        ("tools/doctor.py", "from sglang_mixkv.engine import manager"),
    ):
        assert len(violations(file, line)) == 1, line


def test_light_modules_load_no_engine() -> None:
    """A new process that imports all light modules loads none of the heavy packages.

    The test also finds imports through another module.
    """
    light = [
        "sglang_mixkv." + file.removesuffix(".py").replace("/", ".")
        for file in map(str, FILES)
        if not file.startswith((*NEED_AN_ENGINE, "__main__.py", *BESIDE)) or file in LIGHT
    ]
    assert len(light) > 50
    code = (
        "import importlib, sys\n"
        f"for name in {light!r}: importlib.import_module(name)\n"
        f"print(*sorted({HEAVY!r} & {{m.split('.')[0] for m in sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def imported_parts(source: str) -> Iterator[str]:
    """Return the folders or files of the package that a file needs when it is imported or run."""
    tree = ast.parse(source)
    unneeded = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        for module in () if node in unneeded else imported(node):
            if module.startswith("sglang_mixkv."):
                yield module.split(".")[1]


def test_folders_import_each_other_in_one_direction() -> None:
    parts = {
        file.parts[0].removesuffix(".py") for file in FILES if not str(file).startswith(BESIDE)
    }
    graph: dict[str, set[str]] = {part: set() for part in parts}
    for file in FILES:
        part = file.parts[0].removesuffix(".py")
        if part in parts:
            graph[part] |= {*imported_parts(text_of(str(file)))} & parts - {part}
    assert len(graph["engine"]) > 5
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError
