"""The simulator finds mistakes: each one in a table is put into the code, and must show within a
few schedules of its scene, with the expected finding.
"""

from __future__ import annotations

import pytest

from tests.sim.draw import Draw
from tests.sim.mistakes import TABLE, Mistake
from tests.sim.runner import run_spec


@pytest.mark.parametrize("mistake", TABLE, ids=[one.make.__name__ for one in TABLE])
def test_a_mistake_is_found(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.make(monkeypatch)
    for seed in range(mistake.most):
        outcome = run_spec(Draw(seed, mistake.scene).spec())
        if outcome.invariant:
            assert outcome.invariant in mistake.found, outcome.detail
            print(f"found after {seed + 1} of {mistake.most} schedules")
            return
    pytest.fail(f"{mistake.most} schedules of {mistake.scene!r} show nothing")
