"""The small trained pairs and the copy task: what to ask a server, and what its answers say.

The task is ``<bos> A <sep>`` -> ``A <sep>`` with a string A of distinct symbols. The drafter can
know A from its own KV of the prompt only, and was trained so that every single KV head of the
prompt matters. It is a detector of wrong draft bytes, not a measure of what production drafters
lose to them.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import requests

TARGETS = ("mla", "gqa")
"""The shipped targets, by their attention."""

DRAFTERS = ("eagle3", "dflash", "dspark")
"""What drafters there are, the last two for the MLA target alone."""

DRAFT_STEPS = 3
"""Tokens drafted a verify round."""

PROMPTS = 8
"""How many fixed prompts there are."""

BOS, SEP = 1, 2
SYMBOLS = range(4, 256)
REQUEST_TIMEOUT_S = 180.0

_MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Pair:
    """A target and a drafter, as folders of ``models/``. ``steps``: flags on how it drafts, where
    the drafter's config.json does not say. ``lengths``: symbols in each of its prompts."""

    target: str
    drafter: str
    algorithm: str
    steps: tuple[str, ...]
    lengths: tuple[int, ...]


def _eagle3(target: str) -> Pair:
    steps = {
        "--speculative-num-steps": DRAFT_STEPS,
        "--speculative-eagle-topk": 1,
        "--speculative-num-draft-tokens": DRAFT_STEPS + 1,
    }
    flags = tuple(str(part) for item in steps.items() for part in item)
    lengths = (24, 24, 48, 48, 96, 96, 160, 200)
    return Pair(f"{target}/target", f"{target}/drafter", "EAGLE3", flags, lengths)


def _block(name: str) -> Pair:
    """These two know strings of one length only."""
    return Pair("mla/target", f"mla/{name}", name.upper(), (), (48,))


PAIRS = {
    "mla": _eagle3("mla"),
    "gqa": _eagle3("gqa"),
    "mla-dflash": _block("dflash"),
    "mla-dspark": _block("dspark"),
}
"""The shipped pairs by name."""


def pair_name(target: str, drafter: str) -> str:
    """The name of a target with a drafter, whether or not there is such a pair."""
    return target if drafter == DRAFTERS[0] else f"{target}-{drafter}"


def model_path(pair: str) -> Path:
    """The folder of a pair's target, with its tokenizer."""
    return _MODELS / PAIRS[pair].target


def model_flags(pair: str, speculative: bool = True) -> list[str]:
    """The part of a launch line that names the models and switches speculation on."""
    target = ["--model-path", str(model_path(pair))]
    if not speculative:
        return target
    chosen = PAIRS[pair]
    drafter = ["--speculative-draft-model-path", str(_MODELS / chosen.drafter)]
    return [*target, "--speculative-algorithm", chosen.algorithm, *drafter, *chosen.steps]


def prompts(count: int = PROMPTS, pair: str = "mla") -> list[list[int]]:
    """The first ``count`` of a pair's prompts as token ids, the same on every machine."""
    source = random.Random(2024)
    lengths = islice(cycle(PAIRS[pair].lengths), count)
    return [[BOS, *source.sample(SYMBOLS, length), SEP] for length in lengths]


def cousins(pair: str = "mla") -> list[list[int]]:
    """For each fixed prompt one with its first half, and its second half shuffled."""
    source = random.Random(2025)
    found = []
    for prompt in prompts(pair=pair):
        half = len(prompt) // 2
        found.append([*prompt[:half], *source.sample(prompt[half:-1], len(prompt) - 1 - half), SEP])
    return found


@dataclass(frozen=True)
class Answer:
    """What a server said to one prompt. `cached_tokens`: of the prompt, found in a radix cache;
    `host_tokens`: of these, restored from its host tier. `drafted`: tokens drafted a verify
    round."""

    tokens: tuple[int, ...]
    verify_rounds: int
    rounds_by_right_drafts: tuple[int, ...]
    seconds: float
    cached_tokens: int = 0
    drafted: int = 0
    host_tokens: int = 0


class RequestFailed(RuntimeError):
    """A server answered with an error, or not at all."""


class NoAnswer(RequestFailed):
    """A server did not answer in time."""


def post(url: str, body: dict[str, Any], timeout: float = REQUEST_TIMEOUT_S) -> requests.Response:
    """One request to a local server, past any proxy of the environment."""
    with requests.Session() as session:
        session.trust_env = False
        return session.post(url, json=body, timeout=timeout)


def request_body(prompt: list[int]) -> dict[str, Any]:
    """The greedy request for one prompt: as many tokens as the right answer has."""
    limits = {"max_new_tokens": len(prompt) - 1, "temperature": 0}
    return {"input_ids": prompt, "sampling_params": limits}


def ask(url: str, prompt: list[int], timeout: float = REQUEST_TIMEOUT_S) -> Answer:
    """Send one prompt to a server or router; :class:`RequestFailed` says why there is no answer."""
    begin = time.monotonic()
    try:
        response = post(f"{url}/generate", request_body(prompt), timeout)
    except requests.Timeout as error:
        raise NoAnswer(f"no answer from {url} within {timeout:.0f} s") from error
    except requests.RequestException as error:
        raise RequestFailed(f"no answer from {url}: {error}") from error
    if response.status_code != requests.codes.ok:
        raise RequestFailed(f"HTTP {response.status_code} from {url}: {response.text}")
    return parse_answer(response.json(), time.monotonic() - begin)


def parse_answer(reply: dict[str, Any], seconds: float) -> Answer:
    """An answer from SGLang's reply to ``/generate``."""
    info = reply["meta_info"]
    if info.get("finish_reason", {}).get("type") == "abort":
        raise RequestFailed(f"the request was aborted: {info['finish_reason']}")
    rounds = info.get("spec_verify_ct") or 0
    return Answer(
        tokens=tuple(reply["output_ids"]),
        verify_rounds=rounds,
        rounds_by_right_drafts=tuple(info.get("spec_correct_drafts_histogram") or ()),
        seconds=seconds,
        cached_tokens=info.get("cached_tokens") or 0,
        drafted=(info.get("spec_num_proposed_drafts") or 0) // max(1, rounds),
        host_tokens=(info.get("cached_tokens_details") or {}).get("host", 0),
    )


def accept_length(answers: list[Answer]) -> float:
    """Completion tokens a verify round, over all prompts; 0 without any round."""
    rounds = sum(answer.verify_rounds for answer in answers)
    return sum(len(answer.tokens) for answer in answers) / rounds if rounds else 0.0


def longest_draft(answers: list[Answer]) -> int:
    """Tokens of the longest draft in a round, as the servers say, or as were right."""
    return max((max(a.drafted, len(a.rounds_by_right_drafts) - 1) for a in answers), default=0)


def acceptance_by_position(answers: list[Answer], steps: int) -> list[float]:
    """For i = 1 .. steps: the share of verify rounds with at least i right drafts."""
    histograms = [answer.rounds_by_right_drafts for answer in answers]
    rounds = sum(map(sum, histograms))
    return [
        sum(sum(histogram[i:]) for histogram in histograms) / rounds if rounds else 0.0
        for i in range(1, steps + 1)
    ]
