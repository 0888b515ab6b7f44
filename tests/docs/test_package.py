"""Wheel and source distribution: complete, installable and working where there is no SGLang.

Built with the installed setuptools, the wheel from the source distribution; installed with
`pip --no-index`; the light dependencies are linked from this environment. So nothing is fetched.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rig.answers import serving

from sglang_mixkv import __version__
from sglang_mixkv.__main__ import COMMANDS
from sglang_mixkv.engine.releases import SUPPORTED_SGLANG
from sglang_mixkv.errors import CODES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sglang_mixkv"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = ("torch",)
"""Is left out of the clean environment; `doctor`'s read and the engine import it."""
BESIDE_SGLANG = {"huggingface_hub", "mooncake", "nixl", "sglang", "triton", "yaml"}
"""What is imported only where SGLang, or a transport, is."""
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")
FOLDERS = (
    "sglang_mixkv", "mixkv_cpu", "mixkv_demo", "docker", "docs", "examples", "scripts", "tests",
    "upstream", ".ci", ".github",
)  # fmt: skip


def run(*command: object, cwd: Path, status: int = 0) -> str:
    """Run outside of the repository; its output. Python's own variables are not passed on."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SGLANG", "PIP_"))}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, text=True, capture_output=True, check=False
    )
    assert done.returncode == status, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=LEFT_OUT)
    for file in (path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"):
        shutil.copy2(file, source)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source, cwd=folder)
    return folder


def one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def package_files() -> set[str]:
    found = (path.relative_to(ROOT) for path in PACKAGE.rglob("*") if path.is_file())
    return {str(path) for path in found if "__pycache__" not in path.parts}


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_every_file_of_the_package_and_no_other(built: Path) -> None:
    found = names(one(built, "*.whl"))
    in_package = {name for name in found if name.startswith("sglang_mixkv/")}
    assert in_package == package_files()
    others = {name.partition("/")[0] for name in found - in_package}
    assert len(others) == 1, f"more than the package and its metadata: {others}"
    assert "sglang_mixkv/py.typed" in found
    assert [n for n in found if "mixkv_cpu" in n or "demo" in n or "safetensors" in n] == []
    assert any(name.endswith("licenses/LICENSE") for name in found)


def test_the_source_distribution_carries_docs_scripts_and_tests(built: Path) -> None:
    with tarfile.open(one(built, "*.tar.gz")) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {str(p.relative_to(ROOT)) for folder in FOLDERS for p in (ROOT / folder).rglob("*")
              if p.is_file() and not {"__pycache__", ".mypy_cache"} & {*p.parts}}  # fmt: skip
    assert wanted - found == set()
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"} <= found


def declared() -> set[str]:
    """The wheel's dependencies and theirs, but for the heavy one."""
    found, left = set[str](), list[str](PROJECT["dependencies"])
    while left:
        requirement = Requirement(left.pop())
        name = canonicalize_name(requirement.name)
        if name in found or name in HEAVY:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.add(name)
            left += metadata.requires(name) or []
    return found


def link(name: str, site: Path) -> None:
    """Put an installed distribution of this environment into another one."""
    for file in metadata.files(name) or []:
        source = Path(str(file.locate()))
        if ".." not in file.parts and source.is_file():
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)


@pytest.fixture(scope="module")
def clean(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the plugin and its declared dependencies."""
    folder = tmp_path_factory.mktemp("clean") / "env"
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in declared():
        link(name, site)
    run(
        sys.executable, "-m", "pip", "--python", python(folder), "install", "-q", "--no-index",
        "--no-deps", one(built, "*.whl"), cwd=folder,
    )  # fmt: skip
    return folder


def python(folder: Path) -> Path:
    return folder / "bin" / "python"


def test_it_is_imported_from_the_clean_environment(clean: Path) -> None:
    code = (
        "import importlib, pkgutil, sglang_mixkv\n"
        "from importlib.metadata import entry_points\n"
        "from sglang_mixkv import channel, decode, draft, prefill\n"
        "for room in (channel, decode, draft, prefill):\n"
        "    for found in pkgutil.iter_modules(room.__path__, room.__name__ + '.'):\n"
        "        if found.name.split('.')[-1] not in ('rows', 'rows_gpu', 'kernels'):\n"  # torch
        "            importlib.import_module(found.name)\n"
        "import sglang_mixkv.config, sglang_mixkv.refusals\n"
        "(point,) = entry_points(group='sglang.srt.plugins')\n"
        "print(sglang_mixkv.__file__, point.name, point.value, callable(point.load()))"
    )
    file, *point = run(python(clean), "-c", code, cwd=clean).split()
    assert file.startswith(str(clean))
    assert point == ["mixkv", "sglang_mixkv.plugin:register", "True"]
    for module in ("sglang", "mixkv_cpu", "mixkv_demo"):
        run(python(clean), "-c", f"import {module}", cwd=clean, status=1)


def test_the_commands_work_without_sglang(clean: Path) -> None:
    def call(*arguments: str, status: int = 0) -> str:
        return run(clean / "bin" / "sglang-mixkv", *arguments, cwd=clean, status=status)

    assert call("--version") == f"sglang-mixkv {__version__}\n"
    for command in COMMANDS:
        assert f"sglang_mixkv {command}" in call(command, "--help")
    with serving(lambda path: (200, b"go 5\n")) as server:
        assert "no series of the plugin" in call("status", server, status=1)
    call("plan", "--prefill", "x", "--decode", "x", status=2)
    said = call("doctor", status=1)
    assert "sglang_mixkv.plugin:register" in said
    assert re.search(r"^!! +sglang +none$", said, re.MULTILINE)
    assert said.endswith("\n1 problem, marked !!\n")


# ---------------------------------------------------------------- what the package names


def nodes() -> Iterator[ast.AST]:
    for path in PACKAGE.rglob("*.py"):
        yield from ast.walk(ast.parse(path.read_text()))


def test_what_the_wheel_imports_is_declared() -> None:
    """An environment that has SGLang has many packages more, so nothing else would miss one."""
    imported = set[str]()
    for node in nodes():
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
    imported -= {*sys.stdlib_module_names, "sglang_mixkv"}
    of = metadata.packages_distributions()
    found = {canonicalize_name(n) for module in imported - BESIDE_SGLANG for n in of[module]}
    assert found == {Requirement(text).name for text in PROJECT["dependencies"]}


def test_every_code_is_in_the_table_and_has_an_entry() -> None:
    """Also one that a message puts together: nothing may stand where a part of a code does."""
    printed = set[str]()
    for node in nodes():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            printed |= {*re.findall(r"MIXKV-[A-Z]+[\w-]*", node.value)}
        elif isinstance(node, ast.JoinedStr):
            texts = [v.value if isinstance(v, ast.Constant) else "{" for v in node.values]
            assert not re.search(r"MIXKV-[\w-]*\{", "".join(map(str, texts)))
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert printed == set(CODES) == {*re.findall(r"(?m)^### (MIXKV-\S+)", page)}


# ---------------------------------------------------------------- versions


def test_versions_that_have_to_change_together() -> None:
    assert PROJECT["version"] == __version__
    assert PROJECT["optional-dependencies"]["sglang"] == [f"sglang=={SUPPORTED_SGLANG[-1]}"]
    assert f"lmsysorg/sglang:v{SUPPORTED_SGLANG[-1]}" in (ROOT / "docker/Dockerfile").read_text()


def test_a_tag_that_is_not_the_version_is_an_error() -> None:
    done = subprocess.run(
        ["bash", "scripts/dist.sh", "refs/tags/v0.0.1"], cwd=ROOT, text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"the tag is v0.0.1, the version in pyproject.toml {__version__}" in done.stderr
