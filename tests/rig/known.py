"""The single server's answers to a crowd's prompts, and which other answers are ties with them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from mixkv_demo.pair import ask
from sglang_mixkv.tools.client import Answer, post

TIE = 2.0
"""How much less likely than the likeliest token one may be, as logprobs: sums in bfloat16 change
with the rows of a batch, with what the cache has of a prompt, and with TP. Where a target has read
other bytes, its symbols are out of the question."""

Prompt = list[int]


class Known:
    """The single server's URL, and what it answered."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._answers = dict[tuple[int, ...], Answer]()

    def learn(self, prompts: Iterable[Prompt]) -> None:
        new = [p for p in prompts if tuple(p) not in self._answers]
        with ThreadPoolExecutor(8) as pool:
            for prompt, answer in zip(new, pool.map(self._ask, new), strict=True):
                self._answers[tuple(prompt)] = answer

    def answer(self, prompt: Prompt) -> Answer:
        return self._answers[tuple(prompt)]

    def _ask(self, prompt: Prompt) -> Answer:
        return ask(self._url, prompt)

    def is_tie(self, prompt: Prompt, other: Answer) -> bool:
        """Whether the single server, behind each beginning of this answer, finds its next token
        nearly as likely as the likeliest one."""
        if len(other.tokens) != len(self.answer(prompt).tokens):
            return False
        body = {
            "input_ids": [*prompt, *other.tokens], "return_logprob": True, "top_logprobs_num": 1,
            "logprob_start_len": len(prompt) - 1, "sampling_params": {"max_new_tokens": 1},
        }  # fmt: skip
        meta = post(f"{self._url}/generate", body).json()["meta_info"]
        own, top = (meta[f"input_{kind}_logprobs"][1:] for kind in ("token", "top"))
        return all(
            best[0][0] - logprob <= TIE for (logprob, *_), best in zip(own, top, strict=True)
        )
