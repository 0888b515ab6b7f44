"""Deployments that answer prompts: a single server, or prefill + decode behind SGLang's router.

    with Fleet() as fleet:
        deployment = disaggregated(fleet, "mla", Topology(), progress)
        answer = deployment.ask(prompt)

Both builders return after a first request, for which the engine compiles its kernels.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import requests

from mixkv_demo import launch, series
from mixkv_demo.client import Answer, post
from mixkv_demo.launch import Launch, Topology
from mixkv_demo.pair import ask, prompts, request_body
from mixkv_demo.processes import Fleet, ServerProcess
from sglang_mixkv.tools.client import RequestFailed, request

START_TIMEOUT_S = 900.0
FIRST_ANSWER_S = 60.0
POLL_S = 0.5
PAGE_S = 30.0
SETTLE_S = 3.0
"""Seconds to wait, after a failed request, for a server that is about to die."""

Progress = Callable[[str, str], None]
"""Called with a server's name and its state."""

T = TypeVar("T")


def silent(_name: str, _state: str) -> None:
    """A progress callback that prints nothing."""


@dataclass(frozen=True)
class DraftBytes:
    """Draft KV bytes since start: `sent`, packed by prefill ranks, and `needed`, put in place by
    decode ranks. Each side counts separately, so that the two numbers check each other."""

    sent: int
    needed: int

    def since(self, before: DraftBytes) -> DraftBytes:
        return DraftBytes(self.sent - before.sent, self.needed - before.needed)


@dataclass(frozen=True)
class Deployment:
    """Running servers, and the URL for requests. ``servers``: the servers that run models;
    ``routers``: the routers in front of them."""

    fleet: Fleet
    url: str
    servers: tuple[Launch, ...] = ()
    routers: tuple[Launch, ...] = ()

    @property
    def prefill(self) -> str:
        """Return the URL of a pair's prefill server."""
        return self.servers[0].url

    def ask(self, prompt: list[int]) -> Answer:
        """Send one prompt. Raises RequestFailed, or ServerDied if a server ends meanwhile."""
        try:
            return _watched(self.fleet, lambda: ask(self.url, prompt))
        except RequestFailed:
            _settle(self.fleet)
            raise

    def watch(self, call: Callable[[], T]) -> T:
        """Return a blocking call's result. Raises ServerDied as soon as a server ends meanwhile."""
        return _watched(self.fleet, call)

    def counters(self) -> Counter[tuple[str, ...]]:
        """Sum the plugin's series over all ranks of all servers, once the series stop changing:
        servers count a request after they have answered."""
        last = totals(self.servers)
        while True:
            time.sleep(POLL_S)
            now = totals(self.servers)
            if now == last:
                return now
            last = now

    def draft_bytes(self) -> DraftBytes | None:
        """Return the draft bytes so far; None if no server counts draft bytes."""
        found = self.counters()
        if ("sent_bytes_total", "draft") not in found:
            return None
        sent, needed = (found[f"{name}_bytes_total", "draft"] for name in ("sent", "needed"))
        return DraftBytes(int(sent), int(needed))


def totals(servers: Sequence[Launch]) -> Counter[tuple[str, ...]]:
    """Sum the plugin's series over all servers' pages, by name and labels. A server without a page
    adds nothing."""
    found: Counter[tuple[str, ...]] = Counter()
    for server in servers:
        with suppress(RequestFailed):
            page = request("GET", f"{server.url}/metrics", PAGE_S).text
            found.update(series.totals(page, without="prefill"))
    return found


def _watched(fleet: Fleet, call: Callable[[], T]) -> T:
    """Return a blocking call's result, or give up as soon as a server of the fleet ends."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not result.done():
        fleet.check()
        wait([result], timeout=POLL_S)
    return result.result()


def _settle(fleet: Fleet) -> None:
    """Wait SETTLE_S after an error, and raise ServerDied if a server ends in that time."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        fleet.check()
        time.sleep(POLL_S)


def _is_healthy(server: Launch) -> bool:
    """Call /health. SGLang generates a token for it. A router only shows that it listens."""
    try:
        with requests.Session() as session:
            session.trust_env = False
            return session.get(f"{server.url}/health", timeout=30).status_code == requests.codes.ok
    except requests.RequestException:
        return False


def _serves(server: Launch) -> bool:
    """Return whether this server accepts a request: a router answers 503 until it knows its
    workers. A request that times out counts as accepted."""
    try:
        response = post(f"{server.url}/generate", request_body(prompts()[0]), FIRST_ANSWER_S)
    except requests.ReadTimeout:
        return True
    except requests.ConnectionError:
        return False
    return response.status_code != requests.codes.unavailable


def _poll(
    fleet: Fleet, servers: Sequence[Launch], is_up: Callable[[Launch], bool], tell: Progress
) -> None:
    """Block until all servers are up. Raises ServerDied or TimeoutError."""
    deadline = time.monotonic() + START_TIMEOUT_S
    waiting = list(servers)
    while waiting:
        if time.monotonic() > deadline:
            names = ", ".join(server.name for server in waiting)
            raise TimeoutError(f"{names}: not ready after {START_TIMEOUT_S:.0f} s")
        for server in waiting:
            tell(server.name, "starting")
        up = [server for server in waiting if _watched(fleet, partial(is_up, server))]
        for server in up:
            tell(server.name, "healthy")
            waiting.remove(server)
        time.sleep(POLL_S)


def start(fleet: Fleet, servers: Sequence[Launch], tell: Progress = silent) -> list[ServerProcess]:
    """Start servers concurrently; wait until all are healthy."""
    started = [fleet.start(server.name, server.argv, server.env) for server in servers]
    _poll(fleet, servers, _is_healthy, tell)
    return started


def bring_up(fleet: Fleet, servers: Sequence[Launch], tell: Progress) -> list[ServerProcess]:
    """Start servers; wait until all are healthy and the last one accepts a request."""
    started = start(fleet, servers, tell)
    entry = servers[-1]
    tell(entry.name, "first request")
    _poll(fleet, [entry], _serves, silent)
    tell(entry.name, "ready")
    return started


def single(
    fleet: Fleet,
    pair: str,
    flags: Sequence[str] = (),
    progress: Progress = silent,
    device: str = "cpu",
) -> Deployment:
    """Start one server that does both prefill and decode: the reference."""
    server = launch.server("server", pair, flags, device=device)
    bring_up(fleet, [server], progress)
    return Deployment(fleet, server.url, (server,))


Change = Callable[[Launch], Launch]


def unchanged(server: Launch) -> Launch:
    return server


def disaggregated(
    fleet: Fleet,
    pair: str,
    topology: Topology,
    progress: Progress = silent,
    *,
    prefill: Change = unchanged,
    decode: Change = unchanged,
) -> Deployment:
    """Start prefill and decode servers and their router, all together. `prefill`, `decode`:
    functions that change the server that the topology describes."""
    first, second, bootstrap = launch.prefill_and_decode(pair, topology)
    servers = prefill(first), decode(second)
    router = launch.router(*servers, bootstrap)
    bring_up(fleet, [*servers, router], progress)
    return Deployment(fleet, router.url, servers, (router,))


@dataclass(frozen=True)
class OneCold:
    """Two prefill servers for one decode server, each with its bootstrap port: `warm` has a
    drafter, `cold` has none."""

    fleet: Fleet
    decode: Launch
    warm: tuple[Launch, int]
    cold: tuple[Launch, int]

    def behind_a_router(self, *prefills: tuple[Launch, int]) -> Deployment:
        """Start a router for decode and these prefill servers, which it uses in turn."""
        (first, port), *others = prefills
        name = "-".join(["router", *(one.name for one, _ in prefills)])
        router = replace(launch.router(first, self.decode, port, *others), name=name)
        bring_up(self.fleet, [router], silent)
        servers = (*(one for one, _ in prefills), self.decode)
        return Deployment(self.fleet, router.url, servers, (router,))


def one_cold(fleet: Fleet, pair: str, topology: Topology, change: Change = unchanged) -> OneCold:
    """Start both prefill servers and decode together, without a router. `change`: applied to the
    prefill server with the drafter."""
    warm, decode, port = launch.prefill_and_decode(pair, topology)
    cold, _, other_port = launch.prefill_and_decode(pair, topology)
    cold = replace(launch.without_drafter(cold), name="cold")
    warm = change(warm)
    start(fleet, [warm, cold, decode])
    return OneCold(fleet, decode, (warm, port), (cold, other_port))
