"""Wheel and source distribution: complete, installable and working where there is no SGLang.

Built with the installed setuptools, installed with `pip --no-index`; the light dependencies
are linked from this environment. So nothing is fetched.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from sglang_mixkv import __version__
from sglang_mixkv.engine.releases import SUPPORTED_SGLANG

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sglang_mixkv"
LIGHT = ("msgspec", "numpy", "pyzmq")
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
    wanted = [path for folder in FOLDERS[1:] for path in
              (ROOT / folder).rglob("*") if path.is_file()]  # fmt: skip
    wanted = [path for path in wanted if "__pycache__" not in path.parts]
    assert {str(path.relative_to(ROOT)) for path in wanted} - found == set()
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"} <= found
    assert package_files() <= found


def link(name: str, site: Path) -> None:
    """Put an installed distribution of this environment into another one."""
    for file in metadata.files(name) or []:
        source = Path(str(file.locate()))
        if ".." not in file.parts and source.is_file():
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)


class Clean:
    """A fresh environment with the plugin and what is light of its dependencies."""

    def __init__(self, folder: Path, archive: Path) -> None:
        venv.create(folder, with_pip=False)
        self.folder, self.python = folder, folder / "bin" / "python"
        (site,) = folder.glob("lib/python*/site-packages")
        for name in (*LIGHT, *(("setuptools",) if archive.suffix == ".gz" else ())):
            link(name, site)
        run(
            sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-index",
            "--no-deps", "--no-build-isolation", archive, cwd=folder,
        )  # fmt: skip

    def call(self, *arguments: object, status: int = 0) -> str:
        return run(self.python, *arguments, cwd=self.folder, status=status)


@pytest.fixture(scope="module", params=["*.whl", "*.tar.gz"], ids=["wheel", "sdist"])
def clean(
    request: pytest.FixtureRequest, built: Path, tmp_path_factory: pytest.TempPathFactory
) -> Clean:
    return Clean(tmp_path_factory.mktemp("clean") / "env", one(built, request.param))


def test_it_is_imported_from_the_clean_environment(clean: Clean) -> None:
    code = (
        "import importlib, pkgutil, sglang_mixkv\n"
        "from sglang_mixkv import channel, decode, draft, prefill\n"
        "for room in (channel, decode, draft, prefill):\n"
        "    for found in pkgutil.iter_modules(room.__path__, room.__name__ + '.'):\n"
        "        if found.name.split('.')[-1] not in ('rows', 'rows_gpu', 'kernels'):\n"  # torch
        "            importlib.import_module(found.name)\n"
        "import sglang_mixkv.config, sglang_mixkv.refusals\n"
        "try:\n    import sglang\nexcept ImportError:\n    print(sglang_mixkv.__file__)\n"
    )
    assert clean.call("-c", code).startswith(str(clean.folder))


def test_the_entry_point_is_registered_and_loads(clean: Clean) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "(point,) = entry_points(group='sglang.srt.plugins')\n"
        "print(point.name, point.value, callable(point.load()))"
    )
    assert clean.call("-c", code).split() == ["mixkv", "sglang_mixkv.plugin:register", "True"]


def test_the_commands_work(clean: Clean) -> None:
    assert "plan" in clean.call("-m", "sglang_mixkv", "--help")
    clean.call("-m", "sglang_mixkv", "plan", "--prefill", "x", "--decode", "x", status=2)
    clean.call("-m", "sglang_mixkv", "demo", status=2)
    clean.call("-c", "import mixkv_cpu", status=1)
    clean.call("-c", "import mixkv_demo", status=1)


def test_the_doctor_says_what_is_missing(clean: Clean) -> None:
    said = clean.call("-m", "sglang_mixkv", "doctor", "--no-seams", "--no-transfer", status=1)
    assert "sglang_mixkv.plugin:register" in said
    assert re.search(r"^!! +sglang +none$", said, re.MULTILINE)


# ---------------------------------------------------------------- versions


def test_versions_that_have_to_change_together() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert project["optional-dependencies"]["sglang"] == [f"sglang=={SUPPORTED_SGLANG[-1]}"]
    assert f"lmsysorg/sglang:v{SUPPORTED_SGLANG[-1]}" in (ROOT / "docker/Dockerfile").read_text()


def test_a_tag_that_is_not_the_version_is_an_error() -> None:
    done = subprocess.run(
        ["bash", "scripts/dist.sh", "refs/tags/v0.0.1"], cwd=ROOT, text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"the tag is v0.0.1, the version in pyproject.toml {__version__}" in done.stderr
