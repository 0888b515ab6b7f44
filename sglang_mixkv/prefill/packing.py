"""Segments of a prefill rank on their way into slots."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sglang_mixkv.channel.messages import NO_SLOT, Open, Ready
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.turns import Turns
from sglang_mixkv.prefill.events import Pack, Packed
from sglang_mixkv.prefill.parts import Part


class Packing:
    """Parts with something to pack wait here for slots, and readers take turns.

    `segment_tokens`: how many tokens of so many heads fit a slot here and one of so many bytes.
    `draw_stamp`: unlike any earlier number, and not to be guessed.
    """

    def __init__(
        self,
        segment_tokens: Callable[[int, int], int],
        slots: SlotPool,
        draw_stamp: Callable[[], int],
    ) -> None:
        self._segment_tokens, self._slots, self._draw = segment_tokens, slots, draw_stamp
        self._turns: Turns[Part] = Turns()
        self._jobs: dict[int, tuple[Part, Ready]] = {}
        self._job = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, part: Part) -> None:
        """It may have something to pack."""
        self._turns.add(part.reader, part.opened.generation, part)

    def fits(self, opened: Open) -> bool:
        return self._segment_tokens(len(opened.wanted), opened.slot_bytes) > 0

    def start(self, now: float) -> list[Pack | tuple[Part, Ready]]:
        """As many as there are slots for. A READY: that of a last segment without tokens."""
        found: list[Pack | tuple[Part, Ready]] = []

        def start_one(part: Part) -> bool | None:
            chunk = None if part.ended else part.next_chunk()
            if chunk is None:
                return False
            if part.token >= chunk.first + chunk.count:
                if part.offered == part.segments:  # the last READY follows those before it
                    found.append((part, part.cut(NO_SLOT, self._stamp(part), 0)[-1]))
                return False
            if not self._slots.can_take(part.reader, now):
                return None
            found.append(self._start(part, self._slots.take(part.reader, now)))
            return True

        self._turns.serve(start_one, lambda: self._slots.free_slots)
        return found

    def _start(self, part: Part, slot: int) -> Pack:
        opened = part.opened
        limit = self._segment_tokens(len(opened.wanted), opened.slot_bytes)
        chunk, offset, ready = part.cut(slot, self._stamp(part), limit)
        self._job += 1
        self._jobs[self._job] = part, ready
        return Pack(
            self._job, chunk.use, chunk.pages, offset, ready.count, opened.wanted, slot,
            ready.stamp, opened.checksum,
        )  # fmt: skip

    def _stamp(self, part: Part) -> int:
        return self._draw()

    def end(self, event: Packed) -> tuple[Part, Ready]:
        """The slot is the caller's."""
        part, ready = self._jobs.pop(event.job)
        return part, msgspec.structs.replace(ready, checksum=event.checksum)
