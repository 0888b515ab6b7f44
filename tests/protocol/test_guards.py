"""Each guard on what is sent, with the test that fails without it."""

from __future__ import annotations

import multiprocessing as mp
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rig import ring
from rig.model import Cache, Case, Request
from rig.rank import Rank
from rig.ring import Outcome, run

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.kv import pages

pytestmark = pytest.mark.transports(every=6)

PAIRS = [(2, 1), (1, 2)]


def right(outcome: Outcome) -> None:
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}


# ---------------------------------------------------------------- lookahead


def send_with_lookahead(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
    """A prompt that fills its last page, with one more page allocated behind it."""
    offered = chunk
    if sender.curr_idx + len(chunk) == sender.num_kv_indices:
        offered = np.append(chunk, np.int32(rank.case.pool_pages - 1))
        sender.num_kv_indices += 1
    sender.send(offered, state, num_kv_tokens=len(chunk) * rank.case.page_size)


FULL_PAGES = (Request(8), Request(12, chunk_pages=1), Request(8, 2), Request(12, 1, 2))
LOOKAHEAD = {"send": send_with_lookahead}


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), PAIRS)
def test_lookahead_pages_are_cut(prefill_tp: int, decode_tp: int) -> None:
    """In one chunk and in several, with and without a prefix that the decode side has cached."""
    right(run(Case(prefill_tp, decode_tp, requests=FULL_PAGES, extra=dict(LOOKAHEAD))))


def test_without_the_cut_lookahead_is_taken_for_a_mismatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang_mixkv.prefill import rank as prefill

    def uncut(offered: int, tokens: int | None, *rest: Any, **last: Any) -> int:
        return pages.pages_to_send(offered, None, *rest, **last)

    monkeypatch.setattr(prefill, "pages_to_send", uncut)
    assert run(Case(2, 1, requests=FULL_PAGES, extra=dict(LOOKAHEAD))).statuses == {"failed"}


def send_short(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
    """The last chunk lacks a page that the decode side waits for."""
    sender.num_kv_indices -= 1
    sender.send(chunk[:-1], state, num_kv_tokens=(len(chunk) - 1) * rank.case.page_size)


def send_long(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
    """More computed pages than the decode side allocated: stock would cut them."""
    beyond = np.append(chunk, np.int32(rank.case.pool_pages - 1))
    sender.num_kv_indices += 1
    sender.send(beyond, state, num_kv_tokens=len(beyond) * rank.case.page_size)


def send_twice(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
    """A chunk that is sent again, as after a retry that forgot what had been sent."""
    sender.send(chunk[:2], None, num_kv_tokens=2 * rank.case.page_size)
    sender.send(chunk[:2], state, num_kv_tokens=2 * rank.case.page_size)


@pytest.mark.parametrize("send", [send_short, send_long, send_twice])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), PAIRS)
def test_chunks_that_do_not_line_up_are_refused(prefill_tp: int, decode_tp: int, send: Any) -> None:
    extra = {"send": send, "failed_rooms_stay_clean": send is not send_twice}
    outcome = run(Case(prefill_tp, decode_tp, requests=(Request(12),), extra=extra))
    assert outcome.wrong == []
    assert outcome.statuses == {"failed"}
    assert_both_sides_know(outcome)


def assert_both_sides_know(outcome: Outcome) -> None:
    """Decode names what did not line up, and so does the prefill rank that found it. Ranks are
    not in lockstep here: another may first hear from decode that the request was given up."""
    lines = outcome.reasons.splitlines()
    assert all("chunks that fill the 3 pages" in x for x in lines if x.startswith("decode"))
    prefill = [line for line in lines if line.startswith("prefill")]
    assert any("chunks that fill the 3 pages" in line for line in prefill)
    assert all("chunks that fill the 3 pages" in x or "gave it up" in x for x in prefill)


@pytest.mark.parametrize("late", [0, 1])
def test_the_late_rank_hears_it_from_decode(late: int) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    def send(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
        if rank.rank == late:
            deadline = time.monotonic() + 10
            while sender.poll() != KVPoll.Failed and time.monotonic() < deadline:
                time.sleep(0.001)
        send_twice(rank, sender, chunk, state)

    extra = {"send": send, "failed_rooms_stay_clean": False}
    outcome = run(Case(2, 1, requests=(Request(12),), extra=extra))
    assert outcome.wrong == []
    assert outcome.statuses == {"failed"}
    assert_both_sides_know(outcome)
    late_reason = next(x for x in outcome.reasons.splitlines() if x.startswith(f"prefill {late}"))
    assert "gave it up" in late_reason


WITHOUT_THE_GUARD = {
    "pages stay unwritten": (send_short, {"success"}, True),
    "a computed page is cut": (send_long, {"success"}, False),
    "the request never ends": (send_twice, {"stuck"}, False),
}


@pytest.mark.parametrize("harm", WITHOUT_THE_GUARD)
def test_without_the_guard(monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    """No error names what happened."""
    from sglang_mixkv.prefill import rank as prefill

    send, statuses, wrong = WITHOUT_THE_GUARD[harm]
    monkeypatch.setattr(ring, "LIMIT_S", 8)
    monkeypatch.setattr("rig.rank.LIMIT_S", 16)
    monkeypatch.setattr(prefill, "pages_to_send", lambda offered, *_, **__: offered)
    outcome = run(Case(2, 1, requests=(Request(12),), extra={"send": send}))
    assert {status.partition(" in ")[0] for status in outcome.statuses} == statuses
    assert any("entry" in line for line in outcome.wrong) == wrong


# ---------------------------------------------------------------- order


class Late:
    """A wait_event that is complete only after the drafter's bytes were written."""

    def __init__(self, rank: Rank, chunk: np.ndarray, truth: list[np.ndarray]) -> None:
        self.rank, self.chunk, self.truth = rank, chunk, truth

    def synchronize(self) -> None:
        time.sleep(0.02)
        for entry, row in zip(self.rank.pools["draft"], self.truth, strict=True):
            entry[self.chunk] = row


def send_before_the_drafter(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
    """The scheduler hands the chunk over while the drafter's forward still runs."""
    truth = [entry[chunk].copy() for entry in rank.pools["draft"]]
    for entry in rank.pools["draft"]:
        entry[chunk] = 0xEE
    sender._early_send_wait_event = Late(rank, chunk, truth)
    sender.send(chunk, state)


@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [("EAGLE3", "direct"), ("EAGLE3", "packed"), ("DFLASH", "direct"), ("DSPARK", "packed")],
)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), PAIRS)
def test_draft_leaves_after_it_is_written(
    prefill_tp: int, decode_tp: int, algorithm: str, mode: str
) -> None:
    """Whichever drafter writes it, and over either transport."""
    extra = {"send": send_before_the_drafter, "config": {"draft_transfer": mode}}
    requests = (Request(23, chunk_pages=1), Request(8))
    case = Case(prefill_tp, decode_tp, algorithm=algorithm, requests=requests, extra=extra)
    right(run(case))


def test_without_the_wait_the_order_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Late, "synchronize", lambda self: None)
    outcome = run(Case(2, 1, requests=(Request(8),), extra={"send": send_before_the_drafter}))
    assert outcome.wrong


# ---------------------------------------------------------------- windows


def test_without_the_window_everything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_mixkv.kv import plan

    direct = {"config": {"draft_transfer": "direct"}}
    case = Case(2, 1, draft_window=5, requests=(Request(40),), extra=dict(direct))
    right(run(case))
    monkeypatch.setattr(plan, "window_start", lambda *_: 0)
    assert run(replace(case, extra=dict(direct))).wrong


# Request 1 starts behind five pages that request 0 left, and its drafter reads two of them.
SHARED = (Request(40), Request(9, prefix_pages=5, prefix_of=0))


def shared_prefix(prefill_tp: int, decode_tp: int, mode: str = "auto") -> Case:
    return Case(
        prefill_tp, decode_tp, draft_window=12, decode_radix=True, requests=SHARED,
        rounds=((0,), (1,)), extra={"config": {"draft_transfer": mode}},
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["direct", "packed"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), PAIRS)
def test_a_prefix_that_others_will_share_has_all_of_its_draft(
    prefill_tp: int, decode_tp: int, mode: str
) -> None:
    """Windowed drafter, radix cache on the decode side: the whole draft is sent."""
    outcome = run(shared_prefix(prefill_tp, decode_tp, mode))
    right(outcome)
    assert outcome.total("draft_bytes_sent") == outcome.total("draft_bytes_needed")


def test_without_the_guard_a_shared_prefix_lacks_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_mixkv.engine import sides

    class Unshared:
        """SGLang's settings without the flag."""

        disaggregation_decode_enable_radix_cache = False

        def __getattr__(self, name: str) -> Any:
            return getattr(real(), name)

    real = sides.get_disagg
    monkeypatch.setattr(sides, "get_disagg", Unshared)
    outcome = run(shared_prefix(2, 1))
    assert outcome.statuses == {"success"}
    assert any("request 1 draft entry" in line for line in outcome.wrong)


@pytest.mark.mooncake_only
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 2), (2, 1)])
def test_what_sglang_compares_is_sent(prefill_tp: int, decode_tp: int) -> None:
    """Windowed drafter, SGLang's own checksums: it reads every page of the prompt."""
    outcome = run(
        Case(prefill_tp, decode_tp, draft_window=5, compares=True, requests=(Request(40),))
    )
    right(outcome)
    assert outcome.total("draft_bytes_sent") == outcome.total("draft_bytes_needed")


@pytest.mark.parametrize(
    ("total", "page_size", "window", "first"),
    [(10, 4, 0, 0), (10, 4, 100, 0), (10, 4, 5, 7), (1, 64, 5, 0), (10, 1, 3, 5)],
)
def test_window_start(total: int, page_size: int, window: int, first: int) -> None:
    assert pages.window_start(total, page_size, window) == first


@pytest.mark.parametrize(
    ("offered", "tokens", "start", "total", "last", "sent"),
    [
        (3, 12, 0, 3, True, 3),
        (3, 9, 0, 3, True, 3),
        (4, 12, 0, 3, True, 3),  # lookahead
        (3, None, 0, 3, True, 3),
        (2, 8, 1, 3, True, 2),
        (2, 8, 0, 3, False, 2),
    ],
)
def test_pages_to_send(
    offered: int, tokens: int | None, start: int, total: int, last: bool, sent: int
) -> None:
    assert pages.pages_to_send(offered, tokens, 4, start, total, last=last) == sent


@pytest.mark.parametrize(
    ("offered", "tokens", "start", "total", "last"),
    [
        (3, 8, 0, 4, False),  # surplus in a chunk that is not the last would shift the next
        (2, 12, 0, 3, True),  # fewer pages than the tokens fill
        (4, 16, 0, 3, True),  # more than was allocated
        (2, 8, 0, 3, True),  # the last chunk leaves pages unwritten
        (2, 8, 2, 3, False),
    ],
)
def test_mismatches_are_refused(
    offered: int, tokens: int, start: int, total: int, last: bool
) -> None:
    with pytest.raises(MixKVError):
        pages.pages_to_send(offered, tokens, 4, start, total, last=last)


# ---------------------------------------------------------------- aux rows


def late_aux(rank: Rank) -> None:
    """This rank's aux rows, should it send any, arrive after all others."""
    cls = type(rank.manager)
    real = cls.send_aux

    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(1)
        return real(self, *args, **kwargs)

    cls.send_aux = late


def two_draft_senders() -> Case:
    return Case(2, 1, requests=(Request(8),), extra={"faults": {("prefill", 1): late_aux}})


def test_one_rank_sends_the_aux_row() -> None:
    right(run(two_draft_senders()))


@pytest.mark.mooncake_only
def test_without_the_guard_the_last_rank_overwrites_the_aux_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    from sglang_mixkv.engine.mooncake import MixKVManager

    monkeypatch.setattr(MixKVManager, "send_aux", MooncakeKVManager.send_aux)
    assert any("aux" in line for line in run(two_draft_senders()).wrong)


# ---------------------------------------------------------------- packing


@pytest.mark.parametrize("mode", ["direct", "packed"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(4, 1), (4, 2), (1, 4), (2, 4)])
def test_both_paths_give_the_same_bytes(prefill_tp: int, decode_tp: int, mode: str) -> None:
    draft = Cache("mha", heads=8, layers=2, k_bytes=6, v_bytes=10)
    requests = (Request(50, chunk_pages=3), Request(33), Request(1), Request(16, chunk_pages=1))
    extra = {"config": {"draft_transfer": mode}}
    outcome = run(Case(prefill_tp, decode_tp, draft=draft, requests=requests, extra=extra))
    right(outcome)
    assert bool(outcome.total("packed_bytes")) == (mode == "packed")
    assert outcome.total("draft_bytes_sent") == outcome.total("draft_bytes_needed")


@pytest.mark.mooncake_only
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(4, 1), (1, 4), (2, 4)])
def test_rounds_that_overlap_give_the_same_bytes(prefill_tp: int, decode_tp: int) -> None:
    """Scattered pages, so that senders pack in both directions; asynchronous writes,
    as chunks of MiB have them."""
    draft = Cache("mha", heads=8, layers=2, k_bytes=6, v_bytes=10)
    requests = (Request(200, chunk_pages=20), Request(133), Request(1), Request(90, chunk_pages=4))
    extra = {
        "config": {"draft_transfer": "packed"}, "small_rounds": True,
        "faults": {("prefill", 0): strike_at_a_started_write},
    }  # fmt: skip
    case = Case(prefill_tp, decode_tp, draft=draft, requests=requests, shuffled=True, extra=extra)
    outcome = run(case)
    right(outcome)
    assert case.extra["struck"].value > 0, "no write was started"
    assert outcome.total("draft_bytes_sent") == outcome.total("draft_bytes_needed")
    planned = outcome.total("target_bytes_sent") + outcome.total("draft_bytes_sent")
    assert outcome.total("wire_bytes") == planned


def strike_at_a_started_write(rank: Rank) -> None:
    """When it is waited for."""
    transport = rank.plugin.transport
    finish = transport._finish

    def finished(begun: Any) -> int:
        rank.strike()
        return int(finish(begun))

    transport._finish = finished


def test_no_room_for_a_region_is_no_failure() -> None:
    """1 MiB of staging for requests that need more: those go by page."""
    draft = Cache("mha", heads=2, k_bytes=256, v_bytes=256)
    requests = (Request(1500), Request(900), Request(40))
    extra = {"config": {"draft_transfer": "packed", "staging_mb": 1}}
    outcome = run(Case(2, 1, draft=draft, page_size=64, requests=requests, extra=extra))
    right(outcome)
    assert 0 < outcome.total("packed_bytes") < outcome.total("draft_bytes_sent")
    pages = 24 + 15 + 1
    assert outcome.total("descriptors") <= pages * (2 + 2 * 2), "of the target, and of K and V"


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "target", "draft_ranges"),
    [
        (1, 2, Cache("mla", layers=2), 4 * 2),  # a range an entry and rank, into regions
        (2, 1, Cache("mla", layers=2), 4 * 2),
        (2, 1, Cache("mha", layers=1, heads=4), 4 * 2),  # the target's: a range per page
    ],
)
def test_scattered_pages_take_few_ranges(
    prefill_tp: int, decode_tp: int, target: Cache, draft_ranges: int
) -> None:
    draft = Cache("mha", heads=4, layers=2)
    case = Case(prefill_tp, decode_tp, target=target, draft=draft, requests=(Request(160),))
    outcome = run(case)
    right(outcome)
    assert outcome.total("descriptors") <= 2 * 2 * 40 + draft_ranges


def test_a_room_cleared_under_a_transfer_thread_does_not_end_it() -> None:
    """Stock asks whether a room is there, then for its status: in between it can be cleared."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    def ask(rank: Rank) -> None:
        assert rank.manager.check_status(999) == KVPoll.Failed

    right(run(Case(2, 1, extra={"faults": {("prefill", 1): ask}})))


def test_memory_that_is_not_there_is_asked_for_once() -> None:
    """Not again with each of fifty chunks: on a GPU every attempt flushes PyTorch's cache."""
    asked = mp.get_context("fork").Value("i", 0)

    def refuse(rank: Rank) -> None:
        def register(*_: Any) -> None:
            asked.value += 1
            raise MemoryError("no room")

        rank.plugin.transport.register = register

    extra = {"config": {"draft_transfer": "packed"}, "faults": {("prefill", 0): refuse}}
    right(run(Case(1, 2, requests=(Request(200, chunk_pages=1),), extra=extra)))
    assert asked.value == 1


# ---------------------------------------------------------------- state of a process


@pytest.mark.mooncake_only
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_what_threads_share_is_made_before_they_start(side: str) -> None:
    """functools.cached_property has had no lock since Python 3.12: two threads could make two."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    def starting(rank: Rank) -> None:
        cls, started = MooncakeKVManager, f"start_{side}_thread"
        real = getattr(cls, started)

        def start(manager: Any) -> None:
            rank.report.reasons += sorted(_state(manager))
            real(manager)

        setattr(cls, started, start)

    def compare(rank: Rank) -> None:
        rank.report.reasons.append(f"later: {sorted(_state(rank.manager))}")

    case = Case(2, 1, extra={"before": {(side, 0): starting}, "faults": {(side, 0): compare}})
    outcome = run(case)
    right(outcome)
    report = getattr(outcome, side)[0]
    *before, later = report.reasons
    assert before
    assert later == f"later: {before}"


def _state(manager: Any) -> set[str]:
    """Names of what the side of this rank, and its parts, hold."""
    parts = [manager.side, *vars(manager.side).values()]
    return {
        f"{type(part).__name__}.{name}" for part in parts
        if type(part).__module__.startswith("sglang_mixkv") and hasattr(part, "__dict__")
        for name in vars(part)
    }  # fmt: skip


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), PAIRS)
def test_a_thread_that_does_not_know_its_room_sends_nothing(
    monkeypatch: pytest.MonkeyPatch, prefill_tp: int, decode_tp: int, window: int
) -> None:
    """Without the grant, slices would land where the decode rank does not look for them."""
    from sglang_mixkv.engine import transfers

    monkeypatch.setattr(transfers.WorkerQueue, "get", lambda self: self._queue.get().chunk)
    extra = {"config": {"draft_transfer": "packed"}, "failed_rooms_stay_clean": True}
    outcome = run(
        Case(prefill_tp, decode_tp, draft_window=window, requests=(Request(50),), extra=extra)
    )
    assert {s for r in outcome.decode for s in r.status} == {"failed"}
    assert outcome.wrong == []
