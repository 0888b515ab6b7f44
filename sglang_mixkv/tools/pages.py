"""Reads servers' /metrics pages: their series, and the counts of requests by how drafters began."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_mixkv.series import PREFIX, SERIES
from sglang_mixkv.tools.client import RequestFailed, request

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


def _cold(counts: Counter[str]) -> int:
    return counts.total() - counts["warm"]


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


def add_rooms(ranks: Ranks, server: tuple[str, ...], sample: Sample, value: float) -> None:
    """A series of rooms, counted by its rank. Requests that ended first are left out."""
    if sample.label("state") in ("warm", "cold"):
        rank = (*server, sample.label("dp_rank"), sample.label("tp_rank"))
        counts = ranks.setdefault(rank, Counter())
        counts[sample.label("reason") or "warm"] += int(value)


def page(url: str, timeout: float = 30.0) -> str:
    """Raises RequestFailed, which says why there is none."""
    return request("GET", url, timeout).text


def fetch(url: str) -> str | None:
    """A page of metrics; None where there is none."""
    try:
        return page(url)
    except RequestFailed:
        return None
