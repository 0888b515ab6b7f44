"""The detector detects: without mixkv the same servers lose nearly every draft."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang_mixkv.tools.launch import Topology
from sglang_mixkv.tools.pair import Answer, accept_length, prompts
from sglang_mixkv.tools.processes import Fleet
from sglang_mixkv.tools.servers import disaggregated

from .conftest import START_TIMEOUT

pytestmark = START_TIMEOUT

COLLAPSED = 1.3
GOOD = 3.3


@pytest.mark.full
def test_stock_collapses_while_its_output_is_right(
    reference: Callable[[str], list[Answer]],
) -> None:
    expected = reference("mla")
    with Fleet() as fleet:
        deployment = disaggregated(fleet, "mla", Topology(("--tp", "2"), ("--tp", "1")))
        answers = [deployment.ask(prompt) for prompt in prompts()]
    assert accept_length(expected) > GOOD
    assert accept_length(answers) < COLLAPSED
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
