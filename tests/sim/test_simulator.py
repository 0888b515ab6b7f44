"""All invariants hold in random schedules of whole clusters on a virtual clock.

By default the tests take about a minute, partly with new seeds in each run. `--full` runs many
more schedules.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from sglang_mixkv.decode.machine import Machine as Decode
from tests.sim.draw import Draw
from tests.sim.runner import Result, describe, run_many, run_spec, shrink, summary

FRESH = int(time.time()) * 1000  # the first seed of today's run
FEW = 2  # maximum number of requests, and of faults, in a shrunk schedule


def hold(seeds: Iterable[int], seconds: float = 1e9) -> Result:
    result = run_many(seeds, seconds)
    print(summary(result))
    if result.failed:
        pytest.fail(describe(result.failed), pytrace=False)
    return result


def test_known_seeds_pass() -> None:
    """All invariants hold for known seeds.

    Some of these seeds have slots with the right stamp and a wrong checksum. Copying threads reject
    these slots before they write rows. GPUs store the rows and then zero them.
    """
    seen = hold(range(400)).seen
    assert min(seen["DIFFERS", on_device, True] for on_device in (False, True)) > 2


def test_a_suspended_host_rejects_reused_slots() -> None:
    """A decode rank rejects slots that were reused while its host was suspended.

    The host's clock stood still, so the rank reads slots that may have new owners. Some of these
    slots still hold the announced bytes, and others do not.
    """
    seen = Counter[Any]()
    for seed in range(200):
        outcome = run_spec(Draw(seed, "suspended").spec())
        assert not outcome.invariant, outcome.detail
        seen += outcome.seen
    refused = {scene: many for scene, many in seen.items() if scene[-1] is False}
    assert seen["overstayed"] > 5
    assert sum(refused.values()) > 5


def test_new_seeds_pass() -> None:
    hold(range(FRESH, FRESH + 10**6), seconds=40)


def test_a_seed_replays_the_same_run() -> None:
    for seed in range(20):
        spec = Draw(seed).spec()
        first, second = (run_spec(spec, logged=True).log for _ in range(2))
        assert first == second


def test_a_defect_is_found_shrunk_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect that decides cold rooms without clearing their rows is found within 100 seeds.

    The failing schedule is shrunk and described.
    """

    def decide(self: Any, room: Any) -> None:
        if room.cold and not room.decided:
            self._decide(room, "cold")

    monkeypatch.setattr(Decode, "_clear", decide)
    found = run_many(range(100)).failed
    assert found is not None
    least = shrink(found)
    assert least.invariant == found.invariant
    assert len(least.spec.requests) <= FEW
    assert len(least.spec.faults) <= FEW
    assert len(least.spec.lines()) <= len(found.spec.lines())
    text = describe(found)
    assert f"--replay {found.spec.seed}" in text
    assert "Verdict(" in text


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_seeds_pass() -> None:
    hold(range(10**6, 10**6 + 10**5))
