"""SGLang does what the draft channel relies on; `doctor --selftest` compares the same."""

from __future__ import annotations

import pytest

from sglang_mixkv.engine.behaviour import BEHAVIOURS, Behaviour, problems

pytestmark = pytest.mark.mooncake_only


@pytest.mark.parametrize("one", BEHAVIOURS, ids=lambda one: one.function.partition(":")[2])
def test_sglang_does_so(one: Behaviour) -> None:
    assert list(problems([one])) == []


@pytest.mark.parametrize(
    ("function", "pattern", "words"),
    [
        ("sglang.srt.disaggregation.utils:_all_reduce_polls", "ReduceOp.MAX", "does not have"),
        ("sglang.srt.disaggregation.utils:no_such_function", ".", "cannot be read"),
        ("sglang.srt.no_such_module:f", ".", "cannot be read"),
    ],
)
def test_what_it_does_otherwise_is_named(function: str, pattern: str, words: str) -> None:
    (problem,) = problems([Behaviour("it is so", function, pattern)])
    assert problem.startswith(f"{function}: expected that it is so; ")
    assert words in problem
