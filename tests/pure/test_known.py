"""Which answers a crowd's judge takes for the single server's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rig import known as of_single
from rig.answers import serving

from sglang_mixkv.tools.client import Answer

PROMPT = [1, 5, 6, 2]


def answer(*tokens: int) -> Answer:
    return Answer(tokens, 1, (), 0.0)


@pytest.mark.parametrize(
    ("tokens", "gaps", "tie"),
    [((5, 9, 2), (0, 1.5, 0), True), ((5, 9, 2), (0, 1.5, 9.0), False), ((5, 9), (0, 0), False)],
    ids=["close", "another rest", "shorter"],
)
def test_an_answer_is_a_tie(tokens: Any, gaps: Any, tie: bool) -> None:
    """`gaps`: between the answer's token and the likeliest, at each place."""

    def meta(_: str, body: Any, *__: Any) -> tuple[int, bytes]:
        assert body["input_ids"] == [*PROMPT, *tokens]
        own = [[None, 2, None], *([-gap - 0.1, 9, None] for gap in gaps)]
        top = [None, *([[-0.1, 7, None]] for _ in gaps)]
        logprobs = {"input_token_logprobs": own, "input_top_logprobs": top}
        return 200, msgspec.json.encode({"meta_info": logprobs})

    with serving(meta) as address:
        known = of_single.Known(f"http://{address}")
        known._answers[tuple(PROMPT)] = answer(5, 6, 2)
        assert known.is_tie(PROMPT, answer(*tokens)) is tie
