"""Show running servers on one screen, from their /metrics pages.

    python -m sglang_mixkv status URL... [--seconds N] [--json]

A URL is that of a server, or of a metrics page of a router or Prometheus. Requests are counted
since each server's start; with --seconds N, only those that end in the next N seconds are counted.

Exit status: 0 nothing is wrong; 1 something is; 2 a page could not be read.

Servers need --enable-metrics. If they require an API key, set SGLANG_MIXKV_API_KEY to it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from math import isfinite
from multiprocessing import TimeoutError
from multiprocessing.pool import ThreadPool

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sglang_mixkv.decode.cold import ColdReason
from sglang_mixkv.series import MEMORY, NOTES, PREFILL, STATES
from sglang_mixkv.tools import as_json, bounded, hidden, parser, point, printable, table
from sglang_mixkv.tools.client import RequestFailed, request

COLD_SHARE = 0.01  # of requests, as in the alert MixKVColdDrafters
OURS, NONE, TIMEOUT_S = "sglang_mixkv_", "-", 5.0
NO_PAGE = ". Start it with --enable-metrics. For a router, give its servers or its /engine_metrics"
SERVERS = ("server", "role", "release", "ranks", "slots in use", "wait: p50", "p99")
PAIRS = ("decode", "prefill", "requests", "warm", "accept: warm", *STATES[1:])
RANK = ("dp_rank", "pp_rank", "tp_rank", "moe_ep_rank")


def samples(text: str) -> Iterator[Sample]:
    """Read the finite samples of a metrics page. Names begin with `sglang:` on a server's page,
    with `sglang_` on a router's page and in the result. Raises ValueError."""
    for one in (s for family in text_string_to_metric_families(text) for s in family.samples):
        if isfinite(one.value):
            yield one._replace(name=one.name.replace(":", "_", 1))


def _rank(sample: Sample) -> tuple[str, ...]:
    return tuple(sample.labels.get(name, "") for name in RANK)


class Page(list[Sample]):
    """The plugin's series of one server."""

    def ranks(self, name: str, by: str = "", **labels: Collection[str]) -> list[Counter[str]]:
        """On each rank, sum the series with this name and these labels, by the label `by`."""
        found: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        for one in (sample for sample in self if sample.name == name):
            if all(one.labels.get(label, "") in some for label, some in labels.items()):
                found[_rank(one)][one.labels.get(by, "")] += round(one.value)
        return [*found.values()]

    def most(self, name: str, **labels: Collection[str]) -> int:
        return max((one.total() for one in self.ranks(name, "", **labels)), default=0)

    def counts(
        self, name: str, by: str = "", but: str = "*", **labels: Collection[str]
    ) -> Counter[str]:
        """Count requests by a label. The ranks of a DP rank serve the same requests, so take the
        rank with the most requests, not counting those of `but`."""
        groups = {sample.labels.get("dp_rank", "") for sample in self}
        each = (self.ranks(name, by, dp_rank=[one], **labels) for one in groups)
        most = (max(one, key=lambda n: n.total() - n[but], default=Counter()) for one in each)
        return sum(most, Counter())

    def within(self, name: str, share: float) -> float | None:
        """Return the bucket bound within which `share` of a histogram lies, or the last finite
        bound if that is less. Take the largest of all ranks, since a request waits for all."""
        found = list[float]()
        for one in (rank for rank in self.ranks(f"{name}_bucket", "le") if rank.total()):
            below = sum(number < share * max(one.values()) for number in one.values())
            found.append(sorted(map(float, one))[min(below, len(one) - 2)])
        return max(found, default=None)

    def since(self, before: Page) -> Page:
        """Subtract `before` from the counters, unless the server restarted in between."""
        counters = (one for one in before if one.name.endswith(("_total", "_bucket")))
        was = {_key(one): one.value for one in counters}
        added = Page(one._replace(value=one.value - was.get(_key(one), 0)) for one in self)
        return added if all(one.value >= 0 for one in added) else self


def _key(sample: Sample) -> tuple[str, frozenset[tuple[str, str]]]:
    return sample.name, frozenset(sample.labels.items())


MetricPages = dict[str, Page]
"""Each server's page, by the server's name."""


def read(url: str, text: str) -> MetricPages:
    """Split a page by server: `worker_addr` names servers on a router's page, `instance` on that of
    Prometheus. Raises ValueError."""
    server = url.rpartition("@")[2].rpartition("://")[2].removesuffix("/metrics")
    pages = defaultdict[str, Page](Page)
    for sample in samples(text):
        if sample.name.startswith(OURS):
            name = sample.labels.get("worker_addr") or sample.labels.get("instance") or server
            own = sample._replace(name=sample.name.removeprefix(OURS))
            pages[name.rpartition("://")[2]].append(own)
    return pages or {server: Page()}


def page_url(url: str) -> str:
    """Add the scheme and /metrics to an operator's URL where they are missing."""
    whole = url if "://" in url else f"http://{url}"
    return whole if "?" in whole or whole.endswith("metrics") else f"{whole.rstrip('/')}/metrics"


def look(urls: Iterable[str], timeout: float = TIMEOUT_S) -> tuple[MetricPages, dict[str, str]]:
    """Read all pages concurrently. Return them, and why others could not be read. Give up on a
    server that sends nothing after `timeout` seconds, on a slow one after twice as long."""
    pages, unread, wholes = MetricPages(), dict[str, str](), [*map(page_url, urls)]
    end = time.monotonic() + 2 * timeout
    with ThreadPool(len(wholes)) as pool:
        answers = [pool.apply_async(request, ("GET", url, timeout)) for url in wholes]
        for url, answer in zip(map(hidden, wholes), answers, strict=True):
            try:
                pages |= read(url, answer.get(max(0.0, end - time.monotonic())).text)
            except RequestFailed as error:
                unread[url] = f"{error}{NO_PAGE * (error.status == 404)}"
            except TimeoutError:
                unread[url] = f"{url} did not end within {2 * timeout:.0f} s"
            except ValueError as error:
                unread[url] = f"{url} is not a metrics page: {error}"
    return pages, unread


class ServerSlots(msgspec.Struct, frozen=True):
    """`ranks`: how many ranks have series of the plugin. `slots_used`: on the rank that uses most
    slots. `p50`, `p99`: seconds within which 50 and 99 % of requests had their draft KV; on
    prefill, the same for chunks and their READY. `release`: of the plugin, NONE before 0.4."""

    name: str
    role: str
    release: str
    ranks: int
    slots: int
    slots_used: int
    p50: float | None
    p99: float | None

    def row(self) -> tuple[str, ...]:
        slots = f"{self.slots_used} of {self.slots}" if self.slots else NONE
        waits = (NONE if one is None else f"{1000 * one:.0f} ms" for one in (self.p50, self.p99))
        return self.name, self.role, self.release, str(self.ranks or NONE), slots, *waits


class Pair(msgspec.Struct, frozen=True):
    """A decode server and a prefill server's bootstrap address. `rooms`: requests by cold reason or
    `warm`, without those that ended earlier. `accept_lengths`: tokens per verify round of requests
    that have ended, over all ranks, by state; None without any."""

    decode: str
    prefill: str
    rooms: Counter[str]
    accept_lengths: dict[str, float | None]

    @property
    def warm_share(self) -> float | None:
        return self.rooms["warm"] / self.rooms.total() if self.rooms.total() else None

    def row(self) -> tuple[str, ...]:
        warm = NONE if self.warm_share is None else f"{self.warm_share:.1%}"
        lengths = (self.accept_lengths[state] for state in STATES)
        accepted = (NONE if length is None else f"{length:.2f}" for length in lengths)
        return self.decode, self.prefill, f"{self.rooms.total():,}", warm, *accepted


class Status(msgspec.Struct, frozen=True):
    """`wrong`: faults of a server, or of a decode server and one of its prefill servers. `unread`:
    URL -> why it could not be read."""

    servers: list[ServerSlots]
    pairs: list[Pair]
    wrong: list[Wrong]
    unread: dict[str, str]

    def text(self) -> str:
        lines, points = list[str](), [*self.unread.values()]
        for head, rows in ((SERVERS, self.servers), (PAIRS, self.pairs)):
            lines += [*table([head, *(one.row() for one in rows)]), ""] if rows else []
        points += [f"{one.where}: {one.what}. {one.remedy}" for one in self.wrong]
        lines += [line for text in points for line in point(text, "!! ")]
        return "\n".join(lines if points else [*lines, "nothing is wrong"])


class Wrong(msgspec.Struct, frozen=True):
    where: str
    what: str
    remedy: str


def status(now: MetricPages, unread: dict[str, str], first: MetricPages | None = None) -> Status:
    """Judge the pages. `first`: earlier pages to count from; without them, and for new servers,
    counts are from each server's start."""
    before = first or MetricPages()
    since = {name: page.since(before.get(name, Page())) for name, page in now.items()}
    found, rows = [_server(*one) for one in since.items()], [*_pairs(since)]
    wrong = [Wrong(one.name, *what) for one in found for what in _of_server(one, since[one.name])]
    wrong += (one for pair in rows for one in _of_pair(pair))
    return Status(found, rows, wrong, unread)


def _server(name: str, page: Page) -> ServerSlots:
    role = max((one.labels.get("engine_type", "") for one in page), default="no plugin")
    release = max((one.labels.get("release", "") for one in page), default="") or NONE
    ranks = len({*map(_rank, page)})
    wait = "ready_seconds" if role == PREFILL else "wait_seconds"
    found = page.most("slots"), page.most("slots_used"), page.within(wait, 0.5)
    return ServerSlots(name, role, release, ranks, *found, page.within(wait, 0.99))


def _pairs(since: MetricPages) -> Iterator[Pair]:
    for name, page in sorted(since.items()):
        for prefill in sorted({one.labels.get("prefill", "") for one in page} - {""}):
            # A request is warm only if no rank is cold: take the rank with the most cold requests.
            rooms = page.counts(
                "prefill_rooms_total", "reason", "", prefill=[prefill], state=["warm", "cold"]
            )
            rooms = Counter({reason or "warm": number for reason, number in rooms.items()})
            tokens, rounds = (
                sum(page.ranks(f"{what}_total", "state", prefill=[prefill]), Counter())
                for what in ("accepted_tokens", "verify_rounds")
            )
            lengths = {s: tokens[s] / rounds[s] if rounds[s] else None for s in STATES}
            yield Pair(name, prefill, rooms, lengths)


def _of_server(server: ServerSlots, page: Page) -> Iterator[tuple[str, str]]:
    """Yield each problem of a server, and its remedy."""
    if not server.ranks:
        what = "its page (give a server's own page) has no series of the plugin"
        yield what, "Start it with --enable-mixkv; if it has that flag, search its log for MIXKV-"
    elif 0 < server.slots <= server.slots_used:
        yield "all slots of a rank are in use", f"{MEMORY} if this persists"
    if not all(one.total() for one in page.ranks("gpu_kernels")):
        what = "torch copies draft KV on a GPU, an estimated 13 to 30 times slower"
        yield what, "Search its log for MIXKV-START-07"
    for reason, number in page.counts("peers_refused_total", "reason").items():
        what = f"{number} requests failed: a prefill server is refused ({reason})"
        yield what, "Search decode's log for MIXKV-"
    if failed := page.counts("rooms_total", state=["failed"], reason=[""]).total():
        spec = NOTES["not_cleared"]
        yield f"{failed} requests failed: {spec.message}", f"Search decode's log for {spec.code}"
    for spec in (NOTES["unopened"], NOTES["expired"], NOTES["weights_different"]):
        if number := page.counts(spec.series, state=[*spec.values] or [""]).total():
            yield f"{number} times {spec.message}", spec.remedy


def _of_pair(pair: Pair) -> Iterator[Wrong]:
    if pair.warm_share is None or 1 - pair.warm_share <= COLD_SHARE:
        return
    for reason, number in pair.rooms.most_common():
        if reason != "warm":
            spec = NOTES[ColdReason(reason)]
            what = f"{number} of {pair.rooms.total()} requests started cold ({reason})"
            what += f": {spec.message}" * bool(spec.message)
            yield Wrong(f"{pair.decode}, prefill {pair.prefill}", what, spec.remedy)


def main(argv: list[str]) -> int:
    made = parser("status", __doc__)
    add = made.add_argument
    add("urls", nargs="+", metavar="URL", help="http://HOST:PORT of a server, or a metrics page")
    of_now = "count the requests of the next N seconds"
    add("--seconds", metavar="N", type=bounded(1, 1 << 20), help=of_now)
    add("--json", action="store_true", help="print JSON instead of the tables")
    args = made.parse_args(argv)
    first, (now, unread) = None, look(args.urls)
    if args.seconds:
        time.sleep(args.seconds)
        first, (now, unread) = now, look(args.urls)
    found = status(now, unread, first)
    print(as_json(found) if args.json else printable(found.text()))
    return 2 if unread else int(bool(found.wrong))
