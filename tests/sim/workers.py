"""Both workers' code on the virtual clock, without their threads, sockets and data planes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_mixkv.channel.loop import Call
from sglang_mixkv.decode.worker import DecodeWorker, ReceiveHandle
from sglang_mixkv.draft.gate import Gate
from sglang_mixkv.prefill.worker import PrefillWorker, SendHandle

if TYPE_CHECKING:
    from tests.sim.process import Process


class Blocked(BaseException):
    """Raised where SGLang's scheduler would wait in `Gate.close` for copies in flight.

    The scheduler's call is repeated from its beginning after these copies have ended.
    """


class VirtualGate(Gate):
    """A handle's gate that raises instead of waiting.

    Once `rank` is set, the rank's channel thread may run just before and after the gate closes, in
    the middle of a call of SGLang's scheduler.
    """

    rank: Process | None = None

    def try_close(self) -> bool:
        self._interrupt()
        is_closed = super().try_close()
        self._interrupt()
        return is_closed

    def _interrupt(self) -> None:
        if self.rank is not None and self.rank.interrupts():
            self.rank.on_thread(self.rank.look)

    def close(self) -> None:
        if not self.try_close():
            raise Blocked


class Sending(SendHandle):
    """A send handle with a virtual gate. `sender`: SGLang's sender."""

    sender: Any

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.gate = VirtualGate()

    def __repr__(self) -> str:
        return f"sender {self.sender.number}" if hasattr(self, "sender") else "a new sender"


class Receiving(ReceiveHandle):
    """A receive handle with a virtual gate. `request`: SGLang's receiver."""

    def __init__(self, pages: Any, page_size: int, event: Any) -> None:
        super().__init__(pages, page_size, event)
        self.gate = VirtualGate()

    def __repr__(self) -> str:
        return f"handle {self.opened.generation}"


class Event:
    """A CUDA event recorded after a forward."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over


class Store:
    """The interface to a rank's memory for its worker and its copier, and to its data plane.

    `dead`: the data plane starts no read.
    """

    dead = False

    def __init__(self, rank: Process) -> None:
        self._rank = rank
        self.rows, self.plane, self.device = self, self, None
        self.bytes_per_head = 1
        self.heads = rank.place.layout.heads

    def clear(self, rows: Any) -> None:
        """Clear rows, in SGLang's scheduler."""
        self._rank.clear_at_once(rows.tolist())


class Queue:
    """A worker's queue of calls."""

    def __init__(self, rank: Process) -> None:
        self._rank = rank

    def put(self, call: Call, wake: bool = True) -> None:
        """Queue a call, which the channel thread may take before this method returns."""
        if self._rank.interrupts() and self._rank.has_taken_all:
            self._rank.handle(call)
        else:
            self._rank.post(call)


class Quiet:
    """A reporter that records nothing."""

    def __call__(self, note: object) -> None: ...

    def weights(self) -> int:
        return 0

    def ended(self, *_: object) -> None: ...

    def moved(self, *_: object) -> None: ...

    def announced(self, *_: object) -> None: ...


class Simulated:
    """A worker without its threads, sockets and data plane, on its rank's clock."""

    broken = False

    def __init__(self, rank: Process, **fields: Any) -> None:
        self._machine, self._queue, self._reporter = rank.machine, Queue(rank), Quiet()
        self._clock = lambda: rank.time
        self._slowest = rank.place.times.last_resort
        self._store = Store(rank)
        self._copies: Any = None
        vars(self).update(fields)


class Prefill(Simulated, PrefillWorker):
    _handle = Sending


class Decode(Simulated, DecodeWorker): ...
