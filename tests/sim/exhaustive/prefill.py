"""The prefill rank, its packing thread, its slots, and SGLang's senders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_mixkv.channel.messages import Ready
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.prefill import events as pv
from tests.sim.exhaustive.machine import Machine, Steps
from tests.sim.exhaustive.values import (
    INSTANCES,
    ROOM,
    Case,
    Content,
    Front,
    Moved,
    Sender,
    View,
    put,
    require,
)


class PrefillSide:
    """What can happen on the prefill rank. `links`: how it reaches each living reader."""

    def __init__(self, case: Case, rooms: type[Any]) -> None:
        self.case, self.machine, times = case, Machine(), Steps()
        self.fresh = [
            self.machine.number(
                rooms(name, range(2), _fit, SlotPool(case.slots, times), times), 100.0
            )
            for name in INSTANCES
        ]

    def start(self) -> Front:
        return Front(self.fresh[0], (None,) * self.case.slots)

    def handle(self, front: Front, links: Any, event: Any, seconds: float = 0.0) -> Moved:
        machine, actions = self.machine.handle(front.machine, event, seconds)
        front, outs = front._replace(machine=machine), [[], []]
        for action in actions:
            match action:
                case pv.Pack(jobs):
                    for job in jobs:
                        front = self._begin_packing(front, job)
                case pv.Send():
                    outs[action.connection[0]].append(self._sent(front, links, action))
                case pv.Settled():
                    front = self._changed(front, action.use, settled=True)
        return front, tuple(map(tuple, outs))

    def _begin_packing(self, front: Front, action: pv.PackJob) -> Front:
        late = action.pages == self.case.prompts[action.handle][-1][0]
        require(front.senders[action.handle].written or not late, f"is not written yet: {action}")
        slots = put(front.slots, action.slot, None)
        return front._replace(packs=(*front.packs, action), slots=slots)

    def _sent(self, front: Front, links: Any, action: pv.Send) -> Any:
        """The message, or what prefill notices of a connection that is lost."""
        message = action.message
        for one in message.segments if isinstance(message, Ready) else ():
            content = front.slots[one.slot]
            require(content and content.stamp == one.stamp, f"is not in its slot: {message}")
        reachable = links[action.connection[0]] == action.connection
        return message if reachable else pv.ConnectionLost(action.connection)

    def _changed(self, front: Front, use: int, **changed: Any) -> Front:
        sender = front.senders[use]._replace(**changed)
        return front._replace(senders=put(front.senders, use, sender))

    def steps(self, front: Front, links: Any) -> Iterator[tuple[str, Moved]]:
        for n, job in enumerate(front.packs[: self.case.copiers]):
            after = front._replace(packs=front.packs[:n] + front.packs[n + 1 :])
            closed, first = front.senders[job.handle].ended, job.pages + job.offset
            if not closed:
                content = Content(job.stamp, job.handle, first, job.count, job.heads.start)
                after = after._replace(slots=put(front.slots, job.slot, content))
            event = pv.Packed((job.job,), closed=closed)
            yield f"stamp {job.stamp} is packed", self.handle(after, links, event)
        for use, sender in enumerate(front.senders):
            for what, changed, event in self._sglang(use, sender):
                after = self._changed(front, use, **changed)
                yield f"prefill, request {use}: {what}", self.handle(after, links, event)

    def _sglang(self, use: int, sender: Sender) -> Iterator[tuple[str, dict[str, Any], Any]]:
        n, chunks = sender.chunks, self.case.prompts[use]
        if sender.ended:
            return
        if not sender.begun:
            yield "begins", {"begun": True}, pv.Begin(use, ROOM)
        elif n < len(chunks):
            last = n == len(chunks) - 1
            chunk = pv.AddChunk(use, *chunks[n], last, pages=chunks[n][0], pending=last)
            yield f"chunk {n} is added", {"chunks": n + 1}, chunk
        else:
            if not sender.written:
                yield "the last chunk is written", {"written": True}, pv.ChunkWritten(use)
            if not sender.sent:
                yield "the target is sent", {"sent": True}, pv.TargetSent(use)
            if sender.settled and sender.sent:
                yield "SGLang's Success", {"ended": True}, pv.End(use)

    def faults(self, front: Front, links: Any) -> Iterator[tuple[str, Moved]]:
        for use, sender in enumerate(front.senders):
            if "abort" in self.case.faults and sender.begun and not sender.ended:
                after = self._changed(front, use, ended=True, failed=True)
                what = f"prefill, request {use}: aborted"
                yield what, self.handle(after, links, pv.End(use, "aborted"))

    def again(self, front: Front) -> Front:
        """Another request gets the room number, as in true retraction: SGLang has sent its target,
        or is done with it."""
        first, free = front.senders[0], front.senders[0].sent or front.senders[0].ended
        more = len(front.senders) == 1 and first.begun and (free or "anyhow" in self.case.faults)
        return front._replace(senders=(*front.senders, Sender())) if more else front

    def restarted(self, front: Front) -> Front:
        ended = tuple(s._replace(ended=True, failed=not s.ended) for s in front.senders)
        return Front(self.fresh[1], (None,) * self.case.slots, ended, (), True)

    def view(self, front: Front, rank: int) -> View:
        return View(
            tuple(c if c and c.head == rank else None for c in front.slots),
            tuple(s.chunks == len(self.case.prompts[r]) for r, s in enumerate(front.senders)),
            tuple(s.failed for s in front.senders),
            front.restarted,
        )

    def check_end(self, front: Front) -> None:
        require(all(s.ended for s in front.senders), f"prefill never settles: {front.senders}")
        left = self.machine.left[front.machine]
        require(not left, f"left on prefill: {left}")


def _fit(heads: int, slot_bytes: int) -> int:
    return slot_bytes  # a token has one byte
