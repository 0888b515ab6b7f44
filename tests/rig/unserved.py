"""What the installed SGLang is refused with (engine/releases.py) cannot be tested on it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_mixkv.engine import releases
from sglang_mixkv.refusals import text_of


def skip_unserved(
    backend: str, algorithm: str = "", *, dcp: int = 1, host_cache: bool = False,
    compares: bool = False,
) -> None:  # fmt: skip
    args = SimpleNamespace(
        disaggregation_transfer_backend=backend, speculative_algorithm=algorithm, dcp_size=dcp,
        enable_hierarchical_cache=host_cache, disaggregation_enable_kv_checksum=compares,
    )  # fmt: skip
    for rule in releases.here().unserved.values():
        if rule[1](args):
            pytest.skip(text_of(rule))
