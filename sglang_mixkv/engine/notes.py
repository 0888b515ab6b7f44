"""What a rank of the channel counts and logs: series, the file of counts, a line per peer and kind.

Once a second the channel thread has gauges set, and requests that have finished counted.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from sglang_mixkv import series
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.decode.breaker import Breaker
from sglang_mixkv.decode.events import State
from sglang_mixkv.decode.health import Health
from sglang_mixkv.decode.worker import ReceiveHandle
from sglang_mixkv.engine.requests import Began, Requests
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.kinds import OF_SIDE, SUSPECT, Kind
from sglang_mixkv.series import Family, Values
from sglang_mixkv.stats import Stats

logger = logging.getLogger(f"sglang.{__name__}")

MAX_LOGGED = 1024  # pairs of peer and kind; beyond them nothing new is logged
LOOK_S = 1.0


class Metrics(Protocol):
    """The series (metrics.py). Neither method raises."""

    def add(self, family: Family, values: Values = (), amount: float = 1) -> None: ...

    def set(self, family: Family, values: Values, value: float) -> None: ...


class Notes:
    """Called from several threads, SGLang's scheduler's among them. Never raises. `folder`: of the
    file of counts, "" for none.

    `slots`, `breaker`: of this rank, once it has them. `name_of`: the bootstrap address of a
    prefill rank's server, "" where it is not known.
    """

    slots: SlotPool | None = None
    breaker: Breaker | None = None

    def __init__(self, mode: str, folder: str, metrics: Metrics | None) -> None:
        self.stats, self.metrics = Stats(mode, folder), metrics
        self.name_of: Callable[[bytes], str] = lambda _: ""
        self.requests, self._health = Requests(self._finished), Health()
        self._mode, self._kinds = mode, OF_SIDE.get(mode, {})
        self._prefills: set[str] = set()
        self._rooms: deque[tuple[str, Values]] = deque()
        self._logged: set[tuple[str, bytes | str]] = set()
        self._looked = 0.0

    def __call__(self, note: Any) -> None:
        """A Note of this rank's state machine."""
        peer = getattr(note, "peer", b"") or getattr(note, "reader", b"")
        kind = self._kinds.get(note.what, Kind())
        self.stats.add(**{f"channel_{note.what}": 1})
        if kind.family is not None:
            named = "prefill" in kind.family.labels
            values = (self._label(self.name_of(peer)),) if named else kind.values
            self._count(kind.family, values)
        if kind.happened and self._is_new(note.what, peer):
            whom = self.name_of(peer) or (f"rank {peer.hex()[:8]}" if peer else "rank")
            self._log(kind, whom, note.detail)

    def _is_new(self, what: str, whom: bytes | str) -> bool:
        """Whether to log it, once per peer and kind."""
        if (what, whom) in self._logged or len(self._logged) >= MAX_LOGGED:
            return False
        self._logged.add((what, whom))
        return True

    def _log(self, kind: Kind, whom: str, detail: str) -> None:
        side = "decode" if self._mode == "prefill" else "prefill"
        sentence = f"{kind.happened} ({detail or 'no detail'}); {kind.consequence}. {kind.remedy}"
        logger.warning(
            "[%s] draft channel, %s %s: %s. From now on counted, not logged",
            kind.code, side, whom, sentence,
        )  # fmt: skip

    def moved(self, size: int, seconds: float) -> None:
        """Bytes of draft KV that were packed here, or put in place, and how long that took."""
        sends = self._mode == "prefill"
        self.stats.add(**{"draft_bytes_sent" if sends else "draft_bytes_needed": size})
        self._count(series.SENT_BYTES if sends else series.NEEDED_BYTES, ("draft",), size)
        self._count(series.COPY_SECONDS, (), seconds)

    def refused(self, error: MixKVError) -> None:
        """A request fails since its prefill server is refused."""
        self.stats.refused(error)
        self._count(series.REFUSED, (error.reason,))

    def ended(self, entry: ReceiveHandle, reason: str) -> None:
        """SGLang is done with a room: it goes on with the request, or (`reason`) has failed it.
        Counted by the channel thread, unless that has ended: this is the scheduler's."""
        values = _outcome(entry, reason)
        if entry.request is not None and values[0] in series.STATES:
            self.requests.begin(entry.request, entry.prefill, values)
        self._rooms.append((entry.prefill, values))
        if entry.reason == "broken":
            self._count_rooms()

    def _count_rooms(self) -> None:
        with suppress(IndexError):  # no more of them
            while True:
                prefill, values = self._rooms.popleft()
                self._count(series.ROOMS, values)
                self._count(series.PREFILL_ROOMS, (self._label(prefill), *values))

    def _finished(self, began: Began, histogram: list[int]) -> None:
        rounds = sum(histogram)
        tokens = rounds + sum(number * count for number, count in enumerate(histogram))
        self.stats.add(**{f"finished_{began.state}": 1, f"rounds_{began.state}": rounds})
        values = began._replace(prefill=self._label(began.prefill))
        self._count(series.FINISHED, values)
        self._count(series.VERIFY_ROUNDS, values, rounds)
        self._count(series.ACCEPTED_TOKENS, values, tokens)
        for position in range(1, min(len(histogram), series.MAX_POSITIONS + 1)):
            at = (began.state, str(position))
            self._count(series.ACCEPTED_DRAFTS, at, sum(histogram[position:]))
        if rounds and began.state in ("warm", "cold") and values.prefill != series.OTHER:
            self._judge(values, tokens / rounds)

    def _judge(self, began: Began, length: float) -> None:
        for one in self._health.add(began.prefill, began.state, length, time.monotonic()):
            if self._is_new(one.against, one.prefill):
                detail = f"{one.found:.2f} tokens a round, where {one.expected:.2f} are expected"
                self._log(SUSPECT[one.against], one.prefill, detail)

    def ticked(self) -> None:
        """By the channel thread, which owns slots and breaker."""
        self._count_rooms()
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        try:
            self._look()
        except Exception:
            self._looked = math.inf
            logger.exception("[MIXKV-SELF-01] sglang-mixkv: some of its series stand still")

    def _look(self) -> None:
        self.requests.settle()
        if self.metrics is None:
            return
        if self.slots is not None:
            self.metrics.set(series.SLOTS, (), self.slots.count)
            self.metrics.set(series.SLOTS_USED, (), self.slots.count - self.slots.free_slots)
        for prefill, against, suspect in self._health.verdicts(time.monotonic()):
            self.metrics.set(series.SUSPECT, (prefill, against), suspect)
        if self.breaker is not None:
            names = filter(None, map(self.name_of, self.breaker.open_peers()))  # "": restarted
            is_open = set(map(self._label, names))
            for prefill in list(self._prefills):
                self.metrics.set(series.BREAKER_OPEN, (prefill,), prefill in is_open)

    def publish(self) -> None:
        self.stats.publish()

    def _label(self, prefill: str) -> str:
        is_new = prefill not in self._prefills
        if not prefill or (is_new and len(self._prefills) >= series.MAX_PREFILLS):
            prefill = series.OTHER
        self._prefills.add(prefill)
        return prefill

    def _count(self, family: Family, values: Values, amount: float = 1) -> None:
        if self.metrics is not None:
            self.metrics.add(family, values, amount)


def _outcome(entry: ReceiveHandle, reason: str) -> tuple[str, str]:
    """The values of series.ROOMS."""
    if entry.state is State.FAILED:
        return "failed", ""
    if reason or entry.state is None:
        return "closed", ""
    if entry.state is State.WARM:
        return "warm", ""
    return "cold", entry.reason if entry.reason in series.COLD else series.OTHER
