"""Running servers on one screen, from their /metrics pages.

    python -m sglang_mixkv status URL... [--seconds 2] [--new] [--json]

A URL is a server's, or the page of a router. Bytes a second are between two looks; all else is
since each server started, with --new since the first look. `lost` is the share of tokens a verify
round that cold drafters cost.

Exit status: 0 nothing is wrong; 1 something is; 2 a page could not be read.

Servers need --enable-metrics; those that ask for an API key get that of SGLANG_MIXKV_API_KEY.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from textwrap import TextWrapper
from typing import Any, NamedTuple

from sglang_mixkv.series import MEMORY, NOTES, PREFILL, REPORT, STATES, Kind
from sglang_mixkv.tools import table
from sglang_mixkv.tools.status_pages import Drafts, Look, Page, Pair, Server, look, pairs, servers

SECONDS, TIMEOUT_S, WIDTH = 2.0, 5.0, 100
COLD_SHARE = 0.01  # of requests; as the alert MixKVColdDrafters
NONE = "-"


class Wrong(NamedTuple):
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

    def figures(self) -> dict[str, Any]:
        rows = [
            {
                "decode": pair.decode, "prefill": pair.prefill, "requests": pair.rooms.total(),
                "rooms": pair.rooms, "warm_share": pair.warm_share, "lost": pair.lost,
                "drafts": {
                    state: {**asdict(drafts), "accept_length": drafts.length}
                    for state, drafts in pair.drafts.items() if drafts.requests
                },
                "breaker_open": pair.breaker_open,
            }
            for pair in self.pairs
        ]  # fmt: skip
        return {
            "servers": [asdict(one) for one in self.servers], "pairs": rows,
            "wrong": [one._asdict() for one in self.wrong], "unread": self.unread,
        }  # fmt: skip

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


def status(before: Look, now: Look, first: Look | None = None) -> Status:
    """Of two looks. `first`: what happened since is counted; without it, since servers started."""
    since = now if first is None else now.since(first)
    found = [*servers(now, now.since(before), now.at - before.at)]
    rows = [*pairs(since)]
    return Status(found, rows, [*_wrong(since, found, rows)], now.unread)


# ---------------------------------------------------------------- the screen


def _servers(found: Sequence[Server]) -> Iterator[Sequence[str]]:
    yield "server", "role", "ranks", "slots in use", "draft KV"
    for one in found:
        slots = f"{one.slots_used} of {one.slots}" if one.slots else NONE
        way = "sent" if one.role == PREFILL else "received"
        moved = NONE if one.moved is None else f"{one.moved / 1e6:,.1f} MB/s {way}"
        role = one.role if one.has_plugin else "no plugin"
        yield one.name, role, str(one.ranks or NONE), slots, moved


def _pairs(found: Sequence[Pair]) -> Iterator[Sequence[str]]:
    yield "decode", "prefill", "requests", "warm", "accept: warm", "cold", "retracted", "lost"
    for pair in found:
        lengths = (pair.drafts[state].length for state in STATES)
        yield (
            pair.decode, pair.prefill, f"{pair.rooms.total():,}", _share(pair.warm_share),
            *(NONE if length is None else f"{length:.2f}" for length in lengths),
            _share(pair.lost),
        )  # fmt: skip


def _share(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"


# ---------------------------------------------------------------- what is wrong


def _wrong(since: Look, found: list[Server], pairs: list[Pair]) -> Iterator[Wrong]:
    """`since`: what the counts are of."""
    for server in found:
        yield from (Wrong(server.name, *words) for words in _of_server(server))
    for name, page in since.pages.items():
        yield from (Wrong(name, *words) for words in _of_counts(page))
    for pair in pairs:
        others = [other for other in pairs if other.decode == pair.decode]
        where = f"{pair.decode}, prefill {pair.prefill}"
        yield from (Wrong(where, *words) for words in _of_pair(pair, others))


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


def _of_pair(pair: Pair, others: list[Pair]) -> Iterator[tuple[str, str]]:
    """`others`: all pairs of this decode server."""
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
            yield what + happened + _cost(pair, others), kind.remedy


def _cost(pair: Pair, others: list[Pair]) -> str:
    """What its cold requests accept, beside warm ones: its own, or those of other servers."""
    cold, warm, whose = pair.drafts["cold"].length, pair.drafts["warm"].length, "its warm ones"
    if not warm:
        found, whose = [o.drafts["warm"] for o in others], "warm ones of other prefill servers"
        warm = Drafts(0, sum(d.rounds for d in found), sum(d.tokens for d in found)).length
    if not cold or not warm:
        return ""
    return f"; cold ones accept {cold:.2f} tokens a round, {whose} {warm:.2f}"


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
    add("--seconds", type=_seconds, default=SECONDS, help="between two looks (default %(default)s)")
    add("--new", action="store_true", help="count what happens between the looks alone")
    add("--timeout", type=_seconds, default=TIMEOUT_S, help="of a page (default %(default)s)")
    add("--json", action="store_true", help="figures instead of the table")
    args = parser.parse_args(argv)
    first = look(args.urls, args.timeout)
    time.sleep(args.seconds)
    found = status(first, look(args.urls, args.timeout), first if args.new else None)
    print(json.dumps(found.figures(), indent=1) if args.json else found.text())
    return found.exit_status
