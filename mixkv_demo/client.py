"""Requests to the demo's servers, and the acceptance and cache hits in their answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import requests

from sglang_mixkv.tools import client
from sglang_mixkv.tools.client import REQUEST_TIMEOUT_S, RequestFailed, request


class Answer(client.Answer, frozen=True):
    """`seconds`: the request's duration. `cached_tokens`: prompt tokens found in a radix cache;
    `host_tokens`, `storage_tokens`: how many of them came from its host tier and from storage."""

    seconds: float = 0.0
    cached_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0


class NoAnswer(RequestFailed):
    """A server did not answer in time."""


def post(url: str, body: dict[str, Any], timeout: float = REQUEST_TIMEOUT_S) -> requests.Response:
    """Send one request to a server, and return the response, whatever its status is."""
    with client.session() as made:
        return made.post(url, json=body, timeout=timeout)


def generate(url: str, body: dict[str, Any], timeout: float = REQUEST_TIMEOUT_S) -> Answer:
    """Send one request to a server or router. Raises RequestFailed; NoAnswer after a timeout."""
    begin = time.monotonic()
    try:
        reply = request("POST", f"{url}/generate", timeout, json=body)
    except RequestFailed as error:
        cause = error.__cause__
        if isinstance(cause, requests.Timeout) or "Read timed out" in str(cause):
            raise NoAnswer(str(error)) from error
        raise
    seconds = time.monotonic() - begin
    parsed = client.read_stream(url, [reply.content])
    info = reply.json()["meta_info"]
    details = info.get("cached_tokens_details") or {}
    return Answer(
        **msgspec.structs.asdict(parsed),
        seconds=seconds,
        cached_tokens=info.get("cached_tokens") or 0,
        host_tokens=details.get("host", 0),
        storage_tokens=details.get("storage", 0),
    )


def acceptance_by_position(answers: Sequence[client.Answer], steps: int) -> list[float]:
    """Return, for i = 1 .. steps, the share of verify rounds with at least i correct drafts."""
    histograms = [answer.rounds_by_right_drafts for answer in answers]
    rounds = sum(map(sum, histograms))
    return [
        sum(sum(histogram[i:]) for histogram in histograms) / rounds if rounds else 0.0
        for i in range(1, steps + 1)
    ]


def accept_length(answers: Sequence[client.Answer]) -> float:
    """Return completion tokens per verify round over all prompts; 0 if there was no round."""
    rounds = sum(answer.verify_rounds for answer in answers)
    return sum(len(answer.tokens) for answer in answers) / rounds if rounds else 0.0
