"""What a server is asked, and what its answers say of speculation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import requests

REQUEST_TIMEOUT_S = 180.0


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


def generate(url: str, body: dict[str, Any], timeout: float = REQUEST_TIMEOUT_S) -> Answer:
    """One request to a server or router; :class:`RequestFailed` says why there is no answer."""
    begin = time.monotonic()
    try:
        response = post(f"{url}/generate", body, timeout)
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
