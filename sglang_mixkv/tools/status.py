"""Running servers on one screen, from their /metrics pages.

    python -m sglang_mixkv status URL... [--seconds N] [--json]

A URL is a server's, the page of a router, or Prometheus'. Requests are counted since each server
started, with --seconds N those that end in so many seconds from now on.

Exit status: 0 nothing is wrong; 1 something is; 2 a page could not be read.

Servers need --enable-metrics; those that ask for an API key get that of SGLANG_MIXKV_API_KEY.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_mixkv.series import MEMORY, NOTES, REPORT, STATES, Kind
from sglang_mixkv.tools import as_json, parser, point, table
from sglang_mixkv.tools.status_pages import Page, Pages, Pair, Server, look, pairs, servers

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

    def text(self) -> str:
        lines = [*table(_servers(self.servers)), ""]
        if self.pairs:
            lines += [*table(_pairs(self.pairs)), ""]
        points = [f"{url}: {why}" for url, why in self.unread.items()]
        points += [f"{one.where}: {one.what}. {one.remedy}" for one in self.wrong]
        for text in points:
            lines += point(text, "!! ")
        return "\n".join(lines if points else [*lines, "nothing is wrong"])


def status(now: Pages, unread: dict[str, str], first: Pages | None = None) -> Status:
    """`first`: what happened since is counted; without it, since servers started. A server that is
    new counts from its start."""
    before = first or Pages()
    since = {name: page.since(before.get(name, Page())) for name, page in now.items()}
    found, rows = [*servers(now)], [*pairs(since)]
    return Status(found, rows, [*_of_servers(found), *_of_counts(since), *_of_pairs(rows)], unread)


def _servers(found: Sequence[Server]) -> Iterator[Sequence[str]]:
    yield "server", "role", "ranks", "slots in use"
    for one in found:
        slots = f"{one.slots_used} of {one.slots}" if one.slots else NONE
        yield one.name, one.role, str(one.ranks or NONE), slots


def _pairs(found: Sequence[Pair]) -> Iterator[Sequence[str]]:
    yield "decode", "prefill", "requests", "warm", "accept: warm", "cold", "retracted"
    for pair in found:
        lengths = (pair.accept_lengths[state] for state in STATES)
        yield (
            pair.decode, pair.prefill, f"{pair.rooms.total():,}",
            NONE if pair.warm_share is None else f"{pair.warm_share:.1%}",
            *(NONE if length is None else f"{length:.2f}" for length in lengths),
        )  # fmt: skip


def _of_servers(found: Sequence[Server]) -> Iterator[Wrong]:
    for server in found:
        if not server.ranks:
            what = "its page, which should be a server's own, has no series of the plugin"
            remedy = "Start it with --enable-mixkv; with it, search its log for MIXKV-"
            yield Wrong(server.name, what, remedy)
        elif 0 < server.slots <= server.slots_used:
            remedy = MEMORY + " if it stays so"
            yield Wrong(server.name, "all slots of a rank are in use", remedy)


def _of_counts(since: Pages) -> Iterator[Wrong]:
    for name, page in since.items():
        for reason, number in page.requests("peers_refused_total", "reason").items():
            what = f"{number} requests failed since a prefill server is refused ({reason})"
            yield Wrong(name, what, "Search decode's log for MIXKV-")
        if failed := page.requests("rooms_total", state="failed", reason="").total():
            kind = NOTES["not_cleared"]
            what = f"{failed} requests failed: {kind.happened}"
            yield Wrong(name, what, f"Search decode's log for {kind.code}")
        for kind in (NOTES["unopened"], NOTES["expired"]):
            if number := page.requests(kind.series).total():
                yield Wrong(name, f"{number} times {kind.happened}", kind.remedy)


def _of_pairs(found: Sequence[Pair]) -> Iterator[Wrong]:
    for pair in found:
        if pair.warm_share is None or 1 - pair.warm_share <= COLD_SHARE:
            continue
        for reason, number in pair.rooms.most_common():
            if number and reason != "warm":
                kind = NOTES.get(f"cold_{reason}", Kind(remedy=REPORT))
                what = f"{number} of {pair.rooms.total()} requests started cold ({reason})"
                what += f": {kind.happened}" * bool(kind.happened)
                yield Wrong(f"{pair.decode}, prefill {pair.prefill}", what, kind.remedy)


def main(argv: list[str]) -> int:
    made = parser("status", __doc__)
    add = made.add_argument
    add("urls", nargs="+", metavar="URL", help="http://HOST:PORT of a server, or a page of metrics")
    of_now = "count the requests of so many seconds from now on"
    add("--seconds", metavar="N", type=int, choices=range(1, 1 << 20), help=of_now)
    add("--json", action="store_true", help="figures instead of the tables")
    args = made.parse_args(argv)
    first, (now, unread) = None, look(args.urls)
    if args.seconds:
        time.sleep(args.seconds)
        first, (now, unread) = now, look(args.urls)
    found = status(now, unread, first)
    print(as_json(found) if args.json else found.text())
    return 2 if unread else int(bool(found.wrong))
