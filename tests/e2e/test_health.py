"""Prometheus beside real servers finds a prefill server that sends wrong draft KV, by its requests
alone, and tells a cold prefill server from a warm one beside it."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from mixkv_demo.processes import Fleet

from .conftest import START_TIMEOUT, TP1, TP2, Case
from .test_metrics import REST_S

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "docs"))

from health import FEW, Story, record

pytestmark = [START_TIMEOUT, pytest.mark.full]


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
        lengths = [pairs[at].drafts[s].length for at, s in ((story.a, "warm"), (story.b, "cold"))]
        assert [length > 3.3 for length in lengths if length] == [True, False]
        print(story.screen())
        screen = " ".join(story.screen().split())
        assert "prefill 10.0.10.20:8998:" in screen
        assert "started cold (no_drafter): one side has none; cold ones accept 1.0" in screen
        assert "Give both sides the same drafter" in screen
        assert "prefill 10.0.10.10:8998:" not in screen
        until = time.monotonic() + REST_S
        while not (firing := story.firing()) and time.monotonic() < until:
            time.sleep(1)
        assert list(firing) == ["MixKVColdDrafters"]
        found = record(story)
        print(found["requests"], found["alert"])
        assert "prefill server a accept" in found["alert"]


def counted(story: Story) -> Counter[tuple[str, ...]]:
    """Finished requests by prefill server, state and reason."""
    found = story.prometheus.query("sglang:mixkv_finished_requests_total")
    labels = ("prefill", "state", "reason")
    return Counter(
        {tuple(one.labels.get(name, "") for name in labels): int(one.value) for one in found}
    )
