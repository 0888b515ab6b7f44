"""Skips what the installed SGLang is refused with (engine/releases.py): it cannot be tested."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_mixkv.engine import releases


def skip_unserved(algorithm: str, **flags: Any) -> None:
    """`flags`: further server arguments of the test's servers, on either side."""
    args = SimpleNamespace(speculative_algorithm=algorithm, **flags)
    for rule in releases.rules()[len(releases.ARGUMENT_RULES) :]:
        if rule.applies(args):
            pytest.skip(str(rule))
