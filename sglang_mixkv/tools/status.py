"""Running servers on one screen, from their /metrics pages.

    python -m sglang_mixkv status URL... [--seconds N] [--json]

A URL is a server's, the page of a router, or Prometheus'. Requests are counted since each server
started, with --seconds N those that end in so many seconds from now on.

Exit status: 0 nothing is wrong; 1 something is; 2 a page could not be read.

Servers need --enable-metrics; those that ask for an API key get that of SGLANG_MIXKV_API_KEY.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import TextWrapper

import msgspec

from sglang_mixkv.series import MEMORY, NOTES, REPORT, STATES, Kind
from sglang_mixkv.tools import table
from sglang_mixkv.tools.status_pages import Look, Page, Pair, Server, look, pairs, servers

TIMEOUT_S, WIDTH = 5.0, 100
COLD_SHARE = 0.01  # of requests; as the alert MixKVColdDrafters
NONE = "-"


@dataclass(frozen=True)
class Wrong:
    """`where`: a server, or a decode server and its prefill server."""

    where: str
    what: str
    remedy: str


@dataclass(frozen=True)
class Status:
    """`unread`: URL -> why."""

    servers: list[Server]
    pairs: list[Pair]
    wrong: list[Wrong]
    unread: dict[str, str]

    @property
    def exit_status(self) -> int:
        return 2 if self.unread else int(bool(self.wrong))

    def text(self) -> str:
        lines = [*table(_servers(self.servers))]
        if self.pairs:
            lines += ["", *table(_pairs(self.pairs))]
        lines.append("")
        points = [f"!! {url}: {why}" for url, why in self.unread.items()]
        points += [f"!! {one.where}: {one.what}. {one.remedy}" for one in self.wrong]
        wrapper = TextWrapper(
            WIDTH, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False
        )
        for point in points or ["nothing is wrong"]:
            lines += wrapper.wrap(point)
        return "\n".join(lines)


def status(now: Look, first: Look | None = None) -> Status:
    """`first`: what happened since is counted; without it, since servers started."""
    since = now if first is None else now.since(first)
    found, rows = [*servers(now)], [*pairs(since)]
    return Status(found, rows, [*_wrong(since, found, rows)], now.unread)


# ---------------------------------------------------------------- the screen


def _servers(found: Sequence[Server]) -> Iterator[Sequence[str]]:
    yield "server", "role", "ranks", "slots in use"
    for one in found:
        slots = f"{one.slots_used} of {one.slots}" if one.slots else NONE
        role = one.role if one.has_plugin else "no plugin"
        yield one.name, role, str(one.ranks or NONE), slots


def _pairs(found: Sequence[Pair]) -> Iterator[Sequence[str]]:
    yield "decode", "prefill", "requests", "warm", "accept: warm", "cold", "retracted"
    for pair in found:
        lengths = (pair.accept_lengths[state] for state in STATES)
        yield (
            pair.decode, pair.prefill, f"{pair.rooms.total():,}",
            NONE if pair.warm_share is None else f"{pair.warm_share:.1%}",
            *(NONE if length is None else f"{length:.2f}" for length in lengths),
        )  # fmt: skip


# ---------------------------------------------------------------- what is wrong


def _wrong(since: Look, found: list[Server], pairs: list[Pair]) -> Iterator[Wrong]:
    """`since`: what the counts are of."""
    for server in found:
        yield from (Wrong(server.name, *words) for words in _of_server(server))
    for name, page in since.pages.items():
        yield from (Wrong(name, *words) for words in _of_counts(page))
    for pair in pairs:
        where = f"{pair.decode}, prefill {pair.prefill}"
        yield from (Wrong(where, *words) for words in _of_pair(pair))


def _of_server(server: Server) -> Iterator[tuple[str, str]]:
    if not server.is_sglang:
        yield (
            "its page has no series of SGLang", "Give a server's own page, http://HOST:PORT/metrics"
        )  # fmt: skip
    elif not server.has_plugin:
        remedy = "Start it with --enable-mixkv; with it, search its log for MIXKV-"
        yield "no series of the plugin", remedy
    elif 0 < server.slots <= server.slots_used:
        yield "all slots of a rank are in use", MEMORY + " if it stays so"


def _of_counts(page: Page) -> Iterator[tuple[str, str]]:
    for reason, number in page.requests("peers_refused_total", "reason").items():
        what = f"{number} requests failed since a prefill server is refused ({reason})"
        yield what, "Search decode's log for MIXKV-"
    if failed := page.requests("rooms_total", "state")["failed"]:
        kind = NOTES["not_cleared"]
        yield f"{failed} requests failed: {kind.happened}", f"Search decode's log for {kind.code}"
    for kind in (NOTES["unopened"], NOTES["expired"]):
        if number := page.requests(kind.series).total():
            yield f"{number} times {kind.happened}", kind.remedy


def _of_pair(pair: Pair) -> Iterator[tuple[str, str]]:
    if pair.breaker_open:
        kind = NOTES["breaker_opened"]
        yield f"{kind.happened}; {kind.consequence}", kind.remedy
    if pair.warm_share is None or 1 - pair.warm_share <= COLD_SHARE:
        return
    for reason, number in pair.rooms.most_common():
        if number and reason != "warm":
            kind = NOTES.get(f"cold_{reason}", Kind(remedy=REPORT))
            what = f"{number} of {pair.rooms.total()} requests started cold ({reason})"
            happened = f": {kind.happened}" if kind.happened else ""
            yield what + happened, kind.remedy


# ---------------------------------------------------------------- the command line


def _seconds(text: str) -> float:
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
    return number


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_mixkv status",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("urls", nargs="+", metavar="URL", help="http://HOST:PORT of a server, or a page of metrics")
    add("--seconds", type=_seconds, help="count the requests of so many seconds from now on")
    add("--json", action="store_true", help="figures instead of the tables")
    args = parser.parse_args(argv)
    first, now = None, look(args.urls, TIMEOUT_S)
    if args.seconds:
        time.sleep(args.seconds)
        first, now = now, look(args.urls, TIMEOUT_S)
    found = status(now, first)
    print(msgspec.json.format(msgspec.json.encode(found)).decode() if args.json else found.text())
    return found.exit_status
