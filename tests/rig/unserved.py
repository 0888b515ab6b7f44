"""What the installed SGLang is refused with (engine/releases.py) cannot be tested on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_mixkv.engine import releases
from sglang_mixkv.refusals import text_of


def skip_unserved(algorithm: str, **flags: Any) -> None:
    """`flags`: other server arguments of the test's servers, of either side."""
    args = SimpleNamespace(speculative_algorithm=algorithm, **flags)
    for rule in releases.here().unserved.values():
        if rule[1](args):
            pytest.skip(text_of(rule))
