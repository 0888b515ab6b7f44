"""Import SGLang once, with the plugin loaded, before any rank is forked."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.update(
    OMP_NUM_THREADS="1",
    MC_FORCE_TCP="1",
    MC_LOG_LEVEL="ERROR",
    MC_TCP_ENABLE_CONNECTION_POOL="1",
    MOONCAKE_PROTOCOL="tcp",
    SGLANG_HOST_IP="127.0.0.1",
    SGLANG_USE_CPU_ENGINE="1",
    CUDA_VISIBLE_DEVICES="",
)
sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="session", autouse=True)
def sglang_with_plugin() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.srt.disaggregation.mooncake
    import sglang_mixkv.managers  # noqa: F401
