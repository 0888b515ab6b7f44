"""Metrics, `status` and alerts identify a cold prefill server, and one that sends wrong draft KV.

Two prefill servers of TP 2 alternate in front of a decode server of TP 1. Server `b` has no
drafter, so its requests start cold. Server `a` has one, whose draft KV is corrupted later.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from mixkv_demo.launch import HOST, Topology, run_by
from mixkv_demo.pair import BOS, SEP, SYMBOLS, ask
from mixkv_demo.processes import Fleet
from mixkv_demo.prometheus import Prometheus
from mixkv_demo.servers import Deployment, one_cold
from sglang_mixkv.tools.status import look, status

from .conftest import ENABLE, REST_S, START_TIMEOUT, TP1, TP2, Case

ROOT = Path(__file__).parents[2]
CORRUPTING = ROOT / "tests" / "e2e" / "corrupting.py"
FEW, PAST, AT_ONCE, AT_MOST = 64, 768, 8, 800  # requests
SUSPECT = "MixKVDraftSuspect"
HURRIED = {
    "2h": "1m", "[1d]": "[10m]", "for: 10m": "for: 10s", "for: 5m": "for: 1s"
}  # fmt: skip
"""Shorter times for the alert rules. MixKVColdDrafters keeps its range of an hour, which includes
the whole test."""


def crowd(seed: int) -> Iterator[list[int]]:
    source = random.Random(seed)
    while True:
        yield [BOS, *source.sample(SYMBOLS, source.randint(24, 40)), SEP]


def eventually(look: Callable[[], bool]) -> bool:
    """Wait until `look` returns True. A request is counted after it has ended, and is visible after
    the next scrape."""
    deadline = time.monotonic() + REST_S
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(1)
    return found


def firing(prometheus: Prometheus) -> dict[str, str]:
    """Return the summaries of firing alerts, by name."""
    return {
        rule["name"]: alert["annotations"]["summary"]
        for rule in prometheus.rules()
        for alert in rule.get("alerts", ()) if alert["state"] == "firing"
    }  # fmt: skip


def counted(prometheus: Prometheus) -> Counter[tuple[str, ...]]:
    """Return the finished requests by prefill server, state and reason."""
    found = prometheus.query("sglang:mixkv_finished_requests_total")
    at = ("prefill", "state", "reason")
    return Counter({tuple(s.labels.get(n, "") for n in at): int(s.value) for s in found})


@START_TIMEOUT
@pytest.mark.full
def test_cold_and_corrupting_prefill_servers_are_reported() -> None:
    """The metrics name the server and the reason, `status` reports them, and the alerts fire. The
    rules' times are shortened."""
    Case("one cold", TP2, TP1).skip_unserved()
    with Fleet() as fleet:
        is_wrong = fleet.folder("wrong") / "now"
        rules, text = fleet.folder("rules") / "alerts.yml", (ROOT / "docs/alerts.yml").read_text()
        for theirs, ours in HURRIED.items():
            text = text.replace(theirs, ours)
        rules.write_text(text)
        env = {"TEST_CORRUPT_WHILE": str(is_wrong), "SGLANG_MIXKV_PATIENCE": "20"}
        topology = Topology(TP2, TP1, ENABLE, ENABLE, env=env)
        made = one_cold(fleet, "mla", topology, partial(run_by, script=CORRUPTING))
        both, a_alone = made.behind_a_router(made.warm, made.cold), made.behind_a_router(made.warm)
        a, b = (f"{HOST}:{port}" for _, port in (made.warm, made.cold))
        prometheus = Prometheus(fleet, [f"{HOST}:{one.port}" for one in both.servers], rules)
        prompts = crowd(1)

        def send(number: int, to: Deployment) -> None:
            some = [next(prompts) for _ in range(number)]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                to.watch(lambda: [*pool.map(partial(ask, to.url), some)])
            prometheus.wait_for_scrape()

        prometheus.wait_for_scrape()
        before = counted(prometheus)
        for _ in range(2):  # a rate needs two scrapes
            send(FEW, both)
        expected = {(a, "warm", ""): FEW, (b, "cold", "no_drafter"): FEW}
        assert eventually(lambda: counted(prometheus) - before == expected), counted(prometheus)
        found = status(*look([server.url for server in both.servers], timeout=30))
        lengths = {pair.prefill: pair.accept_lengths for pair in found.pairs}
        assert (lengths[a]["warm"] or 0) > 3.3 > (lengths[b]["cold"] or 9)
        (wrong,) = [one for one in found.wrong if "prefill" in one.where]
        assert wrong.where.endswith(b)
        assert "(no_drafter)" in wrong.what
        assert eventually(lambda: bool(firing(prometheus)))
        assert list(firing(prometheus)) == ["MixKVColdDrafters"]
        send(PAST, a_alone)
        send(FEW, both)
        is_wrong.touch()
        sent = 0
        while SUSPECT not in firing(prometheus) and sent < AT_MOST:
            send(FEW, both)
            sent += FEW // 2
        print(f"requests to it until {SUSPECT}: {sent}")
        assert f"prefill server {a} accept" in firing(prometheus)[SUSPECT]
