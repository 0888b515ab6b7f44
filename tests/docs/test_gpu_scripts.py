"""Scripts that need a GPU or its driver report which of them is missing, and install nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NONE = (
    "nvidia-smi finds no GPU: install NVIDIA's driver, r580 or later, or give the GPU to this "
    "container."
)
OLD = "CUDA 13 needs NVIDIA's driver r580 or later: found 570.86.10."


@pytest.mark.parametrize(("prints", "sentence"), [("", NONE), ("570.86.10", OLD)])
@pytest.mark.parametrize(
    ("command", "status"), [("scripts/demo.sh --device cuda", 1), ("scripts/gpu-check.sh", 2)]
)
def test_a_missing_gpu_or_an_old_driver_is_reported(
    command: str, status: int, prints: str, sentence: str, tmp_path: Path
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text(
        f"#!/bin/sh\necho '{prints or 'NVIDIA-SMI has failed'}'; exit {int(not prints)}\n"
    )
    driver.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        ["bash", *command.split()], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr == f"error: {sentence}\n"
