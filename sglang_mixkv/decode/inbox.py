"""A decode rank's channel thread: the sockets, the reads and the state machine are its own.

SGLang's scheduler calls `open`, `target_arrived` and `close`, and reads `Entry.state`. Threads of
the caller's call `dial` and `add` for each prefill rank before its first room, and `drop` once its
server is gone. The channel thread feeds
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
from sglang_mixkv.decode.peers import Link, Peers
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


class _Drop(NamedTuple):
    peer: ev.Peer


class Inbox:
    """`store`: None on a rank without a drafter, which opens rooms and reads nothing.

    `forget` takes a peer that was restarted, `lost` one that a message could not be sent to. Both
    run in the channel thread, and must neither block nor raise.
    """

    def __init__(
        self,
        rooms: Rooms,
        store: Store | None,
        times: Times,
        notes: Notes,
        forget: Callable[[ev.Peer], None],
        lost: Callable[[ev.Peer], None] = lambda _: None,
    ) -> None:
        self._rooms, self._notes, self._forget, self._lost = rooms, notes, forget, lost
        self._inlet: Inlet[ev.Event | Link | _Drop] = Inlet()
        self._entries: dict[ev.Generation, Entry] = {}
        self._waiting: dict[ev.Generation, Any] = {}  # forward events
        self._counter = itertools.count(1)
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

    # -- any thread

    def dial(self, row: Row, server: str = "") -> Link:
        """To a prefill rank with a drafter, for `add` or `hang_up`. May block; raises where it
        cannot be reached. `server`: whose row it is, by its bootstrap address."""
        dealer = self._peers.dial(row.address)
        try:
            memory = self._fetches.connect(row) if self._fetches is not None else None
        except BaseException:
            dealer.close()
            raise
        return Link(ev.peer_of(row.instance, server), row, dealer, memory)

    def hang_up(self, link: Link) -> None:
        """One that was not added."""
        link.dealer.close()
        if self._fetches is not None:
            self._fetches.hang_up(link.memory)

    def add(self, link: Link) -> None:
        """Rooms that are opened from here on can name this peer, until it is dropped."""
        self._inlet.put(link)

    def drop(self, peer: ev.Peer) -> None:
        """Its socket and what the data plane has of it. Rooms that still wait for rows of it are
        cold: its server is gone, so that waiting for the deadline would gain nothing."""
        self._inlet.put(_Drop(peer))

    def knows(self, peer: ev.Peer) -> bool:
        return peer in self._peers

    # -- the scheduler's thread

    def new_generation(self) -> ev.Generation:
        """Greater than all before; the low half cannot be guessed."""
        return (next(self._counter) & 0x7FFFFFFF) << 32 | messages.draw() & 0xFFFFFFFF

    def open(self, entry: Entry) -> None:
        self._entries[entry.opened.generation] = entry
        self._inlet.put(entry.opened)

    def target_arrived(self, entry: Entry) -> None:
        """From now on draft KV is waited for, unless it was there before."""
        if not entry.arrived:
            entry.arrived = True
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

    def clear_now(self, entry: Entry) -> None:
        """For a rank whose threads have ended."""
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
        self._peers.poller.register(self._inlet.fileno())
        looks, ticked = Looks(self._peers.poller, TICK), 0.0
        try:
            while not self._stopping:
                ready = looks.wait(bool(self._waiting) or self._is_reading)
                for event in self._inlet.take(self._inlet.fileno() in ready):
                    match event:
                        case Link():
                            self._add_peer(event)
                        case _Drop():
                            self._drop_peer(event.peer)
                        case _:
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

    def _add_peer(self, link: Link) -> None:
        self._peers.add(link.peer, link.dealer)
        if self._fetches is not None:
            self._fetches.add(link)

    def _drop_peer(self, peer: ev.Peer) -> None:
        self._peers.drop(peer)
        if self._fetches is not None:
            self._fetches.drop(peer)
        self._handle(ev.PeerLost(peer, gone=True))

    def _handle(self, event: ev.Event) -> None:
        try:
            self._watch(event)
            for action in self._rooms.handle(event, time.monotonic()):
                self._do(action)
        except Exception:
            logger.exception("[MIXKV-SELF-01] the draft channel failed over %r", type(event))

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
                    gone = action.peer not in self._peers
                    self._inlet.put(ev.PeerLost(action.peer, gone))
                    self._lost(action.peer)
            case ev.Verdict():
                self._decide(action)
            case ev.Forget():
                self.drop(action.peer)
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
        self._notes(ev.Note(verdict.state.value))
        self._notes.publish()
        entry = self._entries.get(verdict.generation)
        if entry is not None:
            entry.reason = verdict.reason
            entry.state = verdict.state


def _is_done(event: Any) -> bool:
    try:
        return bool(event.query())
    except Exception:  # a CUDA error: copying will meet it as well
        return True
