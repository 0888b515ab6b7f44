"""The wheel and the source distribution are complete, installable, and work without SGLang.

The installed setuptools builds the source distribution, and the wheel from it. The `clean`
fixture unpacks the wheel into a folder with links to the plugin's declared dependencies, and Python
can import nothing else. Nothing is downloaded.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rig.process.answers import serving

from sglang_mixkv import __version__
from sglang_mixkv.__main__ import COMMANDS
from sglang_mixkv.engine.releases import SUPPORTED_SGLANG

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sglang_mixkv"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BESIDE_SGLANG = {"dynamo", "huggingface_hub", "mooncake", "nixl", "sglang", "torch", "triton"}
"""Packages that are imported only if SGLang, a transfer backend or Dynamo is installed."""
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")
FOLDERS = (
    "sglang_mixkv", "mixkv_cpu", "mixkv_demo", "docker", "docs", "examples", "findings", "scripts",
    "tests", "upstream", ".ci", ".github",
)  # fmt: skip


def run(*command: object, cwd: Path, status: int = 0, site: Path | None = None) -> str:
    """Run Python outside the repository, without Python's environment variables, and return its
    output. `site`: the only folder in which it finds packages, besides the standard library."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SGLANG", "PIP_"))}
    env |= {"PYTHONPATH": str(site)} if site else {}
    python = [sys.executable, *["-S"] * (site is not None)]
    done = subprocess.run(
        [*python, *map(str, command)], cwd=cwd, env=env, text=True, capture_output=True
    )
    assert done.returncode == status, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution, and the wheel from it, and return their folder."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=LEFT_OUT)
    for file in (path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"):
        shutil.copy2(file, source)
    run("-m", "build", "--no-isolation", "--outdir", folder, source, cwd=folder)
    return folder


def one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def files(*folders: str) -> set[str]:
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    kept = (p for p in found if not {"__pycache__", ".mypy_cache"} & {*p.parts})
    return {str(path.relative_to(ROOT)) for path in kept}


def test_the_archives_have_the_right_files(built: Path) -> None:
    with zipfile.ZipFile(one(built, "*.whl")) as archive:
        wheel = set(archive.namelist())
    assert {name for name in wheel if ".dist-info/" not in name} == files("sglang_mixkv")
    assert any(name.endswith("licenses/LICENSE") for name in wheel)
    with tarfile.open(one(built, "*.tar.gz")) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    assert files(*FOLDERS) - source == set()
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"} <= source


def test_a_package_index_shows_the_readme_with_absolute_links(built: Path) -> None:
    """Both archives have the same description, whose links point into the repository named in
    pyproject.toml."""
    with zipfile.ZipFile(one(built, "*.whl")) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith("/METADATA"))
        of_wheel = message_from_bytes(wheel.read(name))
    with tarfile.open(one(built, "*.tar.gz")) as source:
        (name,) = (n for n in source.getnames() if re.fullmatch(r"[^/]*/PKG-INFO", n))
        of_source = message_from_bytes(source.extractfile(name).read())  # type: ignore[union-attr]
    shown = of_wheel.get_payload()
    assert shown == of_source.get_payload()
    assert of_wheel["Description-Content-Type"] == "text/markdown"
    link = r"(!?)\[[^]]*\]\(([^)\s]+)\)"
    written = re.findall(link, (ROOT / "README.md").read_text())
    repository, ref = (
        PROJECT["urls"]["Repository"],
        "main" if "dev" in __version__ else f"v{__version__}",
    )
    kinds = {"": f"{repository}/blob/{ref}/", "!": f"{repository}/raw/{ref}/"}
    absolute = [(at, to if "://" in to else kinds[at] + to) for at, to in written]
    assert re.findall(link, shown) == absolute
    assert {at for at, to in absolute if to.startswith(repository)} == {"", "!"}


def test_only_pyproject_toml_has_the_owner_placeholder() -> None:
    """A release replaces the placeholder in pyproject.toml. scripts/dist.sh checks for others."""
    texts = [ROOT / name for name in files(*FOLDERS)] + [p for p in ROOT.iterdir() if p.is_file()]
    placeholder = "/".join(("OWNER", "sglang-mixkv"))
    found = {p.name for p in texts if placeholder.encode() in p.read_bytes()}
    assert found <= {"pyproject.toml"}


def declared() -> set[str]:
    """Return the wheel's direct and indirect dependencies."""
    found, left = set[str](), list[str](PROJECT["dependencies"])
    while left:
        requirement = Requirement(left.pop())
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.add(name)
            left += metadata.requires(name) or []
    return found


@pytest.fixture(scope="module")
def clean(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the plugin and its declared dependencies into an empty folder."""
    site = tmp_path_factory.mktemp("clean")
    with zipfile.ZipFile(one(built, "*.whl")) as wheel:
        wheel.extractall(site)
    for name in declared():
        for file in metadata.files(name) or []:
            source, target = Path(str(file.locate())), site / file
            if ".." not in file.parts and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source)
    return site


def test_its_entry_points_load_in_the_clean_environment(clean: Path) -> None:
    code = (
        "import sglang_mixkv\n"
        "from importlib.metadata import entry_points\n"
        "(point,) = entry_points(group='sglang.srt.plugins')\n"
        "(script,) = entry_points(name='sglang-mixkv')\n"
        "print(sglang_mixkv.__file__, point.name, point.load().__name__, script.load().__name__)"
    )
    file, *points = run("-c", code, cwd=clean, site=clean).split()
    assert file.startswith(str(clean))
    assert points == ["mixkv", "register", "run"]


def test_the_commands_work_without_sglang(clean: Path) -> None:
    """The commands also work without torch, for example on a router's host or a laptop."""

    def call(*arguments: str, status: int = 0) -> str:
        return run("-m", "sglang_mixkv", *arguments, cwd=clean, status=status, site=clean)

    assert call("--version") == f"sglang-mixkv {__version__}\n"
    for command in COMMANDS:
        assert f"sglang_mixkv {command}" in call(command, "--help")
    with serving(lambda path: (200, b"go 5\n")) as server:
        assert "no series of the plugin" in call("status", server, status=1)
    (clean / "prompts").write_text('{"input_ids": [1]}')
    info = {"completion_tokens": 2, "finish_reason": {"type": "length"}, "spec_verify_ct": 1}
    event = {"output_ids": [5, 6], "meta_info": info | {"spec_correct_drafts_histogram": [0, 1]}}
    with serving(lambda *_: (200, f"data: {json.dumps(event)}\n".encode())) as server:
        urls = [f"--{one}=http://{server}" for one in ("single", "pair")]
        shown = call("accept", *urls, "--prompts=prompts", status=2)
    assert "pair to single: 100.0%, of 1 prompts" in shown
    run("-c", "import torch", cwd=clean, site=clean, status=1)
    call("plan", "--prefill", "x", "--decode", "x", status=2)
    said = call("doctor", status=1)
    assert "sglang_mixkv.plugin:register" in said
    assert re.search(r"^!! +sglang +none$", said, re.MULTILINE)
    assert said.endswith("\n1 problem, marked !!\n")


def test_every_imported_package_is_declared() -> None:
    """Environments with SGLang contain many more packages, so no other test would notice a missing
    dependency."""
    imported = set[str]()
    for node in (n for p in PACKAGE.rglob("*.py") for n in ast.walk(ast.parse(p.read_text()))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
    imported -= {*sys.stdlib_module_names, "sglang_mixkv"}
    of = metadata.packages_distributions()
    found = {canonicalize_name(n) for module in imported - BESIDE_SGLANG for n in of[module]}
    assert found == {Requirement(text).name for text in PROJECT["dependencies"]}


def test_every_error_code_is_in_troubleshooting() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    codes = {code for text in texts for code in re.findall(r"MIXKV-[A-Z]+-\d\d", text)}
    assert codes == {*re.findall(r"(?m)^### (MIXKV-\S+)", page)}


def test_version_numbers_agree() -> None:
    assert PROJECT["version"] == __version__
    assert f"**Status:** {__version__}, " in (ROOT / "README.md").read_text()
    assert PROJECT["optional-dependencies"]["sglang"] == [f"sglang=={SUPPORTED_SGLANG[-1]}"]
    assert f"lmsysorg/sglang:v{SUPPORTED_SGLANG[-1]}" in (ROOT / "docker/Dockerfile").read_text()
    done = subprocess.run(
        ["bash", "scripts/dist.sh", "refs/tags/v0.0.1"], cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 1
    assert f"the tag is v0.0.1, the version in pyproject.toml {__version__}" in done.stderr
