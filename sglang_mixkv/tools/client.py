"""What a server is asked, and what its answers say of speculation."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import requests

from sglang_mixkv.config import API_KEY_ENV

REQUEST_TIMEOUT_S = 180.0

WHY = {
    "Connection refused": "nothing listens there. Is the server up, and is it that port?",
    "Failed to resolve": "no host has that name",
    "No route to host": "no route leads there: a firewall, or the wrong host",
    "Network is unreachable": "no route leads there: a firewall, or the wrong host",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is unknown: set REQUESTS_CA_BUNDLE",
    "SSL": "it has no TLS: try http://",
    "Connection reset": "it closed the connection",
    "Remote end closed": "it closed the connection",
    "Invalid URL": "that is no URL: expected http://HOST:PORT",
    "No connection adapters": "that is no URL: expected http://HOST:PORT",
    "Failed to parse": "that is no URL: expected http://HOST:PORT",
}
"""What requests says of a failure -> what that means. The first that fits."""


@dataclass(frozen=True)
class Answer:
    """A server's answer to one prompt. `cached_tokens`: of the prompt, found in a radix cache;
    `host_tokens`: of these, restored from its host tier. `drafted`: tokens drafted a verify
    round. `dp_rank`: who decoded it, None where the server does not say. `first_token_s`: when
    the first token came, of `stream` alone."""

    tokens: tuple[int, ...]
    verify_rounds: int
    rounds_by_right_drafts: tuple[int, ...]
    seconds: float
    cached_tokens: int = 0
    drafted: int = 0
    host_tokens: int = 0
    dp_rank: int | None = None
    first_token_s: float = 0.0


class RequestFailed(RuntimeError):
    """A server answered with an error, or not at all."""


class NoAnswer(RequestFailed):
    """A server did not answer in time."""


@contextmanager
def session() -> Iterator[requests.Session]:
    """Past any proxy of the environment, with its certificates, and with the servers' key."""
    with requests.Session() as made:
        made.trust_env = False
        made.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
        if key := os.environ.get(API_KEY_ENV):
            made.headers["Authorization"] = f"Bearer {key}"
        yield made


@contextmanager
def _asking(url: str, timeout: float) -> Iterator[None]:
    """What goes wrong, as RequestFailed."""
    try:
        yield
    except requests.RequestException as error:
        # Of a stream, requests has a timeout for a broken connection.
        if isinstance(error, requests.Timeout) or "Read timed out" in str(error):
            raise NoAnswer(f"no answer from {url} within {timeout:.0f} s") from error
        raise RequestFailed(f"no answer from {url}: {_why(error)}") from error


def _why(error: requests.RequestException) -> str:
    """In words: requests' own text names its pool and repeats the URL."""
    text = str(error)
    return next((words for sign, words in WHY.items() if sign in text), text)


def get(url: str, timeout: float = REQUEST_TIMEOUT_S) -> requests.Response:
    """A page. Raises RequestFailed."""
    with _asking(url, timeout), session() as made:
        response = made.get(url, timeout=timeout)
    _check(url, response)
    return response


def post(url: str, body: dict[str, Any], timeout: float = REQUEST_TIMEOUT_S) -> requests.Response:
    """One request to a server."""
    with session() as made:
        return made.post(url, json=body, timeout=timeout)


def ask_for(
    url: str, body: dict[str, Any], timeout: float = REQUEST_TIMEOUT_S
) -> requests.Response:
    """As `post`. Raises RequestFailed where there is no answer, or an error."""
    with _asking(url, timeout):
        response = post(url, body, timeout)
    _check(url, response)
    return response


def generate(url: str, body: dict[str, Any], timeout: float = REQUEST_TIMEOUT_S) -> Answer:
    """One request to a server or router; :class:`RequestFailed` says why there is no answer."""
    begin = time.monotonic()
    response = ask_for(f"{url}/generate", body, timeout)
    return parse_answer(response.json(), time.monotonic() - begin)


def stream(url: str, body: dict[str, Any], timeout: float = REQUEST_TIMEOUT_S) -> Answer:
    """As `generate`, token by token. `timeout`: of the first one, and between two of them."""
    begin = time.monotonic()
    with _asking(f"{url}/generate", timeout), session() as made:
        response = made.post(
            f"{url}/generate", json={**body, "stream": True}, timeout=timeout, stream=True
        )
        events = Events(url)
        with response:
            _check(url, response)
            for line in response.iter_lines():
                events.add(line)
    answer = parse_answer(events.reply(), time.monotonic() - begin)
    return replace(answer, first_token_s=events.first - begin)


def _check(url: str, response: requests.Response) -> None:
    if response.status_code != requests.codes.ok:
        text = " ".join(response.text[:2000].split())
        if response.status_code == requests.codes.unauthorized:
            text += f" (put the server's --api-key into {API_KEY_ENV})"
        raise RequestFailed(f"HTTP {response.status_code} from {url}: {text}")


class Events:
    """The events of one stream. One has all tokens so far, or, from a server with
    --incremental-streaming-output, the new ones."""

    def __init__(self, url: str) -> None:
        self._url, self._last, self._other = url, b"", b""
        self._number, self._new_only, self._tokens = 0, False, list[int]()
        self.first = 0.0

    def add(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            self._other = self._other or line[:200]  # the reason, where there is no event
            return
        if line.endswith(b"[DONE]"):
            return
        self._number += 1
        self._last = line.removeprefix(b"data:")
        if self._number == 1:
            self.first = time.monotonic()
        if self._number <= 2 or self._new_only:
            self._look(self._event())

    def _look(self, event: dict[str, Any]) -> None:
        """The second event shows which kind they are."""
        tokens = event["output_ids"]
        if self._number == 2:
            self._new_only = event["meta_info"]["completion_tokens"] > len(tokens)
        self._tokens = [*self._tokens, *tokens] if self._new_only else tokens

    def _event(self) -> dict[str, Any]:
        if not self._last:
            text = self._other.decode(errors="replace")
            raise RequestFailed(f"no answer from {self._url}: it sent no event, but {text!r}")
        try:
            event: dict[str, Any] = json.loads(self._last)
        except ValueError:
            raise RequestFailed(f"{self._url} sent {self._last[:200]!r}") from None
        if isinstance(event, dict) and "error" in event:
            raise RequestFailed(f"{self._url}: {event['error']}")
        _check_shape(event)
        return event

    def reply(self) -> dict[str, Any]:
        """The last event, with all tokens."""
        event = self._event()
        tokens = self._tokens if self._new_only else event["output_ids"]
        info = event["meta_info"]
        if not info.get("finish_reason") or info.get("completion_tokens") != len(tokens):
            raise RequestFailed(f"the stream of {self._url} broke off after {len(tokens)} tokens")
        return event | {"output_ids": tokens}


def _check_shape(reply: Any) -> None:
    if not isinstance(reply, dict) or not {"meta_info", "output_ids"} <= reply.keys():
        raise RequestFailed(f"expected SGLang's meta_info and output_ids, got {str(reply)[:200]}")


def parse_answer(reply: dict[str, Any], seconds: float) -> Answer:
    """An answer from SGLang's reply to ``/generate``. Raises RequestFailed."""
    _check_shape(reply)
    info = reply["meta_info"]
    if (info.get("finish_reason") or {}).get("type") == "abort":
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
        dp_rank=info.get("dp_rank"),
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
