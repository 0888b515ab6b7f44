"""Tests that need a GPU: `python -m pytest tests/gpu`.

Each test runs on a GPU. To test the test itself, it also runs on the CPU with smaller sizes. Each
test has a control, in which the same check must fail without the protective step. Only
test_engine.py needs SGLang. One of its cases runs on the CPU engine with --full.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("gpu").addoption
    add("--figures", type=Path, metavar="FILE", help="tests/gpu: write the figures here as JSON")
    add("--peer-gpu", type=int, default=0, metavar="N", help="the GPU of the process that packs")


def no_cuda() -> str:
    """Return why no CUDA device can be used, or ""."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else "there is no NVIDIA GPU, or no driver"


@pytest.fixture
def cuda() -> torch.device:
    if why := no_cuda():
        pytest.skip(f"no CUDA device: {why}")
    return torch.device("cuda", 0)


@pytest.fixture(params=["cuda", "cpu"])
def device(request: pytest.FixtureRequest) -> Any:
    torch.set_num_threads(1)
    return torch.device("cpu") if request.param == "cpu" else request.getfixturevalue("cuda")


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> Iterator[Callable[..., None]]:
    """Return a function that records figures of the current test. The figures are written to the
    file of --figures even if tests fail."""
    found: list[dict[str, Any]] = []
    yield lambda **record: found.append({"test": os.environ["PYTEST_CURRENT_TEST"], **record})
    if file := pytestconfig.getoption("--figures", None):
        gpu = "" if no_cuda() else torch.cuda.get_device_name()
        machine = {"gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda}
        file.write_text(json.dumps({"machine": machine, "figures": found}, indent=1) + "\n")
