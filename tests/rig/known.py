"""The single server's answers to a crowd's prompts, and which other answers are ties with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import takewhile

import requests

from mixkv_demo.pair import request_body
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import Deployment, single
from sglang_mixkv.tools.client import REQUEST_TIMEOUT_S, Answer, generate, post

TIE, TOP = 0.07, 20
"""Two logits of bfloat16 that are so close may change places with the rows of a batch. Of others,
among the TOP, the single server has to show that sums in another order move them as far."""

Prompt = list[int]


def parts_at(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two answers begin with alike."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))


class Known:
    """The single server, and what it answered. `of_tp_2` starts another one: the sums of a pair's
    side of TP 2 are its sums."""

    def __init__(self, server: Deployment, of_tp_2: Callable[[], Deployment]) -> None:
        self._url = server.url
        self._of_tp_2 = cache(of_tp_2)
        self._answers = dict[tuple[int, ...], Answer]()

    def learn(self, prompts: Iterable[Prompt]) -> None:
        new = [p for p in prompts if tuple(p) not in self._answers]
        with ThreadPoolExecutor(8) as pool:
            for prompt, answer in zip(new, pool.map(self._ask, new), strict=True):
                self._answers[tuple(prompt)] = answer

    def answer(self, prompt: Prompt) -> Answer:
        return self._answers[tuple(prompt)]

    def _ask(self, prompt: Prompt) -> Answer:
        return generate(self._url, request_body(prompt))

    def is_tie(self, prompt: Prompt, other: Answer) -> bool:
        """Whether this is the single server's answer as well, but for ties: wherever they part they
        are close, and from there on it says the same."""
        own, most = self.answer(prompt).tokens, request_body(prompt)["sampling_params"]
        while (at := parts_at(own, other.tokens)) < min(len(own), len(other.tokens)):
            said = other.tokens[: at + 1]
            if not self._are_close([*prompt, *said[:-1]], own[at], said[-1]):
                return False
            rest = most | {"max_new_tokens": most["max_new_tokens"] - len(said)}
            own = said
            if rest["max_new_tokens"]:
                body = {"input_ids": [*prompt, *said], "sampling_params": rest}
                own = [*said, *generate(self._url, body).tokens]
        return len(own) == len(other.tokens)

    def _are_close(self, prompt: Prompt, token: int, other: int) -> bool:
        """No further apart than sums in bfloat16 move them: with what the cache has of the prompt,
        and with TP 2."""
        if abs(gap(self._url, prompt, token, other)) <= TIE:
            return True
        gaps = []
        for url in (self._url, self._of_tp_2().url):
            requests.post(f"{url}/flush_cache", timeout=REQUEST_TIMEOUT_S)
            gaps += [gap(url, prompt, token, other) for _ in range(2)]
        return min(map(abs, gaps)) <= max(gaps) - min(gaps) < math.inf


def gap(url: str, prompt: Prompt, token: int, other: int) -> float:
    """How much more likely one is than the other, as logprobs' difference; infinite where one is
    none of the first TOP."""
    body = {
        "input_ids": prompt, "return_logprob": True, "top_logprobs_num": TOP,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }  # fmt: skip
    top = post(f"{url}/generate", body).json()["meta_info"]["output_top_logprobs"][0]
    logprobs = {token: float(logprob) for logprob, token, *_ in top}
    if not {token, other} <= logprobs.keys():
        return math.inf
    return logprobs[token] - logprobs[other]


@contextmanager
def known_answers(pair: str = "mla") -> Iterator[Known]:
    with Fleet() as fleet, Fleet() as of_tp_2:
        yield Known(single(fleet, pair), lambda: single(of_tp_2, pair, ("--tp", "2")))
