"""What servers' /metrics pages say of each server, and of each decode server with each prefill
server. A router's page has those of several servers, which `worker_addr` distinguishes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from sglang_mixkv.series import DECODE, PREFILL
from sglang_mixkv.tools.client import RequestFailed
from sglang_mixkv.tools.pages import Ranks, Rooms, Sample, add_rooms, samples
from sglang_mixkv.tools.pages import page as page_text

OURS = "sglang_mixkv_"
AT_ONCE = 16
RANK = ("dp_rank", "pp_rank", "tp_rank", "moe_ep_rank")
BYTES = {PREFILL: "sent_bytes_total", DECODE: "needed_bytes_total"}

# ---------------------------------------------------------------- pages


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
            self.series[sample.renamed(sample.name.removeprefix(OURS))] += value  # type: ignore[assignment]

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
    """`at`: seconds. `unread`: URL -> why its page could not be read."""

    at: float
    pages: dict[str, Page] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)

    def since(self, before: Look) -> Look:
        """What happened since. A server that is new counts from its start."""
        pages = {
            name: one.since(before.pages.get(name, Page())) for name, one in self.pages.items()
        }
        return Look(self.at, pages, self.unread)

    def read(self, url: str, text: str) -> None:
        server = url.partition("://")[2].removesuffix("/metrics")
        try:
            pages: dict[str, Page] = {server: Page()}
            for sample, value in samples(text):
                name = urlsplit(sample.label("worker_addr")).netloc or sample.label("worker_addr")
                pages.setdefault(name or server, Page()).add(sample, value)
        except ValueError as error:
            self.unread[url] = f"{url} is no page of metrics: {error}"
            return
        if len(pages) > 1 and not pages[server].series:
            del pages[server]  # the router's own
        self.pages.update(pages)


def page_url(url: str) -> str:
    """Of what an operator types: with or without scheme, with or without /metrics."""
    whole = url if "://" in url else f"http://{url}"
    return whole if urlsplit(whole).path.strip("/") else f"{whole.rstrip('/')}/metrics"


def look(urls: Iterable[str], timeout: float) -> Look:
    """At all pages side by side."""
    found = Look(time.monotonic())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = {url: pool.submit(page_text, url, timeout) for url in map(page_url, urls)}
    for url, answer in answers.items():
        try:
            found.read(url, answer.result())
        except RequestFailed as error:
            found.unread[url] = str(error)
    return found


# ---------------------------------------------------------------- servers and pairs


@dataclass(frozen=True)
class Server:
    """`ranks`: that have series. `slots`, `slots_used`: of the rank that uses most. `moved`: bytes
    of draft KV a second, over all ranks, None without a second look."""

    name: str
    role: str
    is_sglang: bool
    has_plugin: bool
    ranks: int
    slots: int
    slots_used: int
    moved: float | None


def servers(now: Look, between: Look, seconds: float) -> Iterator[Server]:
    """`between`: what happened in so many seconds, 0 with one look."""
    for name, page in now.pages.items():
        moved = sum(value for _, value in between.pages[name].of(BYTES.get(page.role, "")))
        slots, used = (
            max((round(value) for _, value in page.of(gauge)), default=0)
            for gauge in ("slots", "slots_used")
        )
        ranks = {tuple(map(sample.label, RANK)) for sample in page.series}
        yield Server(
            name, page.role, page.is_sglang, bool(page.series), len(ranks), slots, used,
            moved / seconds if seconds else None,
        )  # fmt: skip


@dataclass
class Drafts:
    """Of requests that have ended."""

    requests: float = 0
    rounds: float = 0
    tokens: float = 0

    @property
    def length(self) -> float | None:
        """Tokens a verify round."""
        return self.tokens / self.rounds if self.rounds else None


@dataclass
class Pair:
    """A decode server and a prefill server's bootstrap address. `rooms`: `warm`, or why cold, of
    the rank that has most colds. `drafts`: by state, over all ranks."""

    decode: str
    prefill: str
    rooms: Counter[str] = field(default_factory=Counter)
    drafts: defaultdict[str, Drafts] = field(default_factory=lambda: defaultdict(Drafts))
    breaker_open: bool = False

    @property
    def warm_share(self) -> float | None:
        return self.rooms["warm"] / self.rooms.total() if self.rooms.total() else None

    @property
    def lost(self) -> float | None:
        """The share of tokens a round that its cold drafters cost; None without both kinds."""
        warm, cold = self.drafts["warm"], self.drafts["cold"]
        if not warm.length or not cold.length:
            return None
        both = (warm.tokens + cold.tokens) / (warm.rounds + cold.rounds)
        return max(0.0, 1 - both / warm.length)


def pairs(since: Look) -> Iterator[Pair]:
    for name, page in since.pages.items():
        found: dict[str, Pair] = {}
        ranks: defaultdict[str, Ranks] = defaultdict(dict)
        for sample, value in page.series.items():
            if prefill := sample.label("prefill"):
                pair = found.setdefault(prefill, Pair(name, prefill))
                drafts = pair.drafts[sample.label("state")]
                match sample.name:
                    case "prefill_rooms_total":
                        add_rooms(ranks[prefill], (name,), sample, value)
                    case "finished_requests_total":
                        drafts.requests += value
                    case "verify_rounds_total":
                        drafts.rounds += value
                    case "accepted_tokens_total":
                        drafts.tokens += value
                    case "breaker_open" if value:
                        pair.breaker_open = True
        for prefill, pair in sorted(found.items()):
            pair.rooms = Rooms(ranks[prefill]).counts
            yield pair
