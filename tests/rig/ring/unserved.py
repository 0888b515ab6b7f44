"""Skip tests of settings that the plugin refuses with the installed SGLang (engine/releases.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_mixkv.engine import releases


def skip_unserved(algorithm: str, **flags: Any) -> None:
    """Skip the test if the plugin refuses a server with this algorithm and these arguments."""
    args = SimpleNamespace(speculative_algorithm=algorithm, **flags)
    for rule in releases.rules()[len(releases.ARGUMENT_RULES) :]:
        if rule.applies(args):
            pytest.skip(str(rule))
