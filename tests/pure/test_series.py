"""The metrics of a rank, their log lines and their documentation."""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from mixkv_demo.series import totals
from sglang_mixkv import __version__, series
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import actions as act
from sglang_mixkv.decode.breaker import STRIKES, Breaker
from sglang_mixkv.decode.worker import ReceiveHandle
from sglang_mixkv.engine import metrics
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.series import DECODE, NOTES, PREFILL, SERIES, ColdReason

PACKAGE = Path(series.__file__).parent
DOCS = PACKAGE.parent / "docs"


class Rank(metrics.MetricsReporter):
    """A rank's reporter with its own registry."""

    def __init__(self, side: str = DECODE) -> None:
        self._registry = CollectorRegistry()
        super().__init__(side, {"tp_rank": "0"}, self._registry)

    def page(self) -> Counter[tuple[str, ...]]:
        """Return the nonzero values, by name and non-empty label values."""
        return +totals(generate_latest(self._registry).decode())

    def of(self, name: str) -> dict[tuple[str, ...], float]:
        return {at[1:]: value for at, value in self.page().items() if at[0] == name}

    def end(
        self, state: act.State | None, reason: str = "", closed: str = "", prefill: str = "a:1",
        request: Any = None,
    ) -> None:  # fmt: skip
        """End a room as SGLang does. `closed`: why its request failed, or ""."""
        handle = ReceiveHandle([], 1, None, prefill)
        handle.state, handle.reason, handle.request = state, reason, request
        self.ended(handle, closed)

    def look_now(self) -> None:
        self._sampled = -1e9
        self.ticked()


class Req:
    """The fields of SGLang's Req that the reporter reads."""

    def __init__(self, rid: str, histogram: list[int] | None = None) -> None:
        self.rid, self.spec_correct_drafts_histogram = rid, histogram or list[int]()
        self.done = histogram is not None

    def finished(self) -> bool:
        return self.done


# ---------------------------------------------------------------- the table


def test_every_note_has_a_series_and_a_remedy() -> None:
    """Each note has a series or a cold reason, and each logged note has a documented remedy."""
    known = {one.name: one for one in SERIES}
    page, remedies = ((DOCS / f"{n}.md").read_text() for n in ("metrics", "troubleshooting"))
    for what, spec in NOTES.items():
        assert spec.series in known or what in set(ColdReason) or what == "not_cleared"
        assert bool(spec.message) == bool(spec.remedy)
        assert f"### {spec.code}\n" in remedies
        assert not spec.values or spec.values in known[spec.series].initial_labels
    for one in SERIES:
        labels = ", ".join(f"`{label}`" for label in one.labels)
        cells = [f"`{series.PREFIX}{one.name}`", ", ".join(one.sides), labels, one.help]
        assert f"| {' | '.join(cells)} |\n" in page


# ---------------------------------------------------------------- rooms and notes


@pytest.mark.parametrize(
    ("state", "reason", "closed", "expected"),
    [
        (act.State.WARM, "", "", ("warm",)),
        (act.State.COLD, "deadline", "", ("cold", "deadline")),
        (act.State.COLD, "broken", "", ("cold", "broken")),
        (act.State.COLD, "of a later release", "", ("cold", "other")),
        (act.State.COLD, "prefill_aborted", "failed on decode", ("closed",)),
        (act.State.WARM, "", "aborted on decode", ("closed",)),
        (None, "", "", ("closed",)),
        (act.State.FAILED, "RuntimeError('a')", "failed on decode", ("failed",)),
    ],
)
def test_a_room_is_counted_once(
    state: act.State | None, reason: str, closed: str, expected: tuple[str, ...]
) -> None:
    """A room is counted once, with its last state. A room closed by its client is not cold."""
    one = Rank()
    one.end(state, reason, closed)
    counted = {expected: 1} if reason == "broken" else {}  # at once: the thread has ended
    assert one.of("rooms_total") == counted
    for _ in range(2):
        one.look_now()
    assert one.of("rooms_total") == {expected: 1}
    assert one.of("prefill_rooms_total") == {("a:1", *expected): 1}


def test_two_threads_count_a_request_once() -> None:
    """A request is counted once if the scheduler and the channel thread count at the same time.

    The scheduler counts the rooms that the channel thread has not decided.
    """
    one, request = Rank(), Req("a", [0, 1])

    def finished() -> bool:
        with ThreadPoolExecutor(1) as scheduler:
            scheduler.submit(one.look_now).result()
        return True

    request.finished = finished  # type: ignore[method-assign]
    one.end(act.State.WARM, request=request)
    one.look_now()
    assert sum(one.of("finished_requests_total").values()) == 1


def test_a_note_is_counted_each_time_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    one = Rank()
    one.name_of = {b"peer": "a:1"}.get  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            for what in ("breaker_opened", "deadline", "doubled", "breaker", "later"):
                one(act.Note(what, b"peer", "its KV did not come"))
    one.refused(MixKVError("MIXKV-PAIR-01", "stock"))
    assert one.page() == {
        ("breaker_opened_total", "a:1"): 3, ("messages_dropped_total",): 3,
        ("peers_refused_total", "no_plugin"): 1,
    }  # fmt: skip
    _, line = caplog.messages
    for part in ("[MIXKV-PAIR-06]", "prefill a:1", "did not arrive", "correct output", "Look"):
        assert part in line


def test_prefill_counts_its_notes() -> None:
    one = Rank(PREFILL)
    for what in ("unopened", "early", "expired", "slow", "restarted"):
        one(act.Note(what))
    one.moved(100, 0.5)
    assert one.page() == {
        ("unopened_rooms_total",): 1, ("unrequested_rooms_total",): 1, ("expired_slots_total",): 1,
        ("fails_sent_total", "slow"): 1, ("fails_sent_total", "restarted"): 1,
        ("sent_bytes_total", "draft"): 100, ("copy_seconds_total",): 0.5,
    }  # fmt: skip


def test_the_documented_number_of_series_is_right() -> None:
    """docs/metrics.md states the right number of series.

    Labels that appear later are counted for one prefill server with warm requests.
    """

    def of(side: str, later: bool) -> int:
        own = (one for one in SERIES if side in one.sides and ("prefill" in one.labels) == later)
        return sum((len(one.initial_labels) or 1) * (16 if one.name.endswith("_seconds") else 1)
                   for one in own if one.name != "breaker_opened_total")  # fmt: skip

    assert len(metrics.BUCKETS) + 3 == 16  # the +Inf bucket, the sum and the count
    prefill, decode, pair = of(PREFILL, False), of(DECODE, False), of(DECODE, True)
    text = f"4 x 8 x {prefill} + 16 x 8 x ({decode} + 4 x {pair})"
    found = 4 * 8 * prefill + 16 * 8 * (decode + 4 * pair)
    assert f"{text} = {found:,}" in " ".join((DOCS / "metrics.md").read_text().split())


def test_gauges_follow_slots_and_breakers() -> None:
    one = Rank()
    one.slots, one.breaker = SlotPool(4, Times()), Breaker()
    one.name_of = {b"one": "a:1", b"two": "b:2", b"gone": ""}.__getitem__
    for address in ("a:1", "b:2"):
        one.end(act.State.WARM, prefill=address)
    one.slots.allocate("reader")
    for peer in (b"one", b"gone"):
        for strike in range(STRIKES):
            one.breaker.record_failure(peer, strike, 0.0)
    one.look_now()
    assert (one.of("slots"), one.of("slots_used")) == ({(__version__,): 4}, {(): 1})
    assert one.of("breaker_open") == {("a:1",): 1}
    one.breaker.forget(b"one")
    one.look_now()
    assert one.of("breaker_open") == {}


# ---------------------------------------------------------------- finished requests


@pytest.mark.parametrize("side", [PREFILL, DECODE])
def test_the_gpu_kernels_metric_appears_once_known(side: str) -> None:
    """The metric that names the GPU copies exists only once the copies have been chosen.

    A rank without a GPU lacks this metric.
    """
    one, name = Rank(side), "mixkv_gpu_kernels{"
    assert name not in generate_latest(one._registry).decode()
    for used in (False, True):
        one.kernels(used)
        assert f'{name}tp_rank="0"}} {used:.1f}' in generate_latest(one._registry).decode()


def test_accept_length_by_state() -> None:
    """A request's accept length is counted by state, once it has ended or SGLang has dropped it."""
    one = Rank()
    warm, cold = Req("warm"), Req("cold")
    one.end(act.State.WARM, request=warm)
    one.end(act.State.COLD, "deadline", request=cold)
    one.look_now()
    warm.spec_correct_drafts_histogram += [1, 2, 3]
    cold.spec_correct_drafts_histogram += [4, 1]
    one.look_now()
    assert one.of("finished_requests_total") == {}
    warm.done = cold.done = True
    one.look_now()
    one.look_now()
    first, second = ("a:1", "warm"), ("a:1", "cold", "deadline")
    assert one.of("finished_requests_total") == {first: 1, second: 1}
    assert one.of("verify_rounds_total") == {first: 6, second: 5}
    assert one.of("accepted_tokens_total") == {first: 6 + 2 + 6, second: 5 + 1}
    gone = Req("gone")  # the reporter must not keep it alive
    one.end(act.State.WARM, prefill="b:2", request=gone)
    gone.spec_correct_drafts_histogram += [0, 7]
    one.look_now()
    del gone
    one.look_now()
    assert one.of("verify_rounds_total")["b:2", "warm"] == 7


def test_a_retracted_request_is_neither_warm_nor_cold() -> None:
    """A request that SGLang resumes from its backup or prefills again counts as retracted.

    A request that never began is not counted.
    """
    one = Rank()
    requests = resumed, again, _ = [Req(name) for name in ("resumed", "again", "")]
    for request in requests:
        one.end(act.State.WARM, request=request)
    one.retracted(resumed)
    one.retracted(Req("stranger"))
    one.end(act.State.COLD, "lost", prefill="b:2", request=again)
    for request in requests:
        request.done = True
    one.look_now()
    assert one.of("finished_requests_total") == {("a:1", "retracted"): 2, ("a:1", "warm"): 1}
    assert not one._watched


# ---------------------------------------------------------------- bounds and trouble


def test_prefill_addresses_are_bounded() -> None:
    one = Rank()
    for number in range(metrics.MAX_PREFILLS + 5):
        one.end(act.State.WARM, prefill=f"host:{number}", request=Req(str(number), [0, 1]))
    one.end(act.State.WARM, prefill="host:0")
    one.look_now()
    for name in ("prefill_rooms_total", "verify_rounds_total"):
        assert len(one.of(name)) == metrics.MAX_PREFILLS + 1
    rooms = one.of("prefill_rooms_total")
    assert (rooms["other", "warm"], rooms["host:0", "warm"]) == (5, 2)
    assert one.of("finished_requests_total")["other", "warm"] == 5


@pytest.mark.parametrize("trouble", ["request", "client"])
def test_an_error_in_the_reporter_is_logged_once(
    trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception in the reporter is logged once, and later calls do nothing."""
    one, request = Rank(), Req("a")
    if trouble == "request":
        request.finished = lambda: 1 / 0  # type: ignore[assignment, return-value]
    else:
        one._made = dict.fromkeys(one._made)
    for _ in range(3):
        one.end(act.State.WARM, request=request)
        one.look_now()
        one.moved(1, 1.0)
    (line,) = caplog.messages
    assert "MIXKV-SELF-01" in line
