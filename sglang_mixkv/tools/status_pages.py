"""What servers' /metrics pages say of each server, and of each decode server with each prefill
server.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from sglang_mixkv.series import STATES
from sglang_mixkv.tools.client import RequestFailed, request

OURS = "sglang_mixkv_"
TIMEOUT_S = 5.0
AT_ONCE = 16
RANK = ("dp_rank", "pp_rank", "tp_rank", "moe_ep_rank")


class Sample(NamedTuple):
    """One series. `labels`: sorted pairs."""

    name: str
    labels: tuple[tuple[str, str], ...]

    def label(self, name: str) -> str:
        return dict(self.labels).get(name, "")


def samples(text: str) -> Iterator[tuple[Sample, float]]:
    """Of a Prometheus page. A server's own begins its names with `sglang:`, the router's with
    `sglang_`, as here. Raises ValueError."""
    from prometheus_client.parser import text_string_to_metric_families

    for one in (s for family in text_string_to_metric_families(text) for s in family.samples):
        yield Sample(one.name.replace(":", "_", 1), tuple(sorted(one.labels.items()))), one.value


class Page(dict[Sample, float]):
    """The plugin's series of one server."""

    def of(self, name: str, **labels: str) -> Iterator[tuple[Sample, float]]:
        for sample, value in self.items():
            if sample.name == name and all(sample.label(n) == v for n, v in labels.items()):
                yield sample, value

    def largest(self, name: str) -> int:
        return round(max((value for _, value in self.of(name)), default=0))

    def requests(self, name: str, label: str = "", **labels: str) -> Counter[str]:
        """A counter's requests, by one label: the TP ranks of a DP rank serve the same ones, so the
        one that counts most stands for them."""
        ranks: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for sample, value in self.of(name, **labels):
            where = sample.label("dp_rank"), sample.label(label)
            ranks[where][sample.label("tp_rank")] += round(value)
        found: Counter[str] = Counter()
        for (_, wanted), numbers in ranks.items():
            found[wanted] += max(numbers.values())
        return +found

    def since(self, before: Page) -> Page:
        """Counters as what was added to them, all of them where the server was restarted."""
        counters = (sample for sample in self if sample.name.endswith("_total"))
        added = {sample: self[sample] - before.get(sample, 0) for sample in counters}
        return Page(self | added) if all(value >= 0 for value in added.values()) else self


Pages = dict[str, Page]
"""By server."""


def read(url: str, text: str) -> Pages:
    """A page may have several servers: `worker_addr` names them on a router's, `instance` on
    Prometheus' own. Raises ValueError."""
    server = url.partition("://")[2].removesuffix("/metrics")
    pages = {server: Page()}
    for sample, value in samples(text):
        if sample.name.startswith(OURS):
            name = sample.label("worker_addr") or sample.label("instance") or server
            page = pages.setdefault(urlsplit(name).netloc or name, Page())
            page[sample._replace(name=sample.name.removeprefix(OURS))] = value
    if len(pages) > 1 and not pages[server]:
        del pages[server]  # the router's or Prometheus' own
    return pages


def page_url(url: str) -> str:
    """Of what an operator types: with or without scheme, with or without /metrics."""
    whole = url if "://" in url else f"http://{url}"
    return whole if urlsplit(whole).path.strip("/") else f"{whole.rstrip('/')}/metrics"


def look(urls: Iterable[str], timeout: float = TIMEOUT_S) -> tuple[Pages, dict[str, str]]:
    """At all pages side by side; and why which could not be read."""
    pages, unread = Pages(), dict[str, str]()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = {url: pool.submit(request, "GET", url, timeout) for url in map(page_url, urls)}
    for url, answer in answers.items():
        try:
            pages |= read(url, answer.result().text)
        except RequestFailed as error:
            remedy = " Start it with --enable-metrics" * str(error).startswith("HTTP 404")
            unread[url] = f"{error}{remedy}"
        except ValueError as error:
            unread[url] = f"{url} is no page of metrics: {error}"
    return pages, unread


@dataclass(frozen=True)
class Server:
    """`ranks`: that have series of the plugin. `slots_used`: of the rank that uses most."""

    name: str
    role: str
    ranks: int
    slots: int
    slots_used: int


def servers(pages: Pages) -> Iterator[Server]:
    for name, page in pages.items():
        role = max((sample.label("engine_type") for sample in page), default="no plugin")
        ranks = len({tuple(map(sample.label, RANK)) for sample in page})
        yield Server(name, role, ranks, page.largest("slots"), page.largest("slots_used"))


@dataclass(frozen=True)
class Pair:
    """A decode server and a prefill server's bootstrap address. `rooms`: requests by `warm` and by
    reason of a cold drafter. `accept_lengths`: tokens a verify round of requests that have ended,
    over all ranks, by state; None without any."""

    decode: str
    prefill: str
    rooms: Counter[str]
    accept_lengths: dict[str, float | None]

    @property
    def warm_share(self) -> float | None:
        return self.rooms["warm"] / self.rooms.total() if self.rooms.total() else None


def pairs(since: Pages) -> Iterator[Pair]:
    for name, page in sorted(since.items()):
        for prefill in sorted({sample.label("prefill") for sample in page} - {""}):
            lengths = {state: _accept_length(page, prefill, state) for state in STATES}
            yield Pair(name, prefill, _rooms(page, prefill), lengths)


def _rooms(page: Page, prefill: str) -> Counter[str]:
    """The ranks of one DP rank serve the same requests; the one with most colds counts, since a
    request is warm only where no rank says cold. Requests that ended first are left out."""
    groups: defaultdict[str, defaultdict[str, Counter[str]]]
    groups = defaultdict(lambda: defaultdict(Counter))
    for sample, value in page.of("prefill_rooms_total", prefill=prefill):
        if sample.label("state") in ("warm", "cold"):
            counts = groups[sample.label("dp_rank")][sample.label("tp_rank")]
            counts[sample.label("reason") or "warm"] += round(value)
    worst = (max(ranks.values(), key=lambda c: c.total() - c["warm"]) for ranks in groups.values())
    return sum(worst, Counter())


def _accept_length(page: Page, prefill: str, state: str) -> float | None:
    tokens, rounds = (
        sum(value for _, value in page.of(name, prefill=prefill, state=state))
        for name in ("accepted_tokens_total", "verify_rounds_total")
    )
    return tokens / rounds if rounds else None
