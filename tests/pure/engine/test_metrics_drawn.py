"""The metrics and logs of a rank, at the limits of its tables and with drawn histograms."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from sglang_mixkv import __version__, series
from sglang_mixkv.decode import actions as act
from sglang_mixkv.decode.worker import ReceiveHandle
from sglang_mixkv.engine import metrics
from sglang_mixkv.series import DECODE, NOTES, PREFILL, SERIES


class Rank(metrics.MetricsReporter):
    """A rank's reporter.

    `of` returns the nonzero values of a series, by the values of the series' own labels.
    """

    def __init__(self, side: str = DECODE) -> None:
        self.registry = CollectorRegistry()
        super().__init__(side, {"tp_rank": "3"}, self.registry)

    def of(self, name: str) -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for line in generate_latest(self.registry).decode().splitlines():
            parts = re.fullmatch(rf"{series.PREFIX}{name}{{(.*)}} (\S+)", line)
            if parts and float(parts[2]):
                labels = dict(re.findall(r'(\w+)="(.*?)"', parts[1]))
                assert labels.pop("tp_rank") == "3"
                own = next(one.labels for one in SERIES if one.name == name)
                found[tuple(labels[label] for label in own)] = float(parts[2])
        return found

    def buckets(self, name: str) -> dict[tuple[str, ...], dict[float, float]]:
        """Return a histogram's counts, by the values of its own labels and by upper bound.

        Empty buckets are left out.
        """
        found: dict[tuple[str, ...], dict[float, float]] = {}
        below: dict[tuple[str, ...], float] = {}
        for line in generate_latest(self.registry).decode().splitlines():
            if parts := re.fullmatch(rf"{series.PREFIX}{name}_bucket{{(.*)}} (\S+)", line):
                labels = dict(re.findall(r'(\w+)="(.*?)"', parts[1]))
                own = next(one.labels for one in SERIES if one.name == name)
                at, count = tuple(labels[label] for label in own), float(parts[2])
                if more := count - below.get(at, 0):
                    found.setdefault(at, {})[float(labels["le"])] = more
                below[at] = count
        return found

    def count(self) -> None:
        self._count_rooms()
        self._sample()

    def end(self, request: Any, prefill: str = "a:1", state: Any = act.State.WARM) -> None:
        handle = ReceiveHandle([], 1, None, prefill)
        handle.state, handle.request = state, request
        self.ended(handle, "")


class Req:
    def __init__(self, rid: str, histogram: list[int], done: bool = True) -> None:
        self.rid, self.spec_correct_drafts_histogram, self.done = rid, histogram, done

    def finished(self) -> bool:
        return self.done


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(0, 9), max_size=40), min_size=1, max_size=3))
@example([[1] * 40])
@example([[1] * 33])
def test_verify_rounds_and_tokens_are_counted(histograms: list[Any]) -> None:
    """Verify rounds and accepted tokens are counted from a request's histogram.

    A round at index n of the histogram has n accepted drafts and yields n + 1 tokens.
    """
    one = Rank()
    for number, histogram in enumerate(histograms):
        one.end(Req(str(number), histogram))
    one.count()
    rounds = [right for h in histograms for right, count in enumerate(h) for _ in range(count)]
    tokens = sum(right + 1 for right in rounds)
    assert one.of("verify_rounds_total") == ({("a:1", "warm", ""): len(rounds)} if rounds else {})
    assert one.of("accepted_tokens_total") == ({("a:1", "warm", ""): tokens} if tokens else {})
    assert one.of("finished_requests_total") == {("a:1", "warm", ""): len(histograms)}


@pytest.mark.parametrize(
    ("state", "reason", "closed", "arrived", "decided", "expected"),
    [
        (act.State.WARM, "", "", 5.0, 5.0004, {("warm", ""): {0.001: 1}}),
        (act.State.WARM, "", "", 5.0, 5.003, {("warm", ""): {0.005: 1}}),
        (act.State.WARM, "", "", 5.0, 4.0, {("warm", ""): {0.001: 1}}),  # rows before the target
        (act.State.COLD, "deadline", "", 5.0, 5.31, {("cold", "deadline"): {0.5: 1}}),
        (act.State.COLD, "of a later release", "", 5.0, 6.5, {("cold", "other"): {2.0: 1}}),
        (act.State.FAILED, "why", "", 5.0, 14.9, {("failed", ""): {10.0: 1}}),
        (act.State.WARM, "", series.ABORTED, 5.0, 17.0,
         {("closed", "prefill_aborted"): {float("inf"): 1}}),
        (None, "", "failed on decode", 5.0, None, {}),  # no verdict
        (act.State.COLD, "lost", "failed on decode", None, 5.0, {}),  # no target
    ],
)  # fmt: skip
def test_the_waiting_time_ends_with_the_verdict(
    state: act.State | None, reason: str, closed: str, arrived: float | None,
    decided: float | None, expected: dict[tuple[str, ...], dict[float, float]],
) -> None:  # fmt: skip
    """A request's waiting time is counted once, with the same outcome as in rooms_total."""
    one, handle = Rank(), ReceiveHandle([], 1, None, "a:1")
    handle.state, handle.reason, handle.arrived, handle.decided = state, reason, arrived, decided
    one.ended(handle, closed)
    assert one.buckets("wait_seconds") == {}, "the scheduler's thread must not count"
    for _ in range(2):
        one.count()
    assert one.buckets("wait_seconds") == expected
    (outcome,) = one.of("rooms_total")
    assert expected.keys() <= {outcome}


@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(0, 30), min_size=1, max_size=20))
@example([0.001, 0.0010001, 10.0, 10.1])
def test_chunk_times_are_counted_in_their_bucket(seconds: list[float]) -> None:
    one, expected = Rank(PREFILL), dict[float, float]()
    for each in seconds:
        one.announced(each)
        bound = next((at for at in metrics.BUCKETS if each <= at), float("inf"))
        expected[bound] = expected.get(bound, 0) + 1
    assert one.buckets("ready_seconds") == {(): dict(sorted(expected.items()))}
    assert (metrics.BUCKETS[0], metrics.BUCKETS[-1]) == (0.001, 10.0)


def test_rooms_are_counted_at_each_tick_and_drafts_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    one = Rank()
    one.ticked()
    for passed, drafts in ((0.0, 0), (0.99, 0), (0.01, 2), (0.5, 2), (0.5, 4)):
        clock[0] = round(clock[0] + passed, 2)
        one.end(Req(f"{clock[0]}", [1]))
        one.ticked()
        counted = sum(one.of("finished_requests_total").values())
        assert (counted > 0) == (drafts > 0)
        assert sum(one.of("rooms_total").values()) == len(one._watched) + counted
    assert counted == 5


def test_limits_on_series_and_log_lines_are_unchanged() -> None:
    """The limits on series, log lines and watched requests are unchanged.

    docs/metrics.md documents the first one.
    """
    bounds = metrics.MAX_PREFILLS, metrics.MAX_LOGGED, metrics.MAX_WATCHED
    assert (*bounds, metrics.SAMPLE_S) == (64, 1024, 65536, 1.0)


def test_watched_and_waiting_requests_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_WATCHED", 3)
    one = Rank()
    requests = [Req(str(number), [1], done=False) for number in range(5)]
    for request in requests:
        one.end(request)
        one.count()
    assert len(one._watched) == 3
    for request in requests:
        one.end(request)
    assert len(one._ended) == 3


def test_a_note_is_logged_once_per_peer_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "MAX_LOGGED", 3)
    logged = [what for what, spec in NOTES.items() if spec.message and spec.logged]
    one = Rank()
    with caplog.at_level(logging.WARNING):
        for what, peer in ((0, b"a"), (0, b"a"), (1, b"a"), (0, b"b"), (1, b"b"), (2, b"c")):
            one(act.Note(logged[what], peer, "why"))
    assert len(caplog.messages) == 3
    kinds = [NOTES[logged[what]].code for what in (0, 1, 0)]
    for line, kind, peer in zip(caplog.messages, kinds, ("61", "61", "62"), strict=True):
        assert f"[{kind}] draft channel, prefill rank {peer}: " in line
        assert "(why)" in line


def test_a_log_line_names_the_peer(caplog: pytest.LogCaptureFixture) -> None:
    what = next(w for w, spec in NOTES.items() if spec.message and spec.logged)
    note, reader = act.Note(what, b"peer"), act.Note(what, b"12345678")
    decode, prefill = Rank(DECODE), Rank(PREFILL)
    decode.name_of = {b"peer": "a:1"}.__getitem__
    with caplog.at_level(logging.WARNING):
        decode(note)
        prefill(reader)
        Rank()(act.Note(what))
    found = [re.search(r"channel, (.*?): .*\((.*?)\)", line).groups() for line in caplog.messages]
    assert found == [
        ("prefill a:1", "no detail"), ("decode rank 31323334", "no detail"),
        ("prefill rank", "no detail"),
    ]  # fmt: skip


@pytest.mark.parametrize("side", [PREFILL, DECODE])
def test_a_rank_has_the_series_of_its_side(side: str) -> None:
    one = Rank(side)
    assert set(one._made) == {s.name for s in SERIES if side in s.sides}
    one.moved(7, 0.25)
    name = "sent_bytes_total" if side == PREFILL else "needed_bytes_total"
    assert one.of(name) == {("draft",): 7}
    assert one.of("copy_seconds_total") == {(): 0.25}
    page = generate_latest(one.registry).decode()
    for known in (s for s in SERIES if side in s.sides for _ in s.initial_labels):
        name = series.PREFIX + known.name + "_bucket" * known.name.endswith("_seconds")
        assert f"{name}{{" in page, "each series must exist before its first count"


@pytest.mark.parametrize(
    ("dp_rank", "extra", "more"),
    [
        (None, None, {}), (0, None, {"dp_rank": "0"}),
        (5, {"pod": "a", "tp_rank": 9}, {"dp_rank": "5", "pod": "a", "tp_rank": "9"}),
    ],
)  # fmt: skip
def test_labels_are_those_of_sglangs_series(
    dp_rank: int | None, extra: Any, more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin's series have the labels of SGLang's, as strings.

    If SGLang's metrics are disabled, there are no labels.
    """
    args = SimpleNamespace(enable_metrics=True, served_model_name="m", extra_metric_labels=extra)
    ranks = SimpleNamespace(tp_rank=1, pp_rank=2, moe_ep_rank=3, dp_rank=dp_rank)
    context = SimpleNamespace(get_parallel=lambda: ranks, get_server_args=lambda: "of the process")
    view = SimpleNamespace(resolved_view={"of the process": args}.__getitem__)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.overrides", view)
    own = {"model_name": "m", "engine_type": "decode"}
    own |= {"tp_rank": "1", "pp_rank": "2", "moe_ep_rank": "3"}
    assert metrics._labels("decode") == own | more
    args.enable_metrics = False
    assert metrics._labels("decode") is None


def test_a_rank_without_metrics_retains_nothing() -> None:
    one = metrics.MetricsReporter(DECODE, None)
    handle = ReceiveHandle([], 1, None, "a:1")
    handle.state, handle.reason = act.State.COLD, "broken"
    one.ended(handle, "")
    one.retracted(Req("a", [1]))
    one.moved(1, 1.0)
    one.ticked()
    assert not one._ended
    assert not one._watched


def test_an_error_in_making_series_does_not_stop_a_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "_labels", lambda side: 1 // 0)
    one = metrics.reporter(DECODE)
    one.moved(1, 1.0)
    assert "MIXKV-SELF-01" in caplog.text
    monkeypatch.setattr(metrics, "_labels", lambda side: None)
    assert metrics.reporter(PREFILL)._side == PREFILL


def test_an_error_in_a_series_does_not_reach_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    one = Rank()
    one._made = dict.fromkeys(one._made)
    for _ in range(2):
        one.moved(1, 1.0)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("prefill", ["", "a:1"])
def test_a_breaker_is_counted_for_its_prefill_server(prefill: str) -> None:
    one = Rank()
    one.name_of = {b"peer": prefill}.__getitem__
    one(act.Note("breaker_opened", b"peer"))
    assert one.of("breaker_opened_total") == {(prefill or "other",): 1}


ON_A_SERVER = """
import os, sys
from types import SimpleNamespace
from sglang_mixkv.engine import metrics

assert "prometheus_client" not in sys.modules
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
for is_child, slots in ((True, 7), (False, 5)):
    if not is_child or not (child := os.fork()):
        one = metrics.MetricsReporter("decode", {"tp_rank": "3"})
        one.slots = SimpleNamespace(count=slots, free_slots=range(2))
        one.moved(10, 0.5)
        one.ticked()
        if is_child:
            os._exit(0)
    os.waitpid(child, 0) if is_child else None

from prometheus_client import CollectorRegistry, generate_latest, multiprocess

multiprocess.MultiProcessCollector(registry := CollectorRegistry())
print(generate_latest(registry).decode())
"""


def test_processes_of_a_server_share_a_metrics_page(tmp_path: Path) -> None:
    """All processes of a server share one metrics page.

    SGLang sets the folder for multiprocess metrics after the plugin's modules are imported.
    Counters include those of a rank's former process; gauges are those of the current one.
    """
    done = subprocess.run(
        [sys.executable, "-c", ON_A_SERVER, str(tmp_path)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = {line for line in done.stdout.splitlines() if line.startswith(series.PREFIX)}
    rank = '{tp_rank="3"}'
    slots = f'{{release="{__version__}",tp_rank="3"}}'
    assert {f"{series.PREFIX}slots{slots} 5.0", f"{series.PREFIX}slots_used{rank} 3.0"} <= lines
    assert f"{series.PREFIX}copy_seconds_total{rank} 1.0" in lines
    assert len([line for line in lines if line.startswith(f"{series.PREFIX}slots{{")]) == 1
