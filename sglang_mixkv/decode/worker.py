"""A decode rank's channel: its interface for SGLang's scheduler, and the thread behind it.

SGLang's scheduler calls `open`, `target_arrived` and `close`, and reads `ReceiveHandle.state`.
Threads of the caller call `dial` and `add` for each prefill rank before its first request, and
`drop` once its server is gone. The channel thread carries out the machine's actions; it starts no
copy to rows that an earlier forward may still write. If the thread fails, the scheduler clears the
requests' rows, and the requests are cold.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from msgspec.structs import replace

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.actions import Note, Send, StartCopies
from sglang_mixkv.channel.loop import Call, Reporter, Worker
from sglang_mixkv.channel.messages import PROTOCOL, Fail, Open, Ready
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import actions as act
from sglang_mixkv.decode.cold import Cold, ColdReason
from sglang_mixkv.decode.links import Link, Links
from sglang_mixkv.decode.machine import Machine
from sglang_mixkv.decode.segments import Job
from sglang_mixkv.decode.transfer import Generation, Opened, Peer, Source
from sglang_mixkv.draft.copier import Copy, HeldBack, Store
from sglang_mixkv.draft.gate import Gate
from sglang_mixkv.draft.layout import Pages

logger = logging.getLogger(f"sglang.{__name__}")

ENDING = 0.5  # seconds for the channel thread to notice that an earlier forward has ended


class ReceiveHandle:
    """One receiver's request, shared by the scheduler and the channel. `pages`: pages of
    `page_size` tokens in the draft pool, from `opened.first_token` on; written only while `gate` is
    open. `event`: the event after an earlier forward, or None. `prefill`: the server's bootstrap
    address. `state`, `reason`: the channel's verdict. `request`: SGLang's request, once queued.
    `arrived`: when SGLang's own transfer succeeded, recorded by the scheduler, since the channel
    thread may hang. `held`: when the scheduler last found that forward unfinished. `decided`: the
    time of the verdict."""

    request: Any = None

    def __init__(self, pages: Any, page_size: int, event: Any, prefill: str = "") -> None:
        self.event, self.gate, self.prefill = event, Gate(), prefill
        events = () if event is None else (event,)
        self.pages = Pages(np.asarray(pages, dtype=np.int64), page_size, events)
        self.opened: Opened
        self.state: act.State | None = None
        self.reason = ""
        self.arrived: float | None = None
        self.held = 0.0
        self.decided: float | None = None
        self.closed = False

    @property
    def waited(self) -> float | None:
        """Return how long draft KV alone delayed the request; None if that is not yet known."""
        if self.arrived is None or self.decided is None:
            return None
        return max(0.0, self.decided - self.arrived)

    def rows(self, first: int, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the row numbers of the prompt's tokens [first, end)."""
        return self.pages.rows(first - self.opened.first_token, end - first)


class DecodeWorker(Worker[Machine]):
    """`store`: None on a rank without a drafter, which opens requests but reads nothing.

    `forget_peer` is called with a restarted peer, and must `drop` all peers of that peer's server.
    `check_peer` is called with a peer to which a message could not be sent. Both are called in the
    channel thread, and must neither block nor raise.
    """

    names = "mixkv-decode", "mixkv-unpack"

    def __init__(
        self, machine: Machine, store: Store | None, times: Times, reporter: Reporter,
        forget_peer: Callable[[Peer], None], check_peer: Callable[[Peer], None],
    ) -> None:  # fmt: skip
        super().__init__(machine, reporter, times, store)
        self._forget_peer, self._check_peer = forget_peer, check_peer
        self._links = Links(store, times, self._poller)
        self.dial, self.hang_up = self._links.dial, self._links.hang_up
        self._held = HeldBack[Copy]()  # until earlier forwards end
        self._draws = messages.draws()
        self._counter = itertools.count(next(self._draws) >> 33)  # 30 bits
        self._thread.start()

    # -- any thread

    def add(self, link: Link) -> None:
        """Add a peer. Requests may use it until it is dropped."""
        self._call(self._links.add, link)

    def drop(self, peer: Peer) -> None:
        """Close the peer's socket and data plane connection, since its server is gone. Requests
        that wait for its rows go cold immediately."""
        self._call(self._drop, peer)

    # -- the scheduler's thread

    def _new_generation(self) -> Generation:
        """Return a number above all earlier ones, with an unpredictable low half.

        The counter has 31 bits and starts below 2^30, so it rises for at least 2^30 requests: 20
        months at 20 requests a second. Two ranks with n requests each share a generation with
        probability n^2 / 2^61, 4 in 10 million for a million requests: they start within n of each
        other with probability n / 2^29, and each of n low halves then matches with probability
        2^-32.
        """
        return (next(self._counter) & 0x7FFFFFFF) << 32 | next(self._draws) & 0xFFFFFFFF

    def open(
        self, handle: ReceiveHandle, *, bootstrap_room: int, sources: tuple[Source, ...],
        first_token: int, end: int, cold: Cold = "", version: int = PROTOCOL[1],
    ) -> None:  # fmt: skip
        """Open a request whose metadata SGLang has sent; see Opened."""
        handle.opened = Opened(
            self._new_generation(), bootstrap_room, sources, first_token, end, cold, version,
            handle, handle.pages.page_size,
        )  # fmt: skip
        self._call(self._machine.open, handle.opened)

    def target_arrived(self, handle: ReceiveHandle) -> None:
        """Start the wait for draft KV, unless there is a verdict."""
        if handle.arrived is None:
            handle.arrived = self._clock()
            if handle.state is None:
                # it only starts a clock, so the thread need not wake now
                self._call(self._machine.target_arrived, handle.opened.generation, wake=False)

    def close(self, handle: ReceiveHandle, reason: str = "") -> None:
        """End a request. Once this returns, its rows are not written any more. Idempotent."""
        if handle.closed:
            return
        handle.gate.close()
        handle.closed = True
        hurry = bool(reason) or handle.state is None
        self._call(self._machine.close, handle.opened.generation, reason, wake=hurry)
        self._reporter.ended(handle, reason)

    def is_lost(self, handle: ReceiveHandle) -> bool:
        """Return whether the channel will never decide this request, since its threads have ended
        or twice the allowed time has passed. The scheduler must then call `clear_now`."""
        late = handle.arrived and self._clock() - max(handle.arrived, handle.held) > self._slowest
        return bool(self.broken or late)

    def clear_now(self, handle: ReceiveHandle) -> None:
        """Clear all rows of the request in the caller's thread, and make it cold. Nothing else
        writes to them afterwards. While an earlier forward may still write them, do nothing: the
        caller polls again. If that forward's end stays unknown too long, the request fails."""
        opened = handle.opened
        try:
            if handle.event is not None and not ((over := handle.event.query()) and handle.held):
                # give the thread its time again, or ENDING if the forward may be over for long
                handle.held = self._clock() - (self._slowest - ENDING if over else 0)
                return
        except Exception as error:
            if handle.arrived and self._clock() - handle.arrived > 2 * self._slowest:
                handle.gate.close()
                self._decide(handle, act.State.FAILED, f"an earlier forward: {error!r}")
            return
        logger.error(
            "[MIXKV-SELF-01] SGLang's scheduler clears room %s, since the draft channel did not "
            "decide it; its drafter is cold",
            opened.bootstrap_room,
        )
        try:
            handle.gate.close()
            if self._store is not None:
                self._store.rows.clear(handle.rows(opened.first_token, opened.end))
            self._decide(handle, act.State.COLD, ColdReason.BROKEN)
        except Exception as error:
            self._decide(handle, act.State.FAILED, repr(error))

    def _decide(self, handle: ReceiveHandle, state: act.State, reason: str) -> None:
        """Set `state` last, since the scheduler polls it."""
        handle.reason, handle.decided, handle.state = reason, self._clock(), state

    # -- the channel thread

    def _must_poll(self) -> bool:
        return bool(self._held) or (self._store is not None and self._store.plane.busy)

    def _poll(self, ready: list[Any]) -> Iterator[Call]:
        if self._held:
            self._start(())
        for ended in self._links.ended():
            yield self._machine.read_ended, ended
        for peer, message in self._links.received(ready):
            if isinstance(message, ValueError):
                self._reporter(Note("unreadable", peer, str(message)))
                if peer not in self._links:
                    yield self._machine.peer_lost, (peer, True)
            elif isinstance(message, Ready):
                if message.last:
                    self._compare(message, peer)
                yield self._machine.ready, (peer, message)
            elif isinstance(message, Fail):
                yield self._machine.failed, (peer, message)

    def _drop(self, peer: Peer) -> None:
        """Drop a peer. A send that finds no link does not drop its peer."""
        self._links.drop(peer)
        self._machine.peer_lost(peer, True)

    def _do(self, action: act.Action) -> None:
        match action:
            case Send(peer, message):
                if isinstance(message, Open):
                    message = replace(message, weights=self._reporter.weights())
                    messages.decode(messages.encode(message))  # checks SGLang's numbers
                if not self._links.send(peer, message):
                    self._call(self._machine.peer_lost, peer, peer not in self._links)
                    self._check_peer(peer)
            case act.StartRead():
                if not self._links.read(action):
                    self._call(self._machine.read_ended, action, "the prefill rank is gone")
            case StartCopies(jobs):
                self._start(map(self._copy_of, jobs))
            case act.Verdict(ReceiveHandle() as handle, state, reason):
                if handle.state is None:
                    self._decide(handle, state, reason)
            case act.Forget(peer):
                self._forget_peer(peer)
            case Note():
                self._reporter(action)

    def _start(self, copies: Iterable[Copy]) -> None:
        """Start these copies and those held back, except to rows that an earlier forward may still
        write. If that is unknown, copies of segments fail, and zeros wait until it is known."""
        made = [*copies]
        ready = [copy for copy in made if not copy.pages.events]
        if len(ready) < len(made):
            self._held += [(copy.gate, copy.pages, copy) for copy in made if copy.pages.events]
        for copy, error in self._held.release(_is_unwanted) if self._held else ():
            if _is_unwanted(copy):
                self._call(self._machine.copied, (copy.job,), None)
            elif error is None:
                ready.append(copy)
            elif copy.kind == "clear":
                self._held.append((copy.gate, copy.pages, copy))
            else:
                self._call(self._machine.copied, (copy.job,), error)
        if ready:
            assert self._copies is not None
            self._copies.start(ready)

    def _copy_of(self, job: Job) -> Copy:
        handle, first = job.request.opened.handle, job.request.opened.first_token
        assert isinstance(handle, ReceiveHandle)
        request = job, handle.gate, handle.pages
        if isinstance(job, act.Clear):
            assert self._store is not None
            tokens = job.first_token - first, job.end - job.first_token
            return Copy("clear", *request, *tokens, self._store.rows.heads)
        one, heads = job.announced, job.transfer.source.heads
        tokens = job.first - first, one.count
        return Copy("unpack", *request, *tokens, heads, job.slot, one.stamp)


def _is_unwanted(copy: Copy) -> bool:
    """Return whether a copy is of a segment of a cold request, whose rows are zeroed anyway."""
    return copy.kind == "unpack" and not copy.job.request.wants
