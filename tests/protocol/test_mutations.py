"""Each defect in the threads and I/O is found by its test, which the code itself passes.

The tests run in a tree like this one, with a copy of the package that has the defect.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from .mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
BESIDE = ("mixkv_cpu", "mixkv_demo", "pyproject.toml", "scripts", "tests")
LIMIT_S = 550  # less than pytest's own
QUICK = ("a thread that was woken never sleeps again", "rows are written behind a closed gate")
ALL = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.full, id=name)
    for name in MUTATIONS
]


@pytest.fixture(scope="session", autouse=True)
def sglang_with_plugin() -> None:
    """Of the ring's conftest: here SGLang is imported by other processes."""


@pytest.fixture
def tree() -> Iterator[Path]:
    """In a folder with a short name, as the names of sockets in it are."""
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        root = Path(folder)
        for name in BESIDE:
            (root / name).symlink_to(ROOT / name)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "sglang_mixkv", root / "sglang_mixkv", ignore=ignored)
        yield root


def run(tree: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """What pytest says of these tests in that tree."""
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    env["TMPDIR"] = str(tree)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--full"]
    with subprocess.Popen(
        [*command, *tests], cwd=tree, env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, said)


def texts(mutation: Mutation) -> int:
    return (ROOT / "sglang_mixkv" / mutation.file).read_text().count(mutation.text)


def test_each_defect_fits_the_code() -> None:
    assert [name for name, one in MUTATIONS.items() if texts(one) != 1] == []


@pytest.mark.parametrize("name", ALL)
def test_the_defect_is_found(name: str, tree: Path) -> None:
    mutation = MUTATIONS[name]
    file = tree / "sglang_mixkv" / mutation.file
    file.write_text(file.read_text().replace(mutation.text, mutation.replacement))
    done = run(tree, mutation.test)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, f"not found:\n{done.stdout[-4000:]}"
    assert " failed" in done.stdout.splitlines()[-1], done.stdout[-4000:]


def nodes_of(names: Iterable[str], folder: str = "") -> list[str]:
    """Each once."""
    tests = dict.fromkeys(MUTATIONS[name].test for name in names)
    return [test for test in tests if test.startswith(folder)]


@pytest.mark.parametrize(
    "tests",
    [
        pytest.param(nodes_of(QUICK), id="quick"),
        pytest.param(nodes_of(MUTATIONS, "tests/pure"), id="pure", marks=pytest.mark.full),
        pytest.param(nodes_of(MUTATIONS, "tests/protocol"), id="protocol", marks=pytest.mark.full),
    ],
)
def test_the_code_itself_has_none_of_them(tests: list[str], tree: Path) -> None:
    done = run(tree, *tests)
    assert done.returncode == pytest.ExitCode.OK, done.stdout[-4000:]
