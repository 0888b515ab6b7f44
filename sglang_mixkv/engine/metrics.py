"""A rank's series on SGLang's /metrics page, and its log lines, one per peer and kind of note.

Accepted drafts are counted by how their request's drafter started. SGLang counts a request's verify
rounds by the number of accepted drafts, in Req.spec_correct_drafts_histogram. The histogram is
final once the request has finished or is gone.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from sglang_mixkv import __version__, series
from sglang_mixkv.channel.actions import Note
from sglang_mixkv.channel.loop import Reporter
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.decode.actions import State
from sglang_mixkv.decode.breaker import Breaker
from sglang_mixkv.decode.cold import ColdReason
from sglang_mixkv.decode.worker import ReceiveHandle
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.series import NOTES, OTHER, PREFILL, STATES, NoteSpec

logger = logging.getLogger(f"sglang.{__name__}")

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds
SAMPLE_S = 1.0
MAX_LOGGED = 1024  # pairs of peer and note; beyond that, nothing new is logged
MAX_PREFILLS = 64  # addresses with their own series; any more are counted as OTHER
MAX_WATCHED = 65536  # requests


class Began(NamedTuple):
    """How a request's drafter started. `prefill`: the prefill server's bootstrap address. `reason`:
    why it started cold, or ""."""

    prefill: str
    state: str
    reason: str = ""


class MetricsReporter(Reporter):
    """The metrics and log of a rank's channel. After the first failure to count, which is logged,
    metrics are no longer updated.

    `labels`: common to all series; None for no series. `slots` and `breaker`: those of this rank,
    once made. `name_of`: returns the bootstrap address of a prefill rank's server, "" if unknown.
    """

    slots: SlotPool | None = None
    breaker: Breaker | None = None

    def __init__(self, side: str, labels: Mapping[str, str] | None, registry: Any = None) -> None:
        self.name_of: Callable[[bytes], str] = lambda _: ""
        self.weights: Callable[[], int] = lambda: 0
        self._side, self._labels = side, tuple((labels or {}).values())
        self._ended: deque[tuple[Any, Began | None, float | None]] = deque(maxlen=MAX_WATCHED)
        self._watched: dict[str, tuple[weakref.ref[Any], list[int], Began]] = {}
        self._prefills: set[str] = set()
        self._logged: set[tuple[str, bytes]] = set()
        self._sampled, self._counting = 0.0, threading.Lock()
        self._made = {} if labels is None else _make(side, labels, registry)

    def __call__(self, note: Note) -> None:
        spec, peer = NOTES.get(note.what, NoteSpec()), note.peer
        if note.what == "breaker_opened":
            self._record(spec.series, self._known(self.name_of(peer)))
        elif spec.series:
            self._record(spec.series, *spec.values)
        is_new = (note.what, peer) not in self._logged and len(self._logged) < MAX_LOGGED
        if spec.message and spec.logged and is_new:
            self._logged.add((note.what, peer))
            other = "decode" if self._side == PREFILL else "prefill"
            whom = self.name_of(peer) or (f"rank {peer.hex()[:8]}" if peer else "rank")
            logger.warning(
                "[%s] draft channel, %s %s: %s (%s); %s. %s. Further ones are counted, not logged",
                spec.code, other, whom, spec.message, note.detail or "no detail",
                spec.consequence, spec.remedy,
            )  # fmt: skip

    def moved(self, size: int, seconds: float) -> None:
        name = "sent_bytes_total" if self._side == PREFILL else "needed_bytes_total"
        self._record(name, "draft", amount=size)
        self._record("copy_seconds_total", amount=seconds)

    def announced(self, seconds: float) -> None:
        self._record("ready_seconds", amount=seconds)

    def kernels(self, used: bool) -> None:
        self._record("gpu_kernels", amount=used)

    def refused(self, error: MixKVError) -> None:
        self._record("peers_refused_total", error.reason)

    def ended(self, handle: ReceiveHandle, reason: str) -> None:
        """Queue an ended room for `ticked`, since SGLang's scheduler waits for this call. If the
        reason is BROKEN, the channel thread may have ended: call `ticked` here."""
        if self._made:
            began = Began(handle.prefill, *_outcome(handle, reason))
            self._ended.append((handle.request, began, handle.waited))
        if handle.reason == ColdReason.BROKEN:
            self.ticked()

    def retracted(self, request: Any) -> None:
        """Record that SGLang has resumed a retracted request from its own backup."""
        if self._made:
            self._ended.append((request, None, None))

    def ticked(self) -> None:
        """Count ended rooms and, once a second, ended requests' drafts, slots and breakers."""
        if not self._made or not self._counting.acquire(blocking=False):
            return  # another thread is counting
        try:
            self._count_rooms()
            if time.monotonic() - self._sampled >= SAMPLE_S:
                self._sampled = time.monotonic()
                self._sample()
        except Exception:
            self._stop()
        finally:
            self._counting.release()

    def _sample(self) -> None:
        for rid, (alive, histogram, began) in list(self._watched.items()):
            if (request := alive()) is None or request.finished():
                del self._watched[rid]
                self._count_drafts(began, histogram)
        if self.slots is not None:
            self._record("slots", __version__, amount=self.slots.count)
            self._record("slots_used", amount=self.slots.count - len(self.slots.free_slots))
        if self.breaker is not None:
            names = map(self.name_of, self.breaker.open_peers())
            is_open = {self._known(name) for name in names if name}
            for prefill in list(self._prefills):
                self._record("breaker_open", prefill, amount=prefill in is_open)

    def _count_rooms(self) -> None:
        while self._ended:
            request, began, waited = self._ended.popleft()
            if began is not None:
                _, *outcome = began
                self._record("rooms_total", *outcome)
                self._record("prefill_rooms_total", self._known(began.prefill), *outcome)
                if waited is not None:
                    self._record("wait_seconds", *outcome, amount=waited)
            self._watch(request, began)

    def _watch(self, request: Any, began: Began | None) -> None:
        """Watch a request until it ends. A request that starts twice was retracted."""
        if request is None:
            return
        rid = request.rid
        if rid in self._watched:
            alive, histogram, first = self._watched[rid]
            self._watched[rid] = alive, histogram, Began(first.prefill, "retracted")
        elif began is not None and began.state in STATES and len(self._watched) < MAX_WATCHED:
            self._watched[rid] = weakref.ref(request), request.spec_correct_drafts_histogram, began

    def _count_drafts(self, began: Began, histogram: list[int]) -> None:
        rounds = sum(histogram)
        tokens = rounds + sum(number * count for number, count in enumerate(histogram))
        values = began._replace(prefill=self._known(began.prefill))
        self._record("finished_requests_total", *values)
        self._record("verify_rounds_total", *values, amount=rounds)
        self._record("accepted_tokens_total", *values, amount=tokens)

    def _known(self, prefill: str) -> str:
        is_new = prefill not in self._prefills
        if not prefill or (is_new and len(self._prefills) >= MAX_PREFILLS):
            prefill = OTHER
        self._prefills.add(prefill)
        return prefill

    def _record(self, name: str, *values: str, amount: float = 1) -> None:
        try:
            if made := self._made:
                metric, method = made[name]
                getattr(metric.labels(*self._labels, *values), method)(amount)
        except Exception:
            self._stop()

    def _stop(self) -> None:
        self._made = {}
        logger.exception("[MIXKV-SELF-01] sglang-mixkv: metrics are no longer updated")


def _make(side: str, labels: Mapping[str, str], registry: Any) -> dict[str, Any]:
    """Make one side's series; return them by name, each with its update method. Importing
    prometheus_client reads PROMETHEUS_MULTIPROC_DIR, which SGLang sets before it starts schedulers,
    so it is imported as late as in SGLang (observability/metrics_collector.py)."""
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    made: dict[str, Any] = {}
    gauge = partial(Gauge, multiprocess_mode="mostrecent"), "set"
    histogram = partial(Histogram, buckets=BUCKETS), "observe"
    kinds: dict[str, Any] = {"total": (Counter, "inc"), "seconds": histogram}
    for one in series.SERIES:
        if side in one.sides:
            kind, method = kinds.get(one.name.rpartition("_")[2], gauge)
            names, where = [*labels, *one.labels], registry or REGISTRY
            metric = kind(series.PREFIX + one.name, one.help, names, registry=where)
            made[one.name] = metric, method
            for values in one.initial_labels:
                metric.labels(*labels.values(), *values)
    return made


def _outcome(handle: ReceiveHandle, reason: str) -> tuple[str, str]:
    """Return the labels `state` and `reason` of rooms_total."""
    if handle.state is State.FAILED:
        return "failed", ""
    if reason or handle.state is None:
        return "closed", ColdReason.PREFILL_ABORTED if reason == series.ABORTED else ""
    if handle.state is State.WARM:
        return "warm", ""
    return "cold", ColdReason(handle.reason)


def reporter(side: str) -> MetricsReporter:
    """Make this rank's reporter, without series if metrics are off or fail. Log a failure."""
    try:
        return MetricsReporter(side, _labels(side))
    except Exception:
        logger.exception("[MIXKV-SELF-01] sglang-mixkv has no series at /metrics")
        return MetricsReporter(side, None)


def _labels(side: str) -> dict[str, str] | None:
    """Return the labels of SGLang's scheduler series on this rank (SchedulerMetricsCollector.
    init_new), so that series can be joined, without `priority`, which differs by request. Return
    None if metrics are off."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.runtime_context import get_parallel, get_server_args

    args, parallel = resolved_view(get_server_args()), get_parallel()
    if not args.enable_metrics:
        return None
    found = {"model_name": args.served_model_name, "engine_type": side}
    found |= {name: getattr(parallel, name) for name in ("tp_rank", "pp_rank", "moe_ep_rank")}
    if parallel.dp_rank is not None:
        found["dp_rank"] = parallel.dp_rank
    found.update(args.extra_metric_labels or {})
    return {name: str(value) for name, value in found.items()}
