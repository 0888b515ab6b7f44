"""Pairs of real servers with mixkv do what the single server does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_mixkv.demo.pair import cousins, prompts
from sglang_mixkv.tools.client import Answer, accept_length

from .conftest import START_TIMEOUT, Measured, record

pytestmark = START_TIMEOUT


def same(answers: list[Answer], reference: list[Answer]) -> None:
    """Every token as the single server's, and the accept length within 2 %."""
    assert [a.tokens for a in answers] == [a.tokens for a in reference]
    assert accept_length(answers) == pytest.approx(accept_length(reference), rel=0.02)


def test_output_and_accept_length_are_the_single_servers(pd: Measured) -> None:
    same(pd.answers, pd.reference.fixed)


def test_no_draft_byte_is_missing_or_sent_twice(pd: Measured) -> None:
    assert pd.draft is not None
    assert pd.draft.sent == pd.draft.needed > 0


def test_repeated_prompts(pd: Measured) -> None:
    """The prefill finds them in its radix cache, unless they come to another of its DP ranks; a
    decode server with one has most pages too."""
    before = pd.draft_bytes()
    answers = [pd.deployment.ask(prompt) for prompt in prompts(pair=pd.case.pair)]
    record(f"{pd.case.name}, again", answers, pd.reference.fixed)
    same(answers, pd.reference.fixed)
    draft = pd.draft_bytes().since(before)
    assert draft.sent == draft.needed > 0
    cached = [answer.cached_tokens > 0 for answer in answers]
    assert all(cached) or not pd.case.prefill_ranks_share
    assert (draft.needed < before.needed / 2) == pd.case.decode_caches


def test_eight_requests_at_once_with_cached_prefixes(pd: Measured) -> None:
    """Their first halves are in the caches, their second halves are new."""
    before = pd.draft_bytes()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(pd.deployment.ask, cousins(pd.case.pair)))
    record(f"{pd.case.name}, 8 at once", answers, pd.reference.cousins)
    same(answers, pd.reference.cousins)
    draft = pd.draft_bytes().since(before)
    assert draft.sent == draft.needed > 0
