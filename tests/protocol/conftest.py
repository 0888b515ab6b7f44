"""Every test of the ring needs SGLang, with the plugin loaded."""

from __future__ import annotations

import pytest
from rig.load import load_sglang


@pytest.fixture(scope="session", autouse=True)
def sglang_with_plugin() -> None:
    load_sglang()
