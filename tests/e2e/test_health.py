"""Prometheus beside real servers finds a prefill server that sends wrong draft KV, by its requests
alone, and tells a cold prefill server from a warm one beside it.

Two prefill servers of the small pair, TP 2, take turns before a decode server, TP 1. `b` has no
drafter: its requests start cold. `a` drafts; after a while its draft KV is corrupted.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from mixkv_demo.launch import HOST, Topology, run_by
from mixkv_demo.pair import BOS, SEP, SYMBOLS, ask
from mixkv_demo.processes import Fleet
from mixkv_demo.prometheus import Prometheus
from mixkv_demo.servers import one_cold
from sglang_mixkv.tools.status import Status, status
from sglang_mixkv.tools.status_pages import look

from .conftest import REST_S, START_TIMEOUT, TP1, TP2, Case

pytestmark = [START_TIMEOUT, pytest.mark.full]

ROOT = Path(__file__).parents[2]
CORRUPTING = ROOT / "tests" / "e2e" / "corrupting.py"
FEW, PAST, AT_ONCE, AT_MOST = 64, 768, 8, 800  # requests
ENABLE = ("--enable-mixkv",)
TIMEOUT_S = 30.0
SUSPECT = "MixKVDraftSuspect"
HURRIED = {
    "2h": "1m", "[1d]": "[10m]", "for: 10m": "for: 10s", "for: 5m": "for: 1s"
}  # fmt: skip
"""Times of the rules -> those here."""
SHOWN = (
    "prefill-a:30000", "prefill-b:30000", "decode-00:30001", "10.0.10.10:8998", "10.0.10.20:8998",
)  # fmt: skip


def crowd(seed: int) -> Iterator[list[int]]:
    source = random.Random(seed)
    while True:
        yield [BOS, *source.sample(SYMBOLS, source.randint(24, 40)), SEP]


class Story:
    def __init__(self, fleet: Fleet) -> None:
        self._wrong = fleet.folder("wrong") / "now"
        rules, text = fleet.folder("rules") / "alerts.yml", ROOT / "docs" / "alerts.yml"
        hurried = text.read_text()
        for theirs, ours in HURRIED.items():
            hurried = hurried.replace(theirs, ours)
        rules.write_text(hurried)
        env = {"TEST_CORRUPT_WHILE": str(self._wrong), "SGLANG_MIXKV_PATIENCE": "20"}
        topology = Topology(("--tp", "2"), ("--tp", "1"), ENABLE, ENABLE, env=env)
        made = one_cold(fleet, "mla", topology, partial(run_by, script=CORRUPTING))
        self.deployment = made.behind_a_router(made.warm, made.cold)
        self._a_alone = made.behind_a_router(made.warm)
        servers = [f"{HOST}:{one.port}" for one in self.deployment.servers]
        self.a, self.b = (f"{HOST}:{port}" for _, port in (made.warm, made.cold))
        self.names = dict(zip([*servers, self.a, self.b], SHOWN, strict=True))
        self.prometheus = Prometheus(fleet, servers, rules)
        self.prometheus.wait_for_scrape()
        self._prompts = crowd(1)

    def send(self, number: int, to_both: bool = True) -> None:
        """So many requests, half of them to each prefill server, or all to `a`; until scraped."""
        to = self.deployment if to_both else self._a_alone
        with ThreadPoolExecutor(AT_ONCE) as pool:
            prompts = [next(self._prompts) for _ in range(number)]
            answers = pool.map(partial(ask, to.url), prompts)
            to.watch(lambda: [*answers])
        self.prometheus.wait_for_scrape()

    def corrupt(self) -> None:
        self._wrong.touch()

    def status(self) -> Status:
        urls = [server.url for server in self.deployment.servers]
        return status(look(urls, TIMEOUT_S))

    def screen(self) -> str:
        """Its text, with addresses as wide as those of these servers."""
        text = self.status().text()
        for address, name in self.names.items():
            text = text.replace(address, name)
        return "\n".join(line.rstrip() for line in text.splitlines())

    def firing(self) -> dict[str, str]:
        """Alerts that fire: name -> summary."""
        return {
            rule["name"]: alert["annotations"]["summary"]
            for rule in self.prometheus.rules()
            for alert in rule.get("alerts", ()) if alert["state"] == "firing"
        }  # fmt: skip


def record(story: Story) -> tuple[int, str]:
    """Requests to `a` until its alert fired once its draft KV was corrupted, and the alert."""
    story.send(PAST, to_both=False)
    story.send(FEW)
    story.corrupt()
    sent = 0
    while SUSPECT not in (firing := story.firing()) and sent < AT_MOST:
        story.send(FEW)
        sent += FEW // 2
    return sent, firing.get(SUSPECT, "").partition(": ")[2].replace(story.a, "a")


def test_one_cold_prefill_and_one_whose_draft_kv_is_corrupted_later() -> None:
    """Series say which and why, `status` what to do, and the rules fire; here with minutes for
    hours."""
    Case("one cold", TP2, TP1).skip_unserved()
    with Fleet() as fleet:
        story = Story(fleet)
        before = counted(story)
        for _ in range(2):  # a rate needs two scrapes
            story.send(FEW)
        assert counted(story) - before == {
            (story.a, "warm", ""): FEW, (story.b, "cold", "no_drafter"): FEW
        }  # fmt: skip
        pairs = {pair.prefill: pair for pair in story.status().pairs}
        lengths = [pairs[at].accept_lengths[s] for at, s in ((story.a, "warm"), (story.b, "cold"))]
        assert [length > 3.3 for length in lengths if length] == [True, False]
        print(story.screen())
        screen = " ".join(story.screen().split())
        assert "prefill 10.0.10.20:8998:" in screen
        assert "(no_drafter): one side has none. Give both sides the same drafter" in screen
        assert "prefill 10.0.10.10:8998:" not in screen
        until = time.monotonic() + REST_S
        while not (firing := story.firing()) and time.monotonic() < until:
            time.sleep(1)
        assert list(firing) == ["MixKVColdDrafters"]
        requests, alert = record(story)
        print(requests, alert)
        assert "prefill server a accept" in alert


def counted(story: Story) -> Counter[tuple[str, ...]]:
    """Finished requests by prefill server, state and reason."""
    found = story.prometheus.query("sglang:mixkv_finished_requests_total")
    labels = ("prefill", "state", "reason")
    return Counter(
        {tuple(one.labels.get(name, "") for name in labels): int(one.value) for one in found}
    )
