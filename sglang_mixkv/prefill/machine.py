r"""A prefill rank's state machine: calls in, actions out, time as an argument. No I/O.

A Request is one request on this rank, a *room* in logs and metrics. It has a ReaderTransfer for
each reader, a decode rank. An OPEN may arrive before SGLang creates the sender; it is retained
until then. A request's chunks wait for its readers, and are cut into segments that fit a slot:

    ReaderTransfer   opened --copy--> packing --READY--> ... --last READY--> ended
                         \__________________ FAIL, either way _______________/

A request's pages are *released* once all its readers have opened it and every transfer has ended.
The sender's Success waits only for this, so that no page is freed while it is being packed. Slots
are read and acknowledged later. If packing makes no progress after SGLang's own transfer, it is
given up: the readers are notified, and the request continues. Prefill never fails a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from sglang_mixkv.channel.actions import Note, Send, StartCopies
from sglang_mixkv.channel.messages import Ack, Fail, Message, Open, Ready, fail
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.draft.copier import Outcome
from sglang_mixkv.draft.slot_format import SlotCheck
from sglang_mixkv.prefill.actions import Action, PagesReleased
from sglang_mixkv.prefill.transfer import Chunk, Packing, ReaderTransfer, Request, Segment

MAX_OPEN, MAX_ALL = 1 << 15, 1 << 17
"""The maximum number of transfers per connection, and in total. Each takes some 500 bytes. Anyone
who can reach the port can invent readers, so the limit is per connection, not per reader."""
RESTORED = "snapshot", "this prefill rank was restored from a snapshot"
STEP = 1.0  # the most that a rank's clock advances between two calls


class Machine:
    """All requests of one prefill rank. `heads`: this rank's draft heads. `segment_tokens`: called
    with a number of heads and a reader's slot size; returns how many tokens with these heads fit
    both that slot and a slot of this rank. `draw_stamp`: see Packing."""

    def __init__(
        self, instance: bytes, heads: range, segment_tokens: Callable[[int, int], int],
        slots: SlotPool, times: Times, draw_stamp: Callable[[], int],
    ) -> None:  # fmt: skip
        self._instance, self._heads, self._times = instance, heads, times
        self._segment_tokens, self.slots = segment_tokens, slots
        self._packing = Packing(slots, draw_stamp)
        self._requests: dict[Hashable, Request] = {}
        self._current: dict[int, Request] = {}  # by number: the newest sender's
        self._early: dict[int, Request] = {}  # by number: opened, but without a sender yet
        self._transfers: dict[int, ReaderTransfer] = {}  # by generation
        self._open: Counter[bytes] = Counter()  # transfers of each connection
        self._out: list[Action] = []
        self._clock, self._seen, self._restored = 0.0, float("inf"), False

    def advance(self, now: float) -> None:
        """Advance the clock; call this before each method below. The clock stops while the process
        is stopped: the time for an ACK starts when READY is sent, and a stopped process sends it
        only when it resumes."""
        step, self._seen = now - self._seen, now
        if step > 0:
            self._clock += step if step < STEP else STEP

    def actions(self) -> list[Action]:
        """Return the actions since the last call, in the order in which to carry them out."""
        packing = self._packing
        for transfer, ready, chunks in packing.announce(self._clock) if packing.announcing else ():
            transfer.request.progress = self._clock
            self._out.append(Send(transfer.connection, ready, chunks))
            if ready.last:
                self._release_pages(transfer.request)
        if packing.turns.owners and (segments := packing.start()):
            self._out.append(StartCopies(segments))
        actions, self._out = self._out, []
        return actions

    # -- SGLang's side

    def begin(self, handle: Hashable, number: int) -> None:
        """Begin a room, for which SGLang has made a sender. PagesReleased follows, unless ended."""
        stale = self._current.get(number)
        if stale is not None:
            self._fail(stale.transfers.values(), "aborted", "another request has its room number")
        request = self._early.pop(number, None) or Request(number, self._clock)
        request.handle, request.progress = handle, self._clock
        self._current[number] = self._requests[handle] = request
        self._release_pages(request)

    def add_chunk(
        self, handle: Hashable, first: int, count: int, last: bool, pages: Any = None
    ) -> None:
        """Add a chunk whose KV is written: tokens [first, first + count) of the prompt, in `pages`.
        `last`: no chunk follows. Chunks of a request must be added in the order of the prompt."""
        if (request := self._requests.get(handle)) is not None:
            request.chunks.append(Chunk(first, count, last, pages))
            self._packing.add(request.transfers.values())

    def target_sent(self, handle: Hashable) -> None:
        """Record that SGLang's transfer succeeded. Packing without progress is then given up."""
        request = self._requests.get(handle)
        if request is not None and request.sent is None:
            request.sent = self._clock
            self._release_pages(request)

    def end(self, handle: Hashable, reason: str = "") -> None:
        """Forget a sender that has ended; its gate is closed. `reason`: why it failed."""
        request = self._requests.pop(handle, None)
        if request is None:
            return
        self._fail(request.transfers.values(), "aborted", reason or "the sender was cleared")
        for transfer in request.transfers.values():
            self._forget(transfer)
        if self._current.get(request.number) is request:
            del self._current[request.number]

    # -- readers

    def received(self, connection: bytes, message: Message) -> None:
        """Handle a reader's message. `connection`: the address for replies."""
        match message:
            case Open() as opened:
                self._opened(connection, opened)
            case Ack(slots):
                for slot in self.slots.acknowledge(slots, self._clock):
                    self._out.append(Note("unknown_ack", b"", f"slot {slot}"))
            case Fail(generation=generation):
                if (transfer := self._transfers.get(generation)) is not None:
                    self._over(transfer)

    def unsent(self, message: Ready | Fail) -> None:
        """Handle a message that could not be sent."""
        if isinstance(message, Ready):
            self.slots.acknowledge((one.slot, one.stamp) for one in message.segments)
        if (transfer := self._transfers.get(message.generation)) is not None:
            self._over(transfer)

    def _opened(self, connection: bytes, opened: Open) -> None:
        number, reader, generation = opened.room, opened.reader, opened.generation
        wanted = opened.wanted
        limit = self._segment_tokens(len(wanted), opened.slot_bytes) if wanted else 0
        if why := self._refusal(opened, wanted, limit):
            self._refuse(connection, opened, *why)
            return
        if generation in self._transfers:
            return  # a repeated OPEN
        request = self._current.get(number)
        is_next = request is None or not request.expects(reader)
        for at in (request, self._early.get(number)):
            former = at.transfers.get(reader) if at is not None else None
            if former is not None:  # the reader has begun another request with this number
                if former.opened.generation > generation:
                    return  # this OPEN is late
                self._over(former)
                if former.request.handle is None:
                    del former.request.transfers[reader]
                    self._forget(former)
        if self._open[connection] >= MAX_OPEN or len(self._transfers) >= MAX_ALL:
            self._refuse(connection, opened, "full", "too many of its rooms are open")
            return
        if request is None or is_next:
            request = self._early.pop(number, None) or Request(number, self._clock)
            self._early[number] = request  # the least recently opened is first
        transfer = ReaderTransfer(request, opened, connection, wanted, limit)
        request.transfers[reader] = self._transfers[generation] = transfer
        request.readers, request.progress = max(request.readers, opened.readers), self._clock
        self._open[connection] += 1
        self.slots.sign(reader, self._clock)
        self._packing.add((transfer,))
        self._release_pages(request)

    def _refusal(self, opened: Open, wanted: range, limit: int) -> tuple[str, str] | None:
        """Return a code and a detail to refuse an OPEN, or None. `limit`: tokens per segment."""
        held = self._heads
        if opened.prefill != self._instance:
            return "restarted", "this prefill rank is not the instance addressed"
        if wanted and not (held.start <= wanted.start and wanted.stop <= held.stop):
            return "heads", f"heads {list(opened.heads)} of a rank with {held.start}..{held.stop}"
        if wanted and limit < 1:
            return "heads", "a token is larger than a slot; raise --mixkv-staging-mb"
        return RESTORED if wanted and self._restored else None

    def _refuse(self, connection: bytes, opened: Open, code: str, detail: str) -> None:
        self._out.append(Note(code, opened.reader, detail))
        self._out.append(Send(connection, fail(opened.room, opened.generation, code, detail)))

    def _forget(self, transfer: ReaderTransfer) -> None:
        del self._transfers[transfer.opened.generation]
        self._open[transfer.connection] -= 1
        if not self._open[transfer.connection]:
            del self._open[transfer.connection]

    def connection_lost(self, connection: bytes) -> None:
        """End the transfers of a lost connection. Messages already sent may have arrived."""
        for transfer in [t for t in self._transfers.values() if t.connection == connection]:
            self._over(transfer)

    def restored(self) -> None:
        """Serve no reader from now on, since none can read the slots of this rank any more."""
        self._restored = True
        self._fail(self._transfers.values(), *RESTORED)
        for request in self._requests.values():
            self._release_pages(request)

    # -- transfers

    def _over(self, transfer: ReaderTransfer) -> None:
        """End a transfer: pack and announce nothing more for its reader."""
        if not transfer.ended:
            transfer.ended = True
            self._packing.drop(transfer)
            self._release_pages(transfer.request)

    def _fail(self, transfers: Iterable[ReaderTransfer], code: str, detail: str) -> None:
        for transfer in transfers:
            if not transfer.ended:
                self._refuse(transfer.connection, transfer.opened, code, detail)
                self._over(transfer)

    def _release_pages(self, request: Request, given_up: bool = False) -> None:
        if request.handle is None or request.pages_released:
            return
        ended = [transfer.ended for transfer in request.transfers.values()]
        if given_up or self._restored or (len(ended) >= request.readers and all(ended)):
            request.pages_released = True
            self._out.append(PagesReleased(request.handle))

    # -- packing

    def copied(self, segments: Sequence[Segment], outcome: Outcome = SlotCheck.OK) -> None:
        """Record that these segments' copies have ended. If OK, their bytes are in the slots."""
        if failed := self._packing.end(segments, outcome):
            self._fail(failed, "pack", repr(outcome)[:300])

    # -- time

    def tick(self) -> None:
        """Handle all deadlines. Call this at least ten times a second while a room is open."""
        for request in self._requests.values():
            if request.sent is None or request.pages_released:
                continue
            progress = min(request.progress, request.sent + self._times.whole_wait)
            if self._clock - max(request.sent, progress) >= self._times.packing:
                self._give_up(request)
        while self._early:
            request = next(iter(self._early.values()))
            if self._clock - request.progress < self._times.early_room:
                break
            del self._early[request.number]
            for transfer in request.transfers.values():
                self._forget(transfer)
                if not transfer.ended:
                    detail = f"room {request.number}: no request came"
                    self._out.append(Note("early", transfer.reader, detail))
        for slot in self.slots.expire(self._clock):
            self._out.append(Note("expired", b"", f"slot {slot} was never acknowledged"))

    def _give_up(self, request: Request) -> None:
        if request.missing > 0:
            detail = f"room {request.number}: {request.missing} readers have not opened it"
            self._out.append(Note("unopened", b"", detail))
        self._fail(request.transfers.values(), "slow", "packing made no progress")
        self._release_pages(request, given_up=True)

    def on_action_failed(self, action: Action, error: Exception) -> None:
        match action:
            case StartCopies(segments):
                self.copied(segments, error)
            case Send(message=Ready() | Fail() as message):
                self.unsent(message)
