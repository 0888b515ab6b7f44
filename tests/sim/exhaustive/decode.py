"""A decode rank, its threads, its pool's rows, its connection, and SGLang's receivers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.decode import events as dv
from sglang_mixkv.prefill import events as pv
from tests.sim.exhaustive.machine import Machine, Steps
from tests.sim.exhaustive.values import (
    INSTANCES,
    OLD,
    ROOM,
    ZERO,
    Case,
    Read,
    Reader,
    Seat,
    View,
    put,
    require,
    text,
)


class DecodeSide:
    """What can happen on a decode rank, the reader. `view`: what it sees of prefill."""

    def __init__(self, case: Case, rooms: type[Any]) -> None:
        self.case, self.machine, self.times = case, Machine(), Steps()
        self._rooms = rooms

    def start(self, rank: int) -> Reader:
        slots = SlotPool(self.case.local_slots, self.times)
        rooms = self._rooms(b"decode_%d" % rank, slots, self.case.tokens, self.times)
        return Reader(rank, self.machine.number(rooms, 100.0), (None,) * self.case.local_slots)

    def handle(self, reader: Reader, view: View, event: Any, seconds: float = 0.0) -> Reader:
        machine, actions = self.machine.handle(reader.machine, event, seconds)
        reader = reader._replace(machine=machine)
        for action in actions:
            reader = self._do(reader, view, action)
        return reader

    def _do(self, reader: Reader, view: View, action: Any) -> Reader:
        match action:
            case dv.Send():
                event = pv.Received((reader.rank, reader.connection), action.message)
                return reader._replace(up=(*reader.up, event))
            case dv.StartRead():
                return self._start_read(reader, view, action)
            case dv.Copy(jobs):
                copies = tuple((job, None) for job in jobs)
                return reader._replace(copies=reader.copies + copies)
            case dv.Verdict():
                return self._decided(reader, action)
            case dv.Forget():
                return reader._replace(forgotten=True)
        return reader

    def _start_read(self, reader: Reader, view: View, action: dv.StartRead) -> Reader:
        used = [one.local_slot for read in reader.reads for one in read.action.ranges]
        used += [job.slot for job, _ in reader.copies if isinstance(job, dv.Unpack)]
        local = reader.local
        for one in action.ranges:
            require(one.local_slot not in used, f"bytes may still land in its slot: {action}")
            local = put(local, one.local_slot, None)
        read = Read(action, tuple(view.slots[one.remote_slot] for one in action.ranges))
        return reader._replace(reads=(*reader.reads, read), local=local)

    def _decided(self, reader: Reader, verdict: dv.Verdict) -> Reader:
        seat, r = reader.seats[-1], reader.request
        require(verdict.handle == reader.generation, f"of a former request: {verdict}")
        require(not seat.verdict and not seat.closed, f"twice, or too late: {verdict}")
        for token in range(sum(self.case.prompts[r][-1])) if seat.reason is None else ():
            row, right = reader.pool[token], (r, token, reader.rank)
            fits = row == right or (verdict.state == "cold" and row == ZERO)
            require(fits, f"row {token} of reader {reader.rank} holds {row}: {verdict}")
        return reader.sit(verdict=str(verdict.state))

    def steps(self, reader: Reader, view: View, others: Any) -> Iterator[tuple[str, Reader]]:
        """`others`: of the other reader, by request, whether the request failed there."""
        if not reader.alive:
            return
        name = f"decode {reader.rank}, request {reader.request}: "
        if reader.down:
            after = self.receive(reader._replace(down=reader.down[1:]), view, reader.down[0])
            yield f"decode {reader.rank} gets {text(reader.down[0])}", after
        for n in range(len(reader.copies[: self.case.copiers])):
            yield self._copied(reader, view, n)
        for n, read in enumerate(reader.reads):
            yield from self._read_ends(reader, view, n, read)
        for what, after, event in self._sglang(reader, view):
            yield name + what, self.handle(after, view, event)
        yield from self._closings(reader, view, others)
        if reader.seats[-1].closed and len(view.failed) > len(reader.seats):
            yield name + "the number comes again", reader._replace(seats=(*reader.seats, Seat()))

    def receive(self, reader: Reader, view: View, message: Any) -> Reader:
        if isinstance(message, dv.PeerLost):
            return self.handle(reader, view, message)
        peer = reader.seats[min(message.generation // 10, len(reader.seats)) - 1].peer
        return self.handle(reader, view, dv.Received(peer, message))

    def _sglang(self, reader: Reader, view: View) -> Iterator[tuple[str, Reader, Any]]:
        seat, r, generation = reader.seats[-1], reader.request, reader.generation
        if seat.closed:
            return
        if not seat.peer:
            peer, end = INSTANCES[reader.forgotten], sum(self.case.prompts[r][-1]) + 1
            rank, pending = reader.rank, self.case.pending and reader.rank == 1
            source = dv.Source(
                peer, range(rank, rank + 1), 2, self.case.slots, self.case.tokens
            )  # fmt: skip
            event = dv.OpenRoom(
                generation, ROOM, (source,), 0, end, pending=pending, handle=generation, page_size=2
            )
            after = reader._replace(pool=(OLD,) * end).sit(peer=peer, pending=pending)
            yield "opens", after, event
            return
        if seat.pending:
            yield "the forward is done", reader.sit(pending=False), dv.ForwardDone(generation)
        if seat.reason is not None:
            event = dv.CloseRoom(generation, seat.reason)
            yield "closes", reader.sit(closed=True), event
        elif not seat.arrived and view.arriving[r]:
            yield "the target arrives", reader.sit(arrived=True), dv.TargetArrived(generation)

    def _closings(self, reader: Reader, view: View, others: Any) -> Iterator[tuple[str, Reader]]:
        seat, r = reader.seats[-1], reader.request
        if not seat.peer or seat.reason is not None:
            return
        if seat.arrived and seat.verdict in ("warm", "cold"):
            yield from self._close_gate(reader, view, "")
        elif view.failed[r] or seat.verdict == "failed" or (r < len(others) and others[r]):
            yield from self._close_gate(reader, view, "the group failed")

    def _close_gate(self, reader: Reader, view: View, reason: str) -> Iterator[tuple[str, Reader]]:
        """Copies that were made before, and whose end was not handled yet, stay made."""
        for made in range(len(reader.copies) + 1):
            after = reader
            for n in range(made):
                after, result = self._copy(after, view, n)
                after = after._replace(copies=put(after.copies, n, (after.copies[n][0], result)))
            what = f"decode {reader.rank}: the gate closes after {made} copies ({reason})"
            yield what, after.sit(reason=reason)._replace(pool=())

    def _read_ends(
        self, reader: Reader, view: View, n: int, read: Read
    ) -> Iterator[tuple[str, Reader]]:
        if read.state == "hanging":
            return
        number, name = read.action.read, f"decode {reader.rank}: read {read.action.read} "
        after = reader._replace(reads=reader.reads[:n] + reader.reads[n + 1 :])
        if read.state == "late":
            yield name + "fails", self.handle(after, view, dv.ReadEnded(number, "failed"))
        for one, content in zip(read.action.ranges, read.contents, strict=True):
            if view.slots[one.remote_slot] == content:
                after = after._replace(local=put(after.local, one.local_slot, content))
        yield name + "is done", self.handle(after, view, dv.ReadEnded(number))

    def late(self, reader: Reader) -> Reader:
        """Time has passed: a read that hangs may end now."""
        reads = (r._replace(state="late") if r.state == "hanging" else r for r in reader.reads)
        return reader._replace(reads=tuple(reads))

    def _copied(self, reader: Reader, view: View, n: int) -> tuple[str, Reader]:
        after, result = self._copy(reader, view, n)
        action = reader.copies[n][0]
        after = after._replace(copies=reader.copies[:n] + reader.copies[n + 1 :])
        what = f"decode {reader.rank}: {type(action).__name__} {action.job}: {result}"
        return what, self.handle(after, view, dv.Copied((action.job,), result))

    def _copy(self, reader: Reader, view: View, n: int) -> tuple[Reader, dv.Result]:
        """What the copying thread does, through the gate."""
        (action, made), seat = reader.copies[n], reader.seats[-1]
        if made is not None:
            return reader, made
        if seat.reason is not None or action.handle != reader.generation:
            return reader, dv.Result.CLOSED
        require(not seat.verdict, f"rows are written after the verdict: {action}")
        if isinstance(action, dv.Clear):
            rows = [ZERO] * (action.end - action.first_token)
        else:
            content = reader.local[action.slot]
            if content is None or content.stamp != action.stamp:
                require(view.restarted, f"its slot was used again during the read: {action}")
                return reader, dv.Result.STALE
            rows = [(content.use, content.first + k, content.head) for k in range(action.tokens)]
        first = action.first_token
        pool = (*reader.pool[:first], *rows, *reader.pool[first + len(rows) :])
        return reader._replace(pool=pool), dv.Result.DONE

    def faults(self, reader: Reader, view: View) -> Iterator[tuple[str, Reader]]:
        if reader.alive:
            for kind in self.case.faults:
                for what, after in getattr(self, "_fault_" + kind, _none)(reader, view):
                    yield f"{what} (reader {reader.rank})", after

    def _fault_break(self, reader: Reader, view: View) -> Iterator[tuple[str, Reader]]:
        """Messages on their way are lost. Prefill notices when it sends, decode does not."""
        connection = reader.connection + 1
        yield "the connection breaks", reader._replace(up=(), down=(), connection=connection)
        up = (pv.ConnectionLost((reader.rank, reader.connection)),)
        down = (dv.PeerLost(reader.seats[-1].peer or INSTANCES[0]),)
        after = reader._replace(up=up, down=down, connection=connection)
        yield "the connection breaks, and both notice", after

    def _fault_double(self, reader: Reader, view: View) -> Iterator[tuple[str, Reader]]:
        """A message is handled, and comes once more behind the others."""
        if reader.down and not isinstance(reader.down[0], dv.PeerLost):
            rest = (*reader.down[1:], reader.down[0])
            after = self.receive(reader._replace(down=rest), view, reader.down[0])
            yield f"decode gets {text(reader.down[0])}, and again", after

    def _fault_fail(self, reader: Reader, view: View) -> Iterator[tuple[str, Reader]]:
        for n, read in enumerate(reader.reads):
            if read.state == "running":
                after = reader._replace(reads=reader.reads[:n] + reader.reads[n + 1 :])
                event = dv.ReadEnded(read.action.read, "failed")
                yield f"read {event.read} fails", self.handle(after, view, event)

    def _fault_hang(self, reader: Reader, view: View) -> Iterator[tuple[str, Reader]]:
        for n, read in enumerate(reader.reads):
            if read.state == "running":
                reads = put(reader.reads, n, read._replace(state="hanging"))
                yield f"read {read.action.read} hangs", reader._replace(reads=reads)

    def _fault_close(self, reader: Reader, view: View) -> Iterator[tuple[str, Reader]]:
        if reader.seats[-1].peer and reader.seats[-1].reason is None:
            yield from self._close_gate(reader, view, "aborted")

    def _fault_die(self, reader: Reader, view: View) -> Iterator[tuple[str, Reader]]:
        yield "it dies", reader._replace(alive=False, down=(), reads=(), copies=(), pool=())

    def check_end(self, reader: Reader) -> None:
        if not reader.alive:
            return
        left, rank = self.machine.left[reader.machine], reader.rank
        require(reader.seats[-1].closed, f"reader {rank} is never done: {reader.seats}")
        require(not left and not reader.reads, f"left on decode {rank}: {left}, {reader.reads}")


def _none(reader: Reader, view: View) -> tuple[()]:
    return ()
