"""The plugin on one side only."""

from __future__ import annotations

import pytest

from mixkv_demo.launch import Topology
from mixkv_demo.pair import prompts
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import disaggregated
from sglang_mixkv.tools.client import RequestFailed, accept_length

from .conftest import ENABLE, START_TIMEOUT, TP1, TP2, Reference

pytestmark = [START_TIMEOUT, pytest.mark.full]


def test_a_stock_prefill_is_refused_in_words() -> None:
    with Fleet() as fleet:
        deployment = disaggregated(fleet, "mla", Topology(TP2, TP1, mixkv_decode=ENABLE))
        with pytest.raises(RequestFailed, match="does not run sglang-mixkv"):
            deployment.ask(prompts()[0])


def test_a_stock_decode_answers_rightly_with_cold_drafters(reference: Reference) -> None:
    expected = reference("mla", ()).fixed
    with Fleet() as fleet:
        deployment = disaggregated(fleet, "mla", Topology(TP2, TP1, mixkv_prefill=ENABLE))
        answers = [deployment.ask(prompt) for prompt in prompts()]
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    assert accept_length(answers) < 0.9 * accept_length(expected)
