"""Decode finds a prefill server that sends wrong draft KV, by its requests alone, and tells a cold
prefill server from a warm one beside it."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from mixkv_demo.launch import run_by
from mixkv_demo.pair import ask
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import Deployment
from sglang_mixkv.decode.health import BATCH, PAST, WINDOW
from sglang_mixkv.tools import status

from .conftest import START_TIMEOUT, TP1, TP2, Case, pair_with
from .test_metrics import METRICS, REST_S, at_rest, finished, page, series

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts" / "docs"))

from health import Story, crowd  # noqa: E402

pytestmark = [START_TIMEOUT, pytest.mark.full]

CORRUPTING = Path(__file__).with_name("corrupting.py")
LEARNT = BATCH * (WINDOW + PAST.fewest)
AT_ONCE, AT_MOST, EACH = 8, 200, 24
SUSPECT = "draft_suspect", "past"


def send(deployment: Deployment, prompts: Iterator[list[int]], number: int) -> str:
    """So many requests; decode's page once they are counted."""
    before = finished(page(deployment))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(partial(ask, deployment.url), [next(prompts) for _ in range(number)])
        deployment.watch(lambda: [*answers])
    return at_rest(deployment, before + number)


def test_a_peer_whose_draft_kv_is_corrupted_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case("suspect", (*TP2, *METRICS), (*TP1, *METRICS))
    case.skip_unserved()
    wrong, prompts = tmp_path / "wrong", crowd(1)
    with Fleet() as fleet:
        prefill = partial(run_by, script=CORRUPTING, env={"TEST_CORRUPT_WHILE": str(wrong)})
        deployment = pair_with(fleet, case.topology(), prefill=prefill)
        at_rest(deployment, 1)
        begin = time.monotonic()
        found = series(send(deployment, prompts, LEARNT + 4 * BATCH))
        print(f"{LEARNT + 4 * BATCH} requests in {time.monotonic() - begin:.0f} s")
        assert (SUSPECT in found, found[SUSPECT]) == (True, 0)
        wrong.touch()
        sent = 0
        while not found[SUSPECT] and sent < AT_MOST:
            found = series(send(deployment, prompts, BATCH))
            sent += BATCH
        print(f"found after {sent} requests")
        assert found[SUSPECT] == 1
        (log,) = (one.log.read_text() for one in fleet._servers if one.name == "decode")
        (line,) = [text for text in log.splitlines() if "MIXKV-PAIR-08" in text]
        assert "a fifth less than they did" in line
        urls = [server.url for server in deployment.servers]
        assert status.main([*urls, "--seconds", "0.1"]) == 1
        shown = capsys.readouterr().out
        assert "SUSPECT" in shown
        assert "MIXKV-PAIR-08" in shown
        print(shown)
        wrong.unlink()
        assert series(send(deployment, prompts, 2 * BATCH * WINDOW))[SUSPECT] == 0
        assert status.main([*urls, "--seconds", "0.1"]) == 0


def test_one_cold_prefill_among_two(tmp_path: Path) -> None:
    """Series say which and why, `status` what to do, and the rule fires, here without its wait."""
    Case("one cold", TP2, TP1).skip_unserved()
    rules = tmp_path / "alerts.yml"
    rules.write_text((ROOT / "docs" / "alerts.yml").read_text().replace("for: 5m", "for: 1s"))
    with Fleet() as fleet:
        story = Story(fleet, rules)
        before = counted(story)
        for _ in range(2):  # a rate needs two scrapes
            story.send(EACH)
        found = counted(story) - before
        assert found == {(story.a, "warm", ""): EACH, (story.b, "cold", "no_drafter"): EACH}
        pairs = {pair.prefill: pair for pair in story.status().pairs}
        lengths = [pairs[at].drafts[s].length for at, s in ((story.a, "warm"), (story.b, "cold"))]
        assert [length > 3.3 for length in lengths if length] == [True, False]
        screen = " ".join(story.screen().split())
        print(story.screen())
        assert "prefill 10.0.10.20:8998:" in screen
        assert "started cold (no_drafter): one side has none; they accept 1.0" in screen
        assert "Give both sides the same drafter" in screen
        assert "prefill 10.0.10.10:8998:" not in screen
        until = time.monotonic() + REST_S
        while not (firing := story.firing()) and time.monotonic() < until:
            time.sleep(1)
        print(firing)
        assert list(firing) == ["MixKVColdDrafters"]


def counted(story: Story) -> Counter[tuple[str, ...]]:
    """Finished requests by prefill server, state and reason."""
    found = story.prometheus.query("sglang:mixkv_finished_requests_total")
    labels = ("prefill", "state", "reason")
    return Counter(
        {tuple(one.labels.get(name, "") for name in labels): int(one.value) for one in found}
    )
