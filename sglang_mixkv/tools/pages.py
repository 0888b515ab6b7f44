"""What servers' metrics say of transfers: seconds waited for, bytes sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import requests

from sglang_mixkv.tools.client import session

STAGES = "sglang_per_stage_req_latency_seconds"
TRANSFER_STAGE = "prefill_transfer_kv_cache"
"""From the end of a request's prefill to the end of its transfer (req_time_stats.py): what a
client waits for; earlier chunks travel while the prefill still computes."""

SENT = "sglang_mixkv_sent_bytes_total"
TIMEOUT_S = 30


@dataclass(frozen=True)
class Transfers:
    """Over all prefill ranks that report: seconds and number of transfers, bytes by component. A
    difference of two is empty where a server was restarted in between."""

    seconds: float = 0.0
    number: float = 0.0
    sent: dict[str, float] = field(default_factory=dict)

    def __sub__(self, before: Transfers) -> Transfers:
        sent = {name: size - before.sent.get(name, 0.0) for name, size in self.sent.items()}
        now = Transfers(self.seconds - before.seconds, self.number - before.number, sent)
        restarted = now.number < 0 or any(size < 0 for size in sent.values())
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
    families = (family for page in pages for family in text_string_to_metric_families(page))
    for sample in (sample for family in families for sample in family.samples):
        name = sample.name.replace(":", "_", 1)
        stage, _, kind = name.rpartition("_")
        if stage == STAGES and kind in found and sample.labels.get("stage") == TRANSFER_STAGE:
            found[kind] += sample.value
        if name == SENT:
            component = sample.labels.get("component", "")
            sent[component] = sent.get(component, 0.0) + sample.value
    return Transfers(found["sum"], found["count"], sent)


def fetch(url: str) -> str | None:
    """A page of metrics; None where there is none."""
    with session() as made:
        try:
            answer = made.get(url, timeout=TIMEOUT_S)
        except requests.RequestException:
            return None
    return answer.text if answer.status_code == requests.codes.ok else None
