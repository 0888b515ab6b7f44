"""The machines keep their promises, in whole clusters on a virtual clock.

By default this takes about a minute, with different seeds each time. --full is the long run.
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
FEW = 2  # requests and faults that a cut-down schedule may have at most


def hold(seeds: Iterable[int], seconds: float = 1e9) -> Result:
    result = run_many(seeds, seconds)
    print(summary(result))
    if result.failed:
        pytest.fail(describe(result.failed), pytrace=False)
    return result


def test_known_seeds_hold() -> None:
    """Some of these seeds have slots with the right stamp and a wrong sum, which threads refuse
    unread, and whose rows GPUs zero after storing them."""
    seen = hold(range(400)).seen
    assert min(seen["DIFFERS", on_device, True] for on_device in (False, True)) > 2


def test_stamps_and_sums_catch_what_a_suspended_host_misreads() -> None:
    """The host's clock stood still, so it reads and uses slots that may have new owners by now.
    Some of those slots still held what was announced, some did not."""
    seen = Counter[Any]()
    for seed in range(200):
        outcome = run_spec(Draw(seed, "suspended").spec())
        assert not outcome.invariant, outcome.detail
        seen += outcome.seen
    refused = {scene: many for scene, many in seen.items() if scene[-1] is False}
    assert seen["overstayed"] > 5
    assert sum(refused.values()) > 5


def test_other_seeds_hold_each_time() -> None:
    hold(range(FRESH, FRESH + 10**6), seconds=40)


def test_a_seed_gives_the_same_run_again() -> None:
    for seed in range(20):
        spec = Draw(seed).spec()
        first, second = (run_spec(spec, logged=True).log for _ in range(2))
        assert first == second


def test_a_defect_is_found_cut_down_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold rooms are decided without clearing their rows."""

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
def test_ten_thousands_of_schedules_hold() -> None:
    hold(range(10**6, 10**6 + 10**5))
