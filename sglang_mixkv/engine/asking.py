"""What is asked of a prefill server over HTTP; it may be hung, or hostile.

All of one question has to end within ASK_S, and an answer that is too long is cut while it is read.
`requests` bounds neither: its timeout is for each receive, and it reads a body whole. Proxies are
not used, since the channel's own connections are direct as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec

from sglang_mixkv.draft.facts import Row, read_row
from sglang_mixkv.engine.bootstrap import PATH
from sglang_mixkv.errors import MixKVError

ASK_S = 5.0
MAX_BODY = 4 << 20  # rows of 256 ranks, of 16 KiB each: some ten times what they have

T = TypeVar("T")
Rows = dict[tuple[str, int], Row]
Get = Callable[[str, Mapping[str, Any]], Awaitable[tuple[int, bytes]]]


class NotYet(Exception):
    """The server cannot answer now."""


class TooLong(Exception):
    """An answer that no honest server gives."""


class _Answer(msgspec.Struct, frozen=True):
    protocol: int = 0
    rows: tuple[msgspec.Raw, ...] | None = None


def fetch(address: str) -> Rows:
    """All rows of a prefill server. MixKVError where it does not fit, NotYet where it is silent."""
    try:
        status, body = ask(address, lambda get: get(PATH, {}))
    except TooLong as error:
        raise _unreadable(error) from None
    if status == 200:
        return read_rows(body)
    text = body[:512].decode(errors="replace")
    if status == 404:
        raise MixKVError(
            "MIXKV-PAIR-01",
            "it does not run sglang-mixkv, this decode server does: it would write the drafter's "
            "rows into the target's pages. Start both with --enable-mixkv, or both without.",
        )
    if status == 409:
        raise MixKVError(
            "MIXKV-PAIR-01", f"{text}. Start every node of the prefill server with --enable-mixkv."
        )
    raise NotYet(f"{status} {text}")


def read_rows(body: bytes) -> Rows:
    """Raises MixKVError for bytes that are no rows of a protocol that this build reads."""
    try:
        found = msgspec.json.decode(body, type=_Answer)
        if found.rows is None:
            raise ValueError(f"protocol {found.protocol}, that of sglang-mixkv 0.1 and 0.2")
        rows = [read_row(bytes(row)) for row in found.rows]
    except (ValueError, RecursionError) as error:
        raise _unreadable(error) from None
    return {(row.rank_ip, row.rank_port): row for row in rows}


def _unreadable(error: Exception) -> MixKVError:
    return MixKVError(
        "MIXKV-PAIR-02",
        f"its facts cannot be read: {error}. Install releases of sglang-mixkv that have a "
        "protocol in common on both sides.",
    )


def ask(address: str, question: Callable[[Get], Awaitable[T]]) -> T:
    """What `question` returns. It is given `get(path, query)`, which returns status and body, and
    may raise NotYet itself. Blocks for ASK_S at most, and for as long as the lookup of a name
    takes: that holds the caller's thread, rather than more and more threads of nobody's."""
    try:
        return asyncio.run(_run(address, question))
    except TimeoutError:
        raise NotYet(f"no answer within {ASK_S:.0f} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NotYet(f"{type(error).__name__}: {error}") from error


async def _run(address: str, question: Callable[[Get], Awaitable[T]]) -> T:
    plain = {"Accept-Encoding": "identity"}  # what is packed has any size when it is unpacked
    async with aiohttp.ClientSession(headers=plain, auto_decompress=False) as session:

        async def get(path: str, query: Mapping[str, Any]) -> tuple[int, bytes]:
            url, body = f"http://{address}{path}", bytearray()
            async with session.get(url, params=query, allow_redirects=False) as answer:
                async for part in answer.content.iter_any():
                    body += part
                    if len(body) > MAX_BODY:
                        raise TooLong(f"an answer of more than {MAX_BODY >> 20} MiB")
                return answer.status, bytes(body)

        async with asyncio.timeout(ASK_S):
            return await question(get)
