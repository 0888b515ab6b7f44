"""A restatement of SGLang's rule for which ranks contact each other, which
tests/pure/tools/test_plan.py compares with SGLang's code."""

from __future__ import annotations


def contacted(prefill_tp: int, decode_tp: int, rank: int) -> range:
    """Return the prefill ranks that a decode rank contacts. One attention-TP size divides the
    other."""
    ratio = max(1, prefill_tp // decode_tp)
    first = rank * prefill_tp // decode_tp
    return range(first, first + ratio)
