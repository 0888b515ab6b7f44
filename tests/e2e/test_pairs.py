"""Pairs of real servers with mixkv do what the single server does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_mixkv.tools.pair import accept_length, prompts

from .conftest import START_TIMEOUT, Measured

pytestmark = START_TIMEOUT


def test_output_is_the_single_servers(pd: Measured) -> None:
    assert [a.tokens for a in pd.answers] == [a.tokens for a in pd.reference]


def test_accept_length_is_the_single_servers(pd: Measured) -> None:
    assert accept_length(pd.answers) == pytest.approx(accept_length(pd.reference), rel=0.02)


def test_no_draft_byte_is_missing_or_sent_twice(pd: Measured) -> None:
    assert pd.draft is not None
    assert pd.draft.sent == pd.draft.needed > 0


def test_requests_side_by_side_do_not_disturb_each_other(pd: Measured) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(pd.deployment.ask, prompts()))
    assert [a.tokens for a in answers] == [a.tokens for a in pd.reference]
    assert accept_length(answers) == pytest.approx(accept_length(pd.reference), rel=0.02)
