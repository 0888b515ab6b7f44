"""HTTP client of the commands."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import requests

from sglang_mixkv.config import API_KEY_ENV
from sglang_mixkv.tools import hidden, printable

REQUEST_TIMEOUT_S = 180.0


class Answer(msgspec.Struct, frozen=True):
    """A server's answer to one prompt. `drafted`: tokens drafted per verify round. `dp_rank`: the
    rank that decoded it; None if the server does not say."""

    tokens: tuple[int, ...]
    verify_rounds: int
    rounds_by_right_drafts: tuple[int, ...]
    drafted: int = 0
    dp_rank: int | None = None


class _Info(msgspec.Struct):
    completion_tokens: int = 0
    finish_reason: dict[str, Any] | None = None
    spec_verify_ct: int | None = None
    spec_correct_drafts_histogram: tuple[int, ...] | None = None
    spec_num_proposed_drafts: int | None = None
    dp_rank: int | None = None


class StreamEvent(msgspec.Struct):
    """The fields that are read from a reply of SGLang's /generate, or an event of its stream."""

    output_ids: tuple[int, ...]
    meta_info: _Info


class RequestFailed(RuntimeError):
    """A server answered with an error, with something unreadable, or not at all. `status`: the
    HTTP status of an error."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(printable(text))
        self.status = status


def session() -> requests.Session:
    """Make a session without proxies, with the environment's certificates and the servers' key.
    Raises RequestFailed for a key that does not fit a header: requests would print it."""
    made = requests.Session()
    made.trust_env = False
    made.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
    if key := os.environ.get(API_KEY_ENV, "").strip():
        if not (key.isascii() and key.isprintable()):
            raise RequestFailed(f"{API_KEY_ENV} has characters that a key must not have")
        made.headers["Authorization"] = f"Bearer {key}"
    return made


@contextmanager
def _answered(method: str, url: str, timeout: float, **how: Any) -> Iterator[requests.Response]:
    """Yield a request's response. Raises RequestFailed for an error, or without a full answer."""
    shown = hidden(url)
    try:
        with session() as made, made.request(method, url, timeout=timeout, **how) as response:
            if (code := response.status_code) != requests.codes.ok:
                text = " ".join(response.text[:2000].split())
                if code == requests.codes.unauthorized:
                    text += f" (put the server's --api-key into {API_KEY_ENV})"
                raise RequestFailed(f"HTTP {code} from {shown}: {text}", code)
            yield response
    except (OSError, UnicodeError) as error:  # OSError includes all errors of requests
        # requests reports a stream's timeout as a broken connection.
        if isinstance(error, requests.Timeout) or "Read timed out" in str(error):
            raise RequestFailed(f"no answer from {shown} within {timeout:.0f} s") from error
        why = getattr((*error.args, error)[0], "reason", error)  # urllib3's reason has no URL
        raise RequestFailed(f"no answer from {shown}: {hidden(str(why))}") from error


def request(
    method: str, url: str, timeout: float = REQUEST_TIMEOUT_S, **options: Any
) -> requests.Response:
    """Send a request and return the response. Raises RequestFailed for an error or no answer."""
    with _answered(method, url, timeout, **options) as response:
        return response


def stream(url: str, body: dict[str, Any], timeout: float = REQUEST_TIMEOUT_S) -> Answer:
    """Stream a prompt's answer from a server or router. `timeout`: for the first token, and between
    two tokens. Raises RequestFailed."""
    url = f"{url}/generate"
    with _answered("POST", url, timeout, json={**body, "stream": True}, stream=True) as response:
        return read_stream(hidden(url), response.iter_lines())


def read_stream(url: str, lines: Iterable[bytes]) -> Answer:
    """Read an answer's events, or the only line of an answer that is not streamed. An event has all
    tokens so far or, from a server with --incremental-streaming-output, only the new tokens. Raises
    RequestFailed, also if the request was aborted."""
    event, tokens = None, ()
    for line in lines:
        # SGLang's mini load balancer passes an error on without `data:`.
        if line.startswith((b"data:", b"{")) and not line.endswith(b"[DONE]"):
            event = read_event(url, line.removeprefix(b"data:"))
            is_all = event.meta_info.completion_tokens == len(event.output_ids)
            tokens = event.output_ids if is_all else (*tokens, *event.output_ids)
    if event is None:
        raise RequestFailed(f"no answer from {url}: it sent no event")
    info = event.meta_info
    if not info.finish_reason or info.completion_tokens != len(tokens):
        raise RequestFailed(f"the stream from {url} broke off after {len(tokens)} tokens")
    if info.finish_reason.get("type") == "abort":
        raise RequestFailed(f"the request was aborted: {info.finish_reason}")
    rounds = info.spec_verify_ct or 0
    drafted = (info.spec_num_proposed_drafts or 0) // max(1, rounds)
    return Answer(tokens, rounds, info.spec_correct_drafts_histogram or (), drafted, info.dp_rank)


def read_event(url: str, text: bytes, kind: Any = StreamEvent) -> Any:
    """Decode a reply's JSON. Raises RequestFailed if it is not of this kind."""
    try:
        return msgspec.json.decode(text, type=kind)
    except ValueError as error:
        raise RequestFailed(f"{url} sent {text[:200]!r}, not an SGLang answer: {error}") from None
