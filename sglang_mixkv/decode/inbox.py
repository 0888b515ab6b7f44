"""A decode rank's channel thread: the sockets, the reads and the state machine are its own.

SGLang's scheduler calls `open`, `target_arrived` and `close`, and reads `Entry.state`. A thread of
the caller's calls `connect` for each prefill rank before its first room. The channel thread feeds
the machine, sends what it asks for, starts reads and looks after them, and asks the events that
rooms wait for; rows are copied by another (copier.py). Neither decides anything, neither raises. If
one of them could not go on, rooms are cleared in the scheduler's thread, and are cold.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.data_plane import DataPlane
from sglang_mixkv.channel.messages import Fail, Ready
from sglang_mixkv.channel.notes import Notes
from sglang_mixkv.channel.sockets import Inlet, Looks
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as ev
from sglang_mixkv.decode.copier import Copier, Entry
from sglang_mixkv.decode.fetches import Fetches
from sglang_mixkv.decode.peers import Dealer, Peers
from sglang_mixkv.decode.rooms import Rooms
from sglang_mixkv.draft.facts import Row

if TYPE_CHECKING:
    from sglang_mixkv.draft.rows import DraftRows, Staging

logger = logging.getLogger(f"sglang.{__name__}")

TICK = 0.1  # seconds


class Store(NamedTuple):
    """Where draft KV goes on a rank with a drafter."""

    rows: DraftRows
    staging: Staging
    plane: DataPlane


class _Connected(NamedTuple):
    row: Row
    dealer: Dealer
    link: Any


class Inbox:
    """`store`: None on a rank without a drafter, which opens rooms and reads nothing. `forget`:
    takes a peer of which another instance is at the same address; it must not raise."""

    def __init__(
        self,
        rooms: Rooms,
        store: Store | None,
        times: Times,
        notes: Notes,
        forget: Callable[[ev.Peer], None],
    ) -> None:
        self._rooms, self._notes, self._forget = rooms, notes, forget
        self._store, self._longest = store, 2 * times.whole_wait
        self._inlet: Inlet[ev.Event | _Connected] = Inlet()
        self._entries: dict[ev.Generation, Entry] = {}
        self._waiting: dict[ev.Generation, Any] = {}  # forward events
        self._counter = itertools.count(messages.draw() >> 33)  # 30 bits
        self._peers = Peers(times)
        self._fetches = Fetches(store.plane, store.rows, store.staging) if store else None
        self._copier = (
            Copier(store.rows, store.staging, self._entries, self._inlet.put, notes.moved)
            if store
            else None
        )
        self._broken, self._stopping = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="mixkv-inbox", daemon=True)
        self._thread.start()

    # -- a background thread of the caller's

    def connect(self, row: Row) -> None:
        """To a prefill rank with a drafter. May block; raises where it cannot be reached."""
        dealer = self._peers.dial(row)
        try:
            link = self._fetches.connect(row) if self._fetches is not None else None
        except BaseException:
            dealer.close()
            raise
        self._inlet.put(_Connected(row, dealer, link))

    def knows(self, peer: ev.Peer) -> bool:
        return peer in self._peers

    # -- the scheduler's thread

    def new_generation(self) -> ev.Generation:
        """Greater than all before; the low half cannot be guessed.

        The counter has 31 bits and begins below 2^30, so that it rises for at least 2^30 uses: at
        20 requests a second for 20 months. Two ranks of n uses each meet in the high half only
        where they began within n of each other, by a chance of n / 2^29, and then in at most n
        pairs of uses, whose low halves are equal by 2^-32 each: n^2 / 2^61, or 4 in 10 million for
        a million uses, even if all of them were open at once. Counters that all began at 1 would
        make it n / 2^32, 2 in 10 thousand, for each pair of ranks.
        """
        return (next(self._counter) & 0x7FFFFFFF) << 32 | messages.draw() & 0xFFFFFFFF

    def open(self, entry: Entry) -> None:
        self._entries[entry.opened.generation] = entry
        self._inlet.put(entry.opened)

    def target_arrived(self, entry: Entry) -> None:
        """From now on draft KV is waited for, unless it was there before."""
        if entry.arrived is None:
            entry.arrived = time.monotonic()
            if entry.state is None:
                # it starts a clock: the next event or tick is soon enough
                self._inlet.put(ev.TargetArrived(entry.opened.generation), wake=False)

    def close(self, entry: Entry, reason: str = "") -> None:
        """When this returns, nothing of the room is written any more. Idempotent."""
        if entry.closed:
            return
        entry.closed = True
        entry.gate.close()
        self._entries.pop(entry.opened.generation, None)
        hurry = bool(reason) or entry.state is None
        self._inlet.put(ev.CloseRoom(entry.opened.generation, reason), wake=hurry)
        self._notes.ended(entry, reason)

    def is_lost(self, entry: Entry) -> bool:
        """Whether the channel will not decide this room: its threads have ended, or it has taken
        twice as long as it may. The scheduler has to `clear_now` then."""
        since = entry.arrived
        return self.broken or (since is not None and time.monotonic() - since > self._longest)

    def clear_now(self, entry: Entry) -> None:
        """In the scheduler's thread."""
        logger.error("[MIXKV-SELF-01] room %s is cleared by SGLang's scheduler, since the draft "
                     "channel did not decide it", entry.opened.bootstrap_room)  # fmt: skip
        if self._copier is not None:
            self._copier.clear_now(entry)
        else:
            entry.state = ev.State.WARM

    @property
    def broken(self) -> bool:
        copying = self._copier is None or self._copier.thread.is_alive()
        return self._broken.is_set() or not copying

    def left(self) -> dict[str, int]:
        return self._rooms.left()

    def check(self) -> list[str]:
        """For an idle rank."""
        found = ["a thread of the draft channel has ended"] if self.broken else []
        return found + [f"{count} {name} left" for name, count in self.left().items()]

    def shut(self) -> None:
        self._stopping = True
        self._inlet.wake()
        self._thread.join(2)
        if self._copier is not None:
            self._copier.close()
        if self._fetches is not None:
            self._fetches.close()
        self._peers.close()
        self._inlet.close()

    # -- the channel thread

    def _run(self) -> None:
        if self._store is not None:
            self._store.rows.use_device()
        self._peers.poller.register(self._inlet.fileno())
        looks, ticked = Looks(self._peers.poller, TICK), 0.0
        try:
            while not self._stopping:
                ready = looks.wait(bool(self._waiting) or self._is_reading)
                for event in self._inlet.take(self._inlet.fileno() in ready):
                    if isinstance(event, _Connected):
                        self._add_peer(event)
                    else:
                        self._handle(event)
                self._look_after(ready)
                if time.monotonic() - ticked >= TICK:
                    ticked = time.monotonic()
                    self._handle(ev.Tick())
                    self._notes.ticked()
        except Exception:
            logger.exception("[MIXKV-SELF-01] the draft channel of this rank ends")
        finally:
            self._broken.set()

    @property
    def _is_reading(self) -> bool:
        return self._fetches is not None and self._fetches.busy

    def _look_after(self, ready: list[Any]) -> None:
        for generation in [g for g, event in self._waiting.items() if _is_done(event)]:
            del self._waiting[generation]
            self._handle(ev.ForwardDone(generation))
        if self._fetches is not None:
            for ended in self._fetches.ended():
                self._handle(ended)
        for peer, message in self._peers.received(ready):
            if isinstance(message, ValueError):
                self._notes(ev.Note("unreadable", peer, str(message)))
            elif isinstance(message, Ready | Fail):
                self._handle(ev.Received(peer, message))

    def _add_peer(self, connected: _Connected) -> None:
        for former in self._peers.add(connected.row, connected.dealer):
            if self._fetches is not None:
                self._fetches.drop(former)
            self._handle(ev.PeerLost(former))
        if self._fetches is not None:
            self._fetches.add(connected.row, connected.link)

    def _handle(self, event: ev.Event) -> None:
        try:
            self._watch(event)
            actions = self._rooms.handle(event, time.monotonic())
        except Exception:
            logger.exception("[MIXKV-SELF-01] the draft channel failed over %r", type(event))
            return
        for action in actions:
            try:
                self._do(action)
            except Exception as error:  # the other actions are done all the same
                logger.exception("[MIXKV-SELF-01] the draft channel failed over %r", type(action))
                self._inlet.put(ev.ActionFailed(action, repr(error)[:300]))

    def _watch(self, event: ev.Event) -> None:
        """The forward event of a room, from its opening to its end."""
        if isinstance(event, ev.OpenRoom) and event.pending:
            entry = self._entries.get(event.generation)
            if entry is not None:
                self._waiting[event.generation] = entry.event
        elif isinstance(event, ev.CloseRoom):
            self._waiting.pop(event.generation, None)

    def _do(self, action: ev.Action) -> None:
        match action:
            case ev.Send():
                if not self._peers.send(action.peer, action.message):
                    self._inlet.put(ev.PeerLost(action.peer))
            case ev.Verdict():
                self._decide(action)
            case ev.Forget():
                self._peers.drop(action.peer)
                if self._fetches is not None:
                    self._fetches.drop(action.peer)
                self._forget(action.peer)
            case ev.Note():
                self._notes(action)
            case ev.Unpack() | ev.Clear():
                assert self._copier is not None
                self._copier.put(action)
            case ev.StartRead():
                assert self._fetches is not None
                self._put_all(self._fetches.start(action))
            case ev.GiveUpRead():
                assert self._fetches is not None
                self._fetches.give_up(action.read)

    def _put_all(self, events: Iterable[ev.Event]) -> None:
        for event in events:
            self._inlet.put(event)

    def _decide(self, verdict: ev.Verdict) -> None:
        entry = self._entries.get(verdict.generation)
        if entry is not None and entry.state is None:
            entry.reason = verdict.reason
            entry.state = verdict.state
        self._notes(ev.Note(verdict.state.value))
        self._notes.publish()


def _is_done(event: Any) -> bool:
    try:
        return bool(event.query())
    except Exception:  # a CUDA error: copying will meet it as well
        return True
