"""A drafter with a window needs only the rows in its window.

The first prompts end in the middle of an answer, so that the next tokens depend on rows inside the
window, while the prompt's first rows are outside. Decode's pool is poisoned, so that reading a row
that was not sent would lower the accept length.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mixkv_demo.client import accept_length
from mixkv_demo.launch import run_by
from mixkv_demo.pair import BOS, SEP, SYMBOLS
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import disaggregated, single

from .conftest import (
    DECODE_CACHE,
    NEEDED,
    PAGES,
    START_TIMEOUT,
    TP1,
    TP2,
    Case,
    answered,
    same,
)

POISONING = Path(__file__).with_name("corrupting.py")
pytestmark = [START_TIMEOUT, pytest.mark.full]


@pytest.mark.parametrize(
    ("pair", "length", "cache", "moved"),
    # Prompts have 162 and 82 tokens, windows 104 and 56, pages 16.
    [("mla", 96, (), 114), ("mla-dflash", 48, (), 66), ("mla", 96, DECODE_CACHE, 162)],
    ids=["eagle3", "dflash", "eagle3, decode's cache"],
)
def test_rows_outside_the_window_are_not_needed(
    pair: str, length: int, cache: tuple[str, ...], moved: int
) -> None:
    """Rows outside the window are neither sent nor read. With a prefix cache on decode all rows are
    sent, since a shorter prompt may reuse them."""
    source, half = random.Random(1), length // 2
    strings = [source.sample(SYMBOLS, length) for _ in range(4)]
    prompts = [[BOS, *one, SEP, *one[: length * 2 // 3]] for one in strings]
    prompts += [[BOS, *one[:half], *source.sample(one[half:], half), SEP] for one in strings]
    flags = ("--speculative-draft-window-size", str(length + 8), *PAGES)
    case = Case(f"{pair}, window of {length + 8}", TP2, (*TP1, *cache), pair, shared=flags)
    case.skip_unserved()
    with Fleet() as fleet:
        server = single(fleet, pair, flags)
        expected = [server.ask(prompt) for prompt in prompts]
    with Fleet() as fleet:
        poison = {"TEST_POISON_POOL": "1"}
        deployment = disaggregated(
            fleet, pair, case.topology(),
            decode=lambda decode: run_by(decode, POISONING, poison),
        )  # fmt: skip
        first, counted = answered(deployment, expected[:4], prompts[:4])
        answers, _ = answered(deployment, expected[4:], prompts[4:])
    same(first, expected[:4])
    same(answers, expected[4:])
    assert accept_length(expected[:4]) > 1.5
    assert counted[NEEDED] == 4 * moved * {"mla": 256, "mla-dflash": 512}[pair]
