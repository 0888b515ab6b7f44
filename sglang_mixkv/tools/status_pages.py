"""What servers' /metrics pages say of each server, and of each decode server with each prefill
server. A page may have several servers: `worker_addr` names them on a router's, `instance` on
Prometheus' own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from sglang_mixkv.series import STATES
from sglang_mixkv.tools.client import RequestFailed, request

OURS = "sglang_mixkv_"
AT_ONCE = 16
RANK = ("dp_rank", "pp_rank", "tp_rank", "moe_ep_rank")

# ---------------------------------------------------------------- pages


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


@dataclass
class Page:
    """Of one server. `series`: the plugin's, as name and labels -> value. `role`: `engine_type` of
    its schedulers, "" for none. `is_sglang`: whether SGLang's own series are there."""

    role: str = ""
    is_sglang: bool = False
    series: Counter[Sample] = field(default_factory=Counter)

    def add(self, sample: Sample, value: float) -> None:
        if not sample.name.startswith("sglang_"):
            return
        self.is_sglang = True
        self.role = sample.label("engine_type") or self.role
        if sample.name.startswith(OURS):
            own = sample._replace(name=sample.name.removeprefix(OURS))
            self.series[own] += value  # type: ignore[assignment]

    def of(self, name: str) -> Iterator[tuple[Sample, float]]:
        return ((sample, value) for sample, value in self.series.items() if sample.name == name)

    def requests(self, name: str, label: str = "") -> Counter[str]:
        """A counter's requests, by one label: the TP ranks of a DP rank serve the same ones, so the
        one that counts most stands for them."""
        ranks: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for sample, value in self.of(name):
            where = sample.label("dp_rank"), sample.label(label)
            ranks[where][sample.label("tp_rank")] += round(value)
        found: Counter[str] = Counter()
        for (_, wanted), numbers in ranks.items():
            found[wanted] += max(numbers.values())
        return +found

    def since(self, before: Page) -> Page:
        """Counters as what was added to them, all of them where the server was restarted."""
        now = Counter(self.series)
        for sample, value in before.series.items():
            if sample.name.endswith("_total") and sample in now:
                now[sample] -= value  # type: ignore[assignment]
        restarted = any(value < 0 for value in now.values())
        return self if restarted else Page(self.role, self.is_sglang, now)


@dataclass
class Look:
    """`unread`: URL -> why its page could not be read."""

    pages: dict[str, Page] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)

    def since(self, before: Look) -> Look:
        """What happened since. A server that is new counts from its start."""
        pages = {
            name: one.since(before.pages.get(name, Page())) for name, one in self.pages.items()
        }
        return Look(pages, self.unread)

    def read(self, url: str, text: str) -> None:
        server = url.partition("://")[2].removesuffix("/metrics")
        try:
            pages: dict[str, Page] = {server: Page()}
            for sample, value in samples(text):
                name = sample.label("worker_addr") or sample.label("instance") or server
                pages.setdefault(urlsplit(name).netloc or name, Page()).add(sample, value)
        except ValueError as error:
            self.unread[url] = f"{url} is no page of metrics: {error}"
            return
        if len(pages) > 1 and not pages[server].series:
            del pages[server]  # the router's or Prometheus' own
        self.pages.update(pages)


def page_url(url: str) -> str:
    """Of what an operator types: with or without scheme, with or without /metrics."""
    whole = url if "://" in url else f"http://{url}"
    return whole if urlsplit(whole).path.strip("/") else f"{whole.rstrip('/')}/metrics"


def look(urls: Iterable[str], timeout: float) -> Look:
    """At all pages side by side."""
    found = Look()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = {
            url: pool.submit(request, "GET", url, timeout) for url in map(page_url, urls)
        }  # fmt: skip
    for url, answer in answers.items():
        try:
            found.read(url, answer.result().text)
        except RequestFailed as error:
            why = str(error)
            no_page = why.startswith("HTTP 404")
            found.unread[url] = f"{why} Start it with --enable-metrics" if no_page else why
    return found


# ---------------------------------------------------------------- servers and pairs


@dataclass(frozen=True)
class Server:
    """`ranks`: that have series. `slots`, `slots_used`: of the rank that uses most."""

    name: str
    role: str
    is_sglang: bool
    has_plugin: bool
    ranks: int
    slots: int
    slots_used: int


def servers(now: Look) -> Iterator[Server]:
    for name, page in now.pages.items():
        slots, used = (
            max((round(value) for _, value in page.of(gauge)), default=0)
            for gauge in ("slots", "slots_used")
        )
        ranks = {tuple(map(sample.label, RANK)) for sample in page.series}
        yield Server(
            name, page.role, page.is_sglang, bool(page.series), len(ranks), slots, used
        )  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A decode server and a prefill server's bootstrap address. `rooms`: requests by `warm` and by
    reason of a cold drafter. `accept_lengths`: tokens a verify round of requests that have ended,
    over all ranks, by state; None without any."""

    decode: str
    prefill: str
    rooms: Counter[str]
    accept_lengths: dict[str, float | None]
    breaker_open: bool

    @property
    def warm_share(self) -> float | None:
        return self.rooms["warm"] / self.rooms.total() if self.rooms.total() else None


def pairs(since: Look) -> Iterator[Pair]:
    for name, page in sorted(since.pages.items()):
        for prefill in sorted({sample.label("prefill") for sample in page.series} - {""}):
            theirs = [(s, v) for s, v in page.series.items() if s.label("prefill") == prefill]
            mine = Page(page.role, page.is_sglang, Counter(dict(theirs)))
            lengths = {state: _accept_length(mine, state) for state in STATES}
            is_open = any(value for _, value in mine.of("breaker_open"))
            yield Pair(name, prefill, _rooms(mine), lengths, is_open)


def _rooms(page: Page) -> Counter[str]:
    """The ranks of one DP rank serve the same requests; the one with most colds counts, since a
    request is warm only where no rank says cold. Requests that ended first are left out."""
    groups: defaultdict[str, defaultdict[str, Counter[str]]]
    groups = defaultdict(lambda: defaultdict(Counter))
    for sample, value in page.of("prefill_rooms_total"):
        if sample.label("state") in ("warm", "cold"):
            counts = groups[sample.label("dp_rank")][sample.label("tp_rank")]
            counts[sample.label("reason") or "warm"] += round(value)
    worst = (max(ranks.values(), key=lambda c: c.total() - c["warm"]) for ranks in groups.values())
    return sum(worst, Counter())


def _accept_length(page: Page, state: str) -> float | None:
    tokens, rounds = (
        sum(value for sample, value in page.of(name) if sample.label("state") == state)
        for name in ("accepted_tokens_total", "verify_rounds_total")
    )
    return tokens / rounds if rounds else None
