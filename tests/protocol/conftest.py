"""Import SGLang once, with the plugin loaded, before any rank is forked."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from sglang_mixkv import cpu

os.environ.update(cpu.launch_env())
os.environ.update(CUDA_VISIBLE_DEVICES="", MC_LOG_LEVEL="ERROR", GLOG_logtostderr="1")
for folder in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="session", autouse=True)
def sglang_with_plugin() -> None:
    load_sglang()


def load_sglang() -> None:
    """Import what the ranks need; the scripts that run the ring call it too."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for module in (
        "sglang.srt.disaggregation.mooncake",
        "sglang.srt.disaggregation.decode",
        "sglang_mixkv.engine.mooncake",
    ):
        importlib.import_module(module)
