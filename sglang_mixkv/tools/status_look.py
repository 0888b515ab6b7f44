"""One look at servers' /metrics pages: the plugin's series, by server.

A router's page has those of several servers, which `worker_addr` distinguishes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from sglang_mixkv.tools.client import RequestFailed
from sglang_mixkv.tools.pages import Sample, page, samples

OURS = "sglang_mixkv_"
AT_ONCE = 16


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


def page_url(url: str) -> str:
    """Of what an operator types: with or without scheme, with or without /metrics."""
    whole = url if "://" in url else f"http://{url}"
    return whole if urlsplit(whole).path.strip("/") else f"{whole.rstrip('/')}/metrics"


def look(urls: Iterable[str], timeout: float) -> Look:
    """At all pages side by side."""
    asked = dict.fromkeys(map(page_url, urls))
    found = Look(time.monotonic())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda url: _text(url, timeout), asked)
        for url, answer in zip(asked, answers, strict=True):
            if isinstance(answer, RequestFailed):
                found.unread[url] = str(answer)
            else:
                read(found, url, answer)
    return found


def _text(url: str, timeout: float) -> str | RequestFailed:
    try:
        return page(url, timeout)
    except RequestFailed as error:
        return error


def read(found: Look, url: str, text: str) -> None:
    """A page into the look."""
    server = url.partition("://")[2].removesuffix("/metrics")
    try:
        pages: dict[str, Page] = {server: Page()}
        for sample, value in samples(text):
            name = urlsplit(sample.label("worker_addr")).netloc or sample.label("worker_addr")
            pages.setdefault(name or server, Page()).add(sample, value)
    except ValueError as error:
        found.unread[url] = f"{url} is no page of metrics: {error}"
        return
    if len(pages) > 1 and not pages[server].series:
        del pages[server]  # the router's own
    found.pages.update(pages)
