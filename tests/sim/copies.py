"""The copies of a rank between its pool and its slots, by host threads or by a GPU."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from sglang_mixkv.draft.copier import Copier, Copy, GpuCopier
from sglang_mixkv.draft.slot_format import SlotCheck

if TYPE_CHECKING:
    from tests.sim.decode import DecodeRank
    from tests.sim.prefill import PrefillRank
    from tests.sim.process import Gated


class Copiers(Copier):
    """Copying threads, and the channel thread, which makes some copies itself.

    Each copy enters its request's gate. A copying thread makes a copy in two pieces. Copies that
    end within one pass of the channel thread are reported together, in any order.
    """

    polled = False
    AT_ONCE = 0.3

    def __init__(self, rank: PrefillRank | DecodeRank) -> None:
        super().__init__(rank.worker._store, rank.worker._reporter.moved)
        self._rank = rank
        self._idle = deque(("copier", number) for number in range(rank.world.spec.copiers))
        self._work: deque[Copy] = deque()
        self.done = self._over

    def start(self, copies: Any) -> None:
        for copy in copies:
            if self._rank.rng.random() > 1 - self.AT_ONCE:
                self._make(copy)
                continue
            self._work.append(copy)
            if self._idle:
                self._next(self._idle.popleft())

    def ended(self) -> Any:
        self._rank.rng.shuffle(self._over)
        return super().ended()

    def _next(self, thread: object) -> None:
        self._rank.later(thread, self._rank.rng.random() * 0.0004, self._begin, thread)

    def _begin(self, thread: object) -> None:
        if not self._work:  # another thread has taken the copy
            self._idle.append(thread)
            return
        self._make(self._work.popleft(), thread)

    def _make(self, copy: Copy, thread: object = None) -> None:
        """Make a copy. `thread` is None if the channel thread makes it."""
        rank, owner = self._rank, self._rank.owner_of(copy)
        if not copy.gate.enter():
            self._end(thread, owner, copy, None)
            return
        owner.copies[copy.job] = copy
        refused = rank.refusal(copy)
        if refused is not None:
            self._end(thread, owner, copy, refused)
            return
        rows = copy.pages.rows(copy.first, copy.tokens).tolist()
        rank.begin_copy(owner, copy)
        if thread is None:
            self._rest(thread, owner, copy, rows, 0)
            return
        cut = rank.rng.randint(0, len(rows))
        rank.copy(owner, rows[:cut], 0, copy)
        delay = rank.rng.random() ** 4 * rank.world.copying
        rank.later(thread, delay, self._rest, thread, owner, copy, rows, cut)

    def _rest(self, thread: object, owner: Gated, copy: Copy, rows: list[int], cut: int) -> None:
        self._rank.copy(owner, rows[cut:], cut, copy)
        self._end(thread, owner, copy, self._rank.end_copy(owner, copy))

    def _end(self, thread: object, owner: Gated, copy: Copy, found: Any) -> None:
        rank = self._rank
        if owner.copies.pop(copy.job, None) is not None:
            owner.gate.leave()
        rank.unblocked(owner)
        rank.left_gate(owner)
        if not self.done:
            rank.later("report", rank.rng.random() * 0.0004, self._report)
        self.done.append((copy, found, 0.0))
        if thread is not None:
            self._next(thread)

    def _report(self) -> None:
        rank = self._rank
        rank.later("queue", rank.rng.random() * 0.0002, rank.on_thread, rank.look)


class Prepared(GpuCopier):
    """Passes each copy to the device together with its job."""

    def _prepare(self, copy: Copy) -> Any:
        return copy, super()._prepare(copy)


class Batch:
    """The ticket of a batch of jobs.

    `ended`: whether the device has finished the batch. A query may report the end later.
    """

    def __init__(self, device: Device, jobs: list[Any]) -> None:
        self.device, self.jobs = device, jobs
        self.ended, self.error = False, ""
        self.results: list[Any] = [SlotCheck.ERROR] * len(jobs)

    def over(self) -> bool:
        """Return whether the batch has ended. A CUDA event query may return False a bit longer."""
        return self.ended and self.device.rng.random() < 0.9

    done = over


class Device:
    """A CUDA stream, which runs batches in order even while the process is stopped.

    It has the methods of GpuRows that GpuCopier calls. `failed`: whether the device has a sticky
    error. Then the running batch ends with this error, and no further batch can be started.
    """

    def __init__(self, rank: PrefillRank | DecodeRank) -> None:
        self._rank, self.rng, self._clock = rank, rank.rng, rank.clock
        self.max_batch = rank.rng.choice((1, 2, 4))
        self._stream: deque[Batch] = deque()
        self.failed = False
        rank.worker._store.device = self
        self.copies = Prepared(rank.worker._store, rank.worker._reporter.moved)

    @property
    def can_start(self) -> bool:
        return len(self._stream) < 2

    def pages(self, pages: Any) -> Any:
        return pages

    def job(self, pages: Any, first: int, count: int, *slot: Any) -> list[int]:
        size = self._rank.pool.page
        return [int(pages[n // size]) * size + n % size for n in range(first, first + count)]

    def start(self, what: str, jobs: list[Any]) -> Batch:
        if self.failed:
            raise RuntimeError("the device is lost")
        batch = Batch(self, jobs)
        self._stream.append(batch)
        if len(self._stream) == 1:
            self._clock.after(self.rng.random() * 0.0002, self._run, batch)
        return batch

    def _run(self, batch: Batch) -> None:
        rank = self._rank
        if not rank.alive:
            return
        cuts = []
        for number, (copy, rows) in enumerate(batch.jobs):
            owner = rank.owner_of(copy)
            owner.copies[copy.job] = copy
            refused = rank.refusal(copy)
            batch.results[number] = SlotCheck.OK if refused is None else refused
            # a kernel detects a wrong checksum only after it has stored all rows
            if refused in (None, SlotCheck.DIFFERS):
                rank.begin_copy(owner, copy)
                cut = self.rng.randint(0, len(rows))
                rank.copy(owner, rows[:cut], 0, copy)
                cuts.append((number, owner, copy, rows, cut))
        delay = self.rng.random() ** 4 * rank.world.copying
        self._clock.after(delay, self._rest, batch, cuts)

    def _rest(self, batch: Batch, cuts: list[tuple]) -> None:
        rank = self._rank
        if not rank.alive:
            return
        batch.error = "the device is lost" * self.failed
        for number, owner, copy, rows, cut in () if self.failed else cuts:
            rank.copy(owner, rows[cut:], cut, copy)
            if batch.results[number] is SlotCheck.DIFFERS:
                rank.zero(owner, rows, copy.heads)
            else:
                batch.results[number] = rank.end_copy(owner, copy)
        batch.ended = True
        self._stream.popleft()
        owners = dict.fromkeys(rank.owner_of(copy) for copy, _ in batch.jobs)
        for copy, _ in batch.jobs:
            rank.owner_of(copy).copies.pop(copy.job, None)
        if self._stream:
            self._clock.after(self.rng.random() * 0.0002, self._run, self._stream[0])
        rank.later("device", 0.0, self._noticed, list(owners))

    def _noticed(self, owners: list[Gated]) -> None:
        """Notify SGLang's scheduler, and the channel thread, which polls until all batches end."""
        rank = self._rank
        for owner in owners:
            rank.unblocked(owner)
            rank.left_gate(owner)
        rank.later("queue", self.rng.random() * 0.0004, rank.on_thread, self._look)

    def _look(self) -> None:
        self._rank.look()
        if self.copies.polled and not any(not one[0].ended for one in self.copies._flying):
            self._rank.later("queue", 0.0005, self._rank.on_thread, self._look)
