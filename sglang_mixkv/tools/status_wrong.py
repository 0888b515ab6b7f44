"""What is wrong by servers' pages, in words, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sglang_mixkv import kinds, series
from sglang_mixkv.tools.status_figures import Pair, Server, accept_length, counted
from sglang_mixkv.tools.status_look import Look, Page

COLD_SHARE = 0.01  # of requests; as the alert MixKVColdDrafters
SAME = "Give both sides the same drafter"
UNLOGGED = {
    "no_drafter": ("one side has none", SAME),
    "mismatch": ("the two sides' differ", SAME),
    "breaker": ("three requests in a row had no draft KV", "The other reasons say why"),
    "prefill_aborted": ("prefill aborted them", "Nothing: their clients went away"),
    "broken": ("a thread of the plugin has ended", "See decode's log"),
}
"""Reasons of which kinds.py has no log line: what happened, and the remedy."""


class Wrong(NamedTuple):
    """`where`: a server, or a decode server and its prefill server."""

    where: str
    what: str
    remedy: str


def wrong(since: Look, found: list[Server], pairs: list[Pair]) -> Iterator[Wrong]:
    """`since`: what the counts are of."""
    for server in found:
        yield from _of_server(server)
    for name, page in since.pages.items():
        yield from (Wrong(name, *words) for words in _of_counts(page))
    for pair in pairs:
        others = [other for other in pairs if other.decode == pair.decode]
        yield from _of_pair(pair, accept_length(others, "warm"))


def _of_counts(page: Page) -> Iterator[tuple[str, str]]:
    for reason, number in counted(page, _short(series.REFUSED), "reason").items():
        yield (
            f"{number} requests failed since a prefill server is refused ({reason})",
            "Search decode's log for MIXKV-",
        )  # fmt: skip
    if failed := counted(page, _short(series.ROOMS), "state")["failed"]:
        kind = kinds.DECODE["not_cleared"]
        yield f"{failed} requests failed: {kind.happened}", f"Search decode's log for {kind.code}"
    for what in ("unopened", "expired"):
        kind = kinds.PREFILL[what]
        if kind.family is not None and (number := counted(page, _short(kind.family)).total()):
            yield f"{number} times {kind.happened}", kind.remedy


def _short(family: series.Family) -> str:
    return family.name.removeprefix("sglang:mixkv_")


def _of_server(server: Server) -> Iterator[Wrong]:
    if not server.is_sglang:
        yield Wrong(
            server.name, "its page has no series of SGLang",
            "Give a server's own page, http://HOST:PORT/metrics",
        )  # fmt: skip
    elif not server.has_plugin:
        yield Wrong(
            server.name, "no series of the plugin",
            "Start it with --enable-mixkv; with it, search its log for MIXKV-",
        )  # fmt: skip
    elif 0 < server.slots <= server.slots_used:
        yield Wrong(server.name, "all slots of a rank are in use", kinds.MEMORY + " if it stays so")


def _of_pair(pair: Pair, warm: float | None) -> Iterator[Wrong]:
    """`warm`: what the decode server's warm requests accept."""
    where = f"{pair.decode}, prefill {pair.prefill}"
    for against in sorted(pair.suspect):
        kind = kinds.SUSPECT.get(against, kinds.SUSPECT["past"])
        yield Wrong(where, f"{kind.happened} [{kind.code}]", kind.remedy)
    if pair.breaker_open:
        kind = kinds.DECODE["breaker_opened"]
        yield Wrong(where, f"{kind.happened}; {kind.consequence}", kind.remedy)
    share = pair.warm_share
    if share is not None and 1 - share > COLD_SHARE:
        cold = {
            reason: number for reason, number in pair.rooms.items() if reason != "warm" and number
        }
        for reason, number in sorted(cold.items(), key=lambda one: -one[1]):
            what = f"{number} of {pair.rooms.total()} requests started cold ({reason})"
            happened, remedy = _cold(what, reason)
            yield Wrong(where, happened + _cost(pair, warm), remedy)


def _cost(pair: Pair, warm: float | None) -> str:
    """Of a server without warm requests, which `lost` says nothing of."""
    own, cold = (accept_length([pair], state) for state in ("warm", "cold"))
    if own or not cold or not warm:
        return ""
    return f"; they accept {cold:.2f} tokens a round, warm ones of other prefill servers {warm:.2f}"


def _cold(what: str, reason: str) -> tuple[str, str]:
    kind = kinds.DECODE.get(f"cold_{reason}", kinds.Kind())
    happened, remedy = UNLOGGED.get(reason, (kind.happened, kind.remedy))
    return (f"{what}: {happened}", remedy) if happened else (what, kinds.REPORT)
