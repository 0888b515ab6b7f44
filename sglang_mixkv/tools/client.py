"""HTTP client of the commands."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import requests

from sglang_mixkv.config import API_KEY_ENV

REQUEST_TIMEOUT_S = 180.0

NO_URL = "that is no URL: expected http://HOST:PORT"
WHY = {
    "Connection refused": "nothing listens there. Is the server up, and is it that port?",
    "Failed to resolve": "no host has that name",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is unknown: set REQUESTS_CA_BUNDLE",
    "SSL": "it has no TLS: try http://",
}
"""What requests says of a failure -> what that means. The first that fits."""


class Answer(msgspec.Struct, frozen=True):
    """A server's answer to one prompt. `drafted`: tokens drafted a verify round. `dp_rank`: who
    decoded it, None where the server does not say. `first_token_s`: when the first token came, of
    `stream` alone."""

    tokens: tuple[int, ...]
    verify_rounds: int
    rounds_by_right_drafts: tuple[int, ...]
    seconds: float
    drafted: int = 0
    dp_rank: int | None = None
    first_token_s: float = 0.0


class RequestFailed(RuntimeError):
    """A server answered with an error, or not at all."""


def session() -> requests.Session:
    """Make a session without proxies, with the environment's certificates and the servers' key."""
    made = requests.Session()
    made.trust_env = False
    made.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
    if key := os.environ.get(API_KEY_ENV):
        made.headers["Authorization"] = f"Bearer {key}"
    return made


@contextmanager
def _answered(method: str, url: str, timeout: float, **how: Any) -> Iterator[requests.Response]:
    """Raises RequestFailed where there is no answer, an error, or none that ends."""
    try:
        with session() as made, made.request(method, url, timeout=timeout, **how) as response:
            if response.status_code != requests.codes.ok:
                text = " ".join(response.text[:2000].split())
                if response.status_code == requests.codes.unauthorized:
                    text += f" (put the server's --api-key into {API_KEY_ENV})"
                raise RequestFailed(f"HTTP {response.status_code} from {url}: {text}")
            yield response
    except requests.RequestException as error:
        text = str(error)
        # Of a stream, requests has a timeout for a broken connection.
        if isinstance(error, requests.Timeout) or "Read timed out" in text:
            raise RequestFailed(f"no answer from {url} within {timeout:.0f} s") from error
        why = next((words for sign, words in WHY.items() if sign in text), text)
        why = NO_URL if isinstance(error, ValueError) else why
        raise RequestFailed(f"no answer from {url}: {why}") from error


def request(
    method: str, url: str, timeout: float = REQUEST_TIMEOUT_S, **options: Any
) -> requests.Response:
    """Raises RequestFailed where there is no answer, or an error."""
    with _answered(method, url, timeout, **options) as response:
        return response


def stream(url: str, body: dict[str, Any], timeout: float = REQUEST_TIMEOUT_S) -> Answer:
    """One prompt's answer from a server or router, token by token. `timeout`: of the first one, and
    between two of them. Raises RequestFailed."""
    begin, url = time.monotonic(), f"{url}/generate"
    with _answered("POST", url, timeout, json={**body, "stream": True}, stream=True) as response:
        reply, first = read_stream(url, response.iter_lines())
    return parse_answer(reply, time.monotonic() - begin, first - begin)


def read_stream(url: str, lines: Iterable[bytes]) -> tuple[dict[str, Any], float]:
    """The last event with all tokens, and when the first one came. An event has all tokens so far,
    or, from a server with --incremental-streaming-output, the new ones."""
    event, tokens, first = dict[str, Any](), list[int](), 0.0
    for line in lines:
        # SGLang's small router passes an error on without the field's name.
        if not line.startswith((b"data:", b"{")) or line.endswith(b"[DONE]"):
            continue
        try:
            event = json.loads(line.removeprefix(b"data:"))
        except ValueError:
            raise RequestFailed(f"{url} sent {line[:200]!r}") from None
        _check_shape(event)
        first = first or time.monotonic()
        new = event["output_ids"]
        is_all = event["meta_info"]["completion_tokens"] == len(new)
        tokens = new if is_all else [*tokens, *new]
    if not event:
        raise RequestFailed(f"no answer from {url}: it sent no event")
    info = event["meta_info"]
    if not info.get("finish_reason") or info["completion_tokens"] != len(tokens):
        raise RequestFailed(f"the stream of {url} broke off after {len(tokens)} tokens")
    return event | {"output_ids": tokens}, first


def _check_shape(reply: Any) -> None:
    if not isinstance(reply, dict) or not {"meta_info", "output_ids"} <= reply.keys():
        raise RequestFailed(f"expected SGLang's meta_info and output_ids, got {str(reply)[:200]}")


def parse_answer(reply: dict[str, Any], seconds: float, first_token_s: float = 0.0) -> Answer:
    """An answer from SGLang's reply to ``/generate``. Raises RequestFailed."""
    _check_shape(reply)
    info = reply["meta_info"]
    if (info.get("finish_reason") or {}).get("type") == "abort":
        raise RequestFailed(f"the request was aborted: {info['finish_reason']}")
    rounds = info.get("spec_verify_ct") or 0
    return Answer(
        tuple(reply["output_ids"]), rounds, tuple(info.get("spec_correct_drafts_histogram") or ()),
        seconds,
        drafted=(info.get("spec_num_proposed_drafts") or 0) // max(1, rounds),
        dp_rank=info.get("dp_rank"),
        first_token_s=first_token_s,
    )  # fmt: skip
