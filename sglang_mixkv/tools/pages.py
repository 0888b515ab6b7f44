"""What servers' metrics say of transfers: seconds waited for, bytes sent, warm drafters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import requests

from sglang_mixkv.tools.client import session

STAGES = "sglang_per_stage_req_latency_seconds"
TRANSFER_STAGE = "prefill_transfer_kv_cache"
"""From the end of a request's prefill to the end of its transfer (req_time_stats.py): what a
client waits for; earlier chunks travel while the prefill still computes."""

SENT = "sglang_mixkv_sent_bytes_total"
ROOMS = "sglang_mixkv_rooms_total"
TIMEOUT_S = 30


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


def read(pages: Iterable[str]) -> Transfers:
    """Of Prometheus pages. A server's own page begins its names with `sglang:`, the router's with
    `sglang_`. Raises ValueError."""
    from prometheus_client.parser import text_string_to_metric_families

    found = {"sum": 0.0, "count": 0.0}
    sent: dict[str, float] = {}
    ranks: Ranks = {}
    families = (
        (str(number), family)
        for number, page in enumerate(pages)
        for family in text_string_to_metric_families(page)
    )
    for page, sample in ((page, sample) for page, family in families for sample in family.samples):
        name = sample.name.replace(":", "_", 1)
        stage, _, kind = name.rpartition("_")
        if stage == STAGES and kind in found and sample.labels.get("stage") == TRANSFER_STAGE:
            found[kind] += sample.value
        if name == SENT:
            component = sample.labels.get("component", "")
            sent[component] = sent.get(component, 0.0) + sample.value
        if name == ROOMS and sample.labels["state"] in ("warm", "cold"):
            counts = ranks.setdefault(_rank(page, sample.labels), Counter())
            counts[sample.labels["reason"] or "warm"] += int(sample.value)
    return Transfers(found["sum"], found["count"], sent, Rooms(ranks))


def _rank(page: str, labels: Mapping[str, str]) -> tuple[str, ...]:
    """`worker_addr`: which server, on a router's page."""
    return (page, *(labels.get(name, "") for name in ("worker_addr", "dp_rank", "tp_rank")))


def fetch(url: str) -> str | None:
    """A page of metrics; None where there is none."""
    with session() as made:
        try:
            answer = made.get(url, timeout=TIMEOUT_S)
        except requests.RequestException:
            return None
    return answer.text if answer.status_code == requests.codes.ok else None
