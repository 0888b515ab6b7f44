"""Which answers a crowd's judge takes for the single server's."""

from __future__ import annotations

from typing import Any

import pytest
from rig import known as of_single

from mixkv_demo.servers import Deployment
from sglang_mixkv.tools.client import Answer

PROMPT = [1, 5, 6, 7, 8, 2]
CONTINUES = {(): (5, 6, 7, 8, 2), (5, 9): (7, 8, 2), (5, 6, 9): (8, 2)}
"""What the single server says after so much of an answer."""


def answer(*tokens: int) -> Answer:
    return Answer(tokens, 1, (), 0.0)


class Stub:
    url = "single"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> of_single.Known:
    def generate(url: str, body: dict[str, Any], *_: Any) -> Answer:
        return answer(*CONTINUES[tuple(body["input_ids"][len(PROMPT) :])])

    monkeypatch.setattr(of_single, "generate", generate)
    monkeypatch.setattr(of_single.requests, "post", lambda *_, **__: None)
    single: Any = Stub()
    of_tp_2: Deployment = single
    made = of_single.Known(single, lambda: of_tp_2)
    made.learn([PROMPT])
    return made


@pytest.mark.parametrize(
    ("gaps", "tokens", "tie"),
    [
        ([0.05], (5, 9, 7, 8, 2), True),
        ([0.05], (5, 9, 7, 3, 2), False),
        ([0.05, 0.05], (5, 9, 7, 8), False),
        ([1.5, 1.5, 1.9, 0.7, 2.0], (5, 9, 7, 8, 2), True),
        ([9.5, 9.5, 9.9, 8.7, 9.0], (5, 9, 7, 8, 2), False),
        ([float("inf")] * 5, (5, 9, 7, 8, 2), False),
    ],
    ids=["close", "another rest", "shorter", "moves as far", "far", "not among the first"],
)
def test_an_answer_is_a_tie(
    known: of_single.Known,
    monkeypatch: pytest.MonkeyPatch,
    gaps: list[float],
    tokens: Any,
    tie: bool,
) -> None:
    """`gaps`: what is measured where they part; far apart at all other places."""
    left = iter(gaps)
    monkeypatch.setattr(of_single, "gap", lambda *_: next(left, 10.0))
    assert known.is_tie(PROMPT, answer(*tokens)) is tie
