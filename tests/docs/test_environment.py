"""scripts/env.sh never marks an incomplete environment as complete. A package index that rejects
every request makes the installation fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import venv
from pathlib import Path

import pytest
from rig.process.answers import serving

ROOT = Path(__file__).parents[2]
STAMP = ".mixkv-stamp"


@pytest.mark.parametrize(
    ("script", "status", "earlier"),
    [
        ("bash scripts/gpu-check.sh", 2, ""),  # status 1 would mean that a kernel is wrong
        ("bash scripts/demo.sh", 1, ".venv"),
        # as in docs/tools.md, then in a condition: bash ignores `set -e` in both cases
        ("source scripts/env.sh; exit $((3 * $?))", 3, ""),
        ("MIXKV_DEVICE=check; if source scripts/env.sh; then exit 9; else exit 3; fi", 3, ""),
    ],
)
def test_a_failed_step_leaves_no_stamp(
    script: str, status: int, earlier: str, tmp_path: Path
) -> None:
    """`earlier`: an environment made for another pyproject.toml, with its stamp. If the stamp
    remained, it would match again when that file is restored."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\necho 580.10\n")
    driver.chmod(0o755)
    if earlier:
        venv.create(tmp_path / earlier)
        (tmp_path / earlier / STAMP).write_text("of another\n")
    with serving(lambda *_: (403, b"no")) as address:
        index = f"http://{address}/simple"
        variables = {
            "PATH": f"{driver.parent}{os.pathsep}{os.environ['PATH']}",
            "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "PIP_NO_CACHE_DIR": "1",
            "UV_NO_CONFIG": "1", "UV_DEFAULT_INDEX": index, "UV_NO_CACHE": "1",
        }  # fmt: skip
        own = re.compile("PIP_|UV_|MIXKV_|PYTHON$|TRITON_INTERPRET$")
        inherited = {name: value for name, value in os.environ.items() if not own.match(name)}
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=inherited | variables, capture_output=True,
            text=True,
        )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    assert "installing" in done.stdout + done.stderr, done.stdout + done.stderr
    assert not list(tmp_path.glob(f".venv*/{STAMP}"))


SCRIPTS = [p for p in (ROOT / "scripts").glob("*.sh") if re.search("source .*/env", p.read_text())]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_installs_nothing(script: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    before = set(tmp_path.rglob("*"))
    command = ["bash", f"scripts/{script.name}", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    head = re.findall(r"^# (.*)", script.read_text().partition("set -")[0], re.M)
    assert (done.returncode, (done.stdout + done.stderr).splitlines()) == (0, head)
    assert set(tmp_path.rglob("*")) == before


def test_a_checkout_that_the_guest_cannot_see_is_rejected(tmp_path: Path) -> None:
    """If the checkout is in a folder that the QEMU guest cannot mount, the script reports that
    before it downloads a kernel."""
    if Path(os.path.realpath(tmp_path)).parts[1] not in ("tmp", "run"):
        pytest.skip("this machine's temporary folder is outside /tmp and /run")
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    venv.create(tmp_path / ".venv")
    ready = f"cat pyproject.toml scripts/env.sh scripts/overrides.txt | sha256sum > .venv/{STAMP}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("MIXKV_")}
    done = subprocess.run(
        ["bash", "-c", f"{ready} && bash scripts/rdma.sh"], cwd=tmp_path, env=env, text=True,
        capture_output=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (77, "")
    assert f"would not see {tmp_path}: move the checkout" in done.stderr
    assert not (tmp_path / ".rdma").exists()
