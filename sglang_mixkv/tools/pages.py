"""What servers' metrics say of transfers: seconds waited for, bytes sent, warm drafters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_mixkv.series import PREFIX, SERIES
from sglang_mixkv.tools.client import RequestFailed, get

STAGES = "sglang_per_stage_req_latency_seconds"
TRANSFER_STAGE = "prefill_transfer_kv_cache"
"""From the end of a request's prefill to the end of its transfer (req_time_stats.py): what a
client waits for; earlier chunks travel while the prefill still computes."""

SENT = "sglang_mixkv_sent_bytes_total"
ROOMS = "sglang_mixkv_rooms_total"
TIMEOUT_S = 30.0

Ranks = dict[tuple[str, ...], Counter[str]]


@dataclass(frozen=True)
class Rooms:
    """Requests by `warm` and by reason of a cold drafter, of each decode rank: server, DP rank,
    TP rank. The ranks of one DP rank serve the same requests; the one with most colds counts, since
    a request is warm only where no rank says cold."""

    ranks: Ranks = field(default_factory=dict)

    @property
    def counts(self) -> Counter[str]:
        groups: defaultdict[tuple[str, ...], list[Counter[str]]] = defaultdict(list)
        for rank, counts in self.ranks.items():
            groups[rank[:-1]].append(counts)
        found: Counter[str] = Counter()
        for group in groups.values():
            worst = max(group, key=_cold)
            found += worst
        return found

    @property
    def warm_share(self) -> float | None:
        """None without a request over the draft channel."""
        counts = self.counts
        return counts["warm"] / counts.total() if counts.total() else None


def _cold(counts: Counter[str]) -> int:
    return counts.total() - counts["warm"]


@dataclass(frozen=True)
class Transfers:
    """Over all ranks that report: seconds and number of transfers, bytes by component, rooms. A
    difference of two is empty where a server was restarted in between."""

    seconds: float = 0.0
    number: float = 0.0
    sent: dict[str, float] = field(default_factory=dict)
    rooms: Rooms = field(default_factory=Rooms)

    def __sub__(self, before: Transfers) -> Transfers:
        sent = {name: size - before.sent.get(name, 0.0) for name, size in self.sent.items()}
        ranks = {rank: Counter(counts) for rank, counts in self.rooms.ranks.items()}
        for rank, counts in ranks.items():
            counts.subtract(before.rooms.ranks.get(rank, {}))
        now = Transfers(
            self.seconds - before.seconds, self.number - before.number, sent, Rooms(ranks)
        )
        figures = [now.number, *sent.values(), *(n for c in ranks.values() for n in c.values())]
        restarted = any(figure < 0 for figure in figures)
        return Transfers() if restarted else now

    @property
    def mean_s(self) -> float | None:
        """Of one request's wait; None where there was no transfer."""
        return self.seconds / self.number if self.number else None


class Sample(NamedTuple):
    """One series. `labels`: sorted pairs."""

    name: str
    labels: tuple[tuple[str, str], ...]

    def label(self, name: str) -> str:
        return dict(self.labels).get(name, "")

    def renamed(self, name: str) -> Sample:
        return self._replace(name=name)


def samples(text: str) -> Iterator[tuple[Sample, float]]:
    """Of a Prometheus page. A server's own begins its names with `sglang:`, the router's with
    `sglang_`, as here. Raises ValueError."""
    from prometheus_client.parser import text_string_to_metric_families

    for one in (s for family in text_string_to_metric_families(text) for s in family.samples):
        yield Sample(one.name.replace(":", "_", 1), tuple(sorted(one.labels.items()))), one.value


def totals(text: str, without: str = "") -> Counter[tuple[str, ...]]:
    """The plugin's series of a page, summed over ranks, by their names behind the prefix and the
    values of their own labels, but for the label `without` and empty values. Raises ValueError."""
    own = {PREFIX.replace(":", "_") + one.name: one for one in SERIES}
    found: Counter[tuple[str, ...]] = Counter()
    for sample, value in samples(text):
        if one := own.get(sample.name):
            labels = (sample.label(name) for name in one.labels if name != without)
            found[one.name, *filter(None, labels)] += value  # type: ignore[assignment]
    return found


def read(pages: Iterable[str]) -> Transfers:
    """Of Prometheus pages. Raises ValueError."""
    found = {"sum": 0.0, "count": 0.0}
    sent: dict[str, float] = {}
    ranks: Ranks = {}
    for number, text in enumerate(pages):
        for sample, value in samples(text):
            stage, _, kind = sample.name.rpartition("_")
            if stage == STAGES and kind in found and sample.label("stage") == TRANSFER_STAGE:
                found[kind] += value
            if sample.name == SENT:
                component = sample.label("component")
                sent[component] = sent.get(component, 0.0) + value
            if sample.name == ROOMS:
                add_rooms(ranks, (str(number), sample.label("worker_addr")), sample, value)
    return Transfers(found["sum"], found["count"], sent, Rooms(ranks))


def add_rooms(ranks: Ranks, server: tuple[str, ...], sample: Sample, value: float) -> None:
    """A series of rooms, counted by its rank. Requests that ended first are left out."""
    if sample.label("state") in ("warm", "cold"):
        rank = (*server, sample.label("dp_rank"), sample.label("tp_rank"))
        counts = ranks.setdefault(rank, Counter())
        counts[sample.label("reason") or "warm"] += int(value)


def page(url: str, timeout: float = TIMEOUT_S) -> str:
    """Raises RequestFailed, which says why there is none."""
    return get(url, timeout).text


def fetch(url: str) -> str | None:
    """A page of metrics; None where there is none."""
    try:
        return page(url)
    except RequestFailed:
        return None
