"""Each guard on what is sent, with the test that fails without it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from protocol.model import Cache, Case, Request
from protocol.ring import Outcome, Rank, run

from sglang_mixkv.core import pages
from sglang_mixkv.core.errors import MixKVError

PAIRS = [(2, 1), (1, 2)]


def right(outcome: Outcome) -> None:
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}


# ---------------------------------------------------------------- lookahead


def send_with_lookahead(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
    """A prompt that fills its last page, with one more page allocated behind it."""
    beyond = np.append(chunk, np.int32(rank.case.pool_pages - 1))
    sender.num_kv_indices += 1
    sender.send(beyond, state, num_kv_tokens=len(chunk) * rank.case.page_size)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), PAIRS)
def test_lookahead_pages_are_cut(prefill_tp: int, decode_tp: int) -> None:
    case = Case(prefill_tp, decode_tp, requests=(Request(8),), extra={"send": send_with_lookahead})
    right(run(case))


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
    for side in ("prefill 0", "decode 0"):
        assert any(
            line.startswith(side) and "chunks that fill the 3 pages" in line
            for line in outcome.reasons.splitlines()
        )


def test_without_the_guard_pages_stay_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_mixkv.managers import prefill

    monkeypatch.setattr(prefill, "pages_to_send", lambda offered, *_, **__: offered)
    outcome = run(Case(2, 1, requests=(Request(12),), extra={"send": send_short}))
    assert outcome.statuses == {"success"}
    assert outcome.wrong


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


@pytest.mark.parametrize("mode", ["direct", "packed"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), PAIRS)
def test_draft_leaves_after_it_is_written(prefill_tp: int, decode_tp: int, mode: str) -> None:
    extra = {"send": send_before_the_drafter, "config": {"draft_transfer": mode}}
    requests = (Request(23, chunk_pages=1), Request(8))
    right(run(Case(prefill_tp, decode_tp, requests=requests, extra=extra)))


def test_without_the_wait_the_order_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Late, "synchronize", lambda self: None)
    outcome = run(Case(2, 1, requests=(Request(8),), extra={"send": send_before_the_drafter}))
    assert outcome.wrong


# ---------------------------------------------------------------- windows


def test_without_the_window_everything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_mixkv.managers import prefill

    direct = {"config": {"draft_transfer": "direct"}}
    case = Case(2, 1, draft_window=5, requests=(Request(40),), extra=dict(direct))
    right(run(case))
    monkeypatch.setattr(prefill, "window_start", lambda *_: 0)
    assert run(replace(case, extra=dict(direct))).wrong


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


def test_no_room_for_a_region_is_no_failure() -> None:
    """1 MiB of staging for requests that need more: those go the direct path."""
    draft = Cache("mha", heads=2, k_bytes=256, v_bytes=256)
    requests = (Request(1500), Request(900), Request(40))
    extra = {"config": {"draft_transfer": "packed", "staging_mb": 1}}
    outcome = run(Case(2, 1, draft=draft, page_size=64, requests=requests, extra=extra))
    right(outcome)
    assert 0 < outcome.total("packed_bytes") < outcome.total("draft_bytes_sent")
