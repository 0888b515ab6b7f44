"""The soak over the draft channel. Of requests, some are aborted, at any moment and by either side.
Beside that its copies and reads fail, and its messages come twice or, of a connection that is lost,
not at all: of these troubles no request may fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from rig.rank import is_cold
from rig.soak import Open, SoakDecode, SoakPrefill, SoakRank

from sglang_mixkv.channel.messages import Open as OpenMessage
from sglang_mixkv.draft.rows import DraftRows

AT_DECODE = ("abort before metadata", *["abort after metadata"] * 4, "metadata: late")
AT_PREFILL = ("prefill aborts",)
TROUBLE = 0.01
"""Of so many copies, reads and messages each."""


class Troubles:
    """Drawn from the soak's seed, the side and the rank."""

    def __init__(self, rank: SoakRank) -> None:
        self._draw = random.Random(f"{rank.case.seed} {rank.side} {rank.rank}")

    def happens(self) -> bool:
        return self._draw.random() < TROUBLE

    def in_rows(self, name: str) -> None:
        """Out of memory."""
        real = getattr(DraftRows, name)

        def copy(rows: DraftRows, *args: Any) -> Any:
            if self.happens():
                raise MemoryError(f"no memory to {name}")
            return real(rows, *args)

        setattr(DraftRows, name, copy)

    def doubled(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def send(*args: Any) -> Any:
            if self.happens():
                real(*args)
            return real(*args)

        return send


class ChannelPrefill(SoakPrefill):
    def inject(self) -> None:
        troubles, outbox = Troubles(self), self.manager.outbox
        troubles.in_rows("pack")
        outbox._send = troubles.doubled(outbox._send)


class ChannelDecode(SoakDecode):
    def inject(self) -> None:
        super().inject()
        troubles, inbox = Troubles(self), self.manager.inbox
        troubles.in_rows("unpack")
        peers, plane = inbox._peers, inbox._fetches._plane
        send, start = troubles.doubled(peers.send), plane.start

        def send_or_lose(peer: bytes, message: Any) -> Any:
            lost = isinstance(message, OpenMessage) and troubles.happens()
            return True if lost else send(peer, message)

        def start_somewhere(link: Any, local: int, remote: int, size: int) -> Any:
            return start(link, local, remote + (troubles.happens() << 44), size)

        peers.send, plane.start = send_or_lose, start_somewhere

    def _succeeded(self, one: Open) -> None:
        """A cold drafter's rows may hold anything that was its own or zeros."""
        if is_cold(one.handle):
            self.report.cold.add(one.number)
        super()._succeeded(one)

    def expected(self, name: str, one: Open) -> Any:
        if name == "draft" and one.number in self.report.cold:
            return [entry[one.pages].copy() for entry in self.pools[name]]
        return super().expected(name, one)


def rank_class(side: str) -> type[SoakRank]:
    return ChannelPrefill if side == "prefill" else ChannelDecode
