"""Running servers on one screen, from their /metrics pages.

    python -m sglang_mixkv status URL... [--seconds 2] [--new] [--watch [SECONDS]] [--json]

A URL is a server's, or the page of a router. Bytes a second are between two looks; all else is
since each server started, with --new since the first look. `lost` is the share of tokens a verify
round that cold drafters cost. Suspects are found by decode itself (MIXKV-PAIR-08).

Exit status: 0 nothing is wrong; 1 something is; 2 a page could not be read.

Servers need --enable-metrics; those that ask for an API key get that of SGLANG_MIXKV_API_KEY.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

from sglang_mixkv.series import PREFILL
from sglang_mixkv.tools import table
from sglang_mixkv.tools.status_figures import Drafts, Pair, Server, pairs, servers
from sglang_mixkv.tools.status_look import Look, look
from sglang_mixkv.tools.status_wrong import Wrong, wrong

SECONDS, TIMEOUT_S, WIDTH = 2.0, 5.0, 100
STATES = ("warm", "cold", "retracted")
NONE = "-"


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
                "suspect": sorted(pair.suspect), "breaker_open": pair.breaker_open,
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
        points = [f"{url}: {why}" for url, why in self.unread.items()]
        points += [f"{one.where}: {one.what}. {one.remedy}" for one in self.wrong]
        for point in points or ["nothing is wrong"]:
            mark = "!! " if points else ""
            lines.append(
                fill(mark + point, WIDTH, subsequent_indent="   ", break_long_words=False,
                     break_on_hyphens=False)
            )  # fmt: skip
        return "\n".join(lines)


def status(before: Look, now: Look, first: Look | None = None) -> Status:
    """Of two looks. `first`: what happened since is counted; without it, since servers started."""
    since = now if first is None else now.since(first)
    found = [*servers(now, now.since(before), now.at - before.at)]
    rows = [*pairs(since)]
    return Status(found, rows, [*wrong(since, found, rows)], now.unread)


def _servers(found: Sequence[Server]) -> Iterator[Sequence[str]]:
    yield "server", "role", "ranks", "slots in use", "draft KV"
    for one in found:
        slots = f"{one.slots_used} of {one.slots}" if one.slots else NONE
        way = "sent" if one.role == PREFILL else "received"
        moved = NONE if one.moved is None else f"{one.moved / 1e6:,.1f} MB/s {way}"
        role = one.role if one.has_plugin else "no plugin"
        yield one.name, role, str(one.ranks or NONE), slots, moved


def _pairs(found: Sequence[Pair]) -> Iterator[Sequence[str]]:
    yield "decode", "prefill", "requests", "warm", "accept: warm", "cold", "retracted", "lost", ""
    for pair in found:
        lengths = (pair.drafts.get(state, Drafts()).length for state in STATES)
        yield (
            pair.decode, pair.prefill, f"{pair.rooms.total():,}", _share(pair.warm_share),
            *(NONE if length is None else f"{length:.2f}" for length in lengths),
            _share(pair.lost), "SUSPECT" if pair.suspect else "",
        )  # fmt: skip


def _share(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"


# ---------------------------------------------------------------- the command line


def seconds(text: str) -> float:
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
    return number


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m sglang_mixkv status",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("urls", nargs="+", metavar="URL", help="http://HOST:PORT of a server, or a page of metrics")
    add("--seconds", type=seconds, default=SECONDS, help="between two looks (default %(default)s)")
    add("--new", action="store_true", help="count what happens between the looks alone")
    add("--timeout", type=seconds, default=TIMEOUT_S, help="of a page (default %(default)s)")
    add("--json", action="store_true", help="figures instead of the table")
    add(
        "--watch", action="store_true",
        help="again and again, until Ctrl-C; --new counts from the start. Needs rich",
    )  # fmt: skip
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.watch:
        return watch(args)
    first = look(args.urls, args.timeout)
    time.sleep(args.seconds)
    found = status(first, look(args.urls, args.timeout), first if args.new else None)
    print(json.dumps(found.figures(), indent=1) if args.json else found.text())
    return found.exit_status


def watch(args: argparse.Namespace) -> int:
    """Ends with the status of the last screen."""
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        print("--watch needs rich: pip install 'sglang-mixkv[watch]'", file=sys.stderr)
        return 2
    before = look(args.urls, args.timeout)
    first = before if args.new else None
    shown = status(before, before, first)
    with Live(Text(shown.text()), auto_refresh=False, screen=sys.stdout.isatty()) as screen:
        try:
            while True:
                time.sleep(args.seconds)
                now = look(args.urls, args.timeout)
                shown = status(before, now, first)
                screen.update(Text(shown.text()), refresh=True)
                before = now
        except KeyboardInterrupt:
            return shown.exit_status
