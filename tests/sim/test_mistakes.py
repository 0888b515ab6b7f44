"""The simulator finds defects: each defect of a table breaks an expected invariant within a limited
number of schedules.
"""

from __future__ import annotations

import pytest

from tests.sim.draw import Draw
from tests.sim.mistakes import TABLE, Mistake
from tests.sim.runner import run_spec


@pytest.mark.parametrize("mistake", TABLE, ids=[one.make.__name__ for one in TABLE])
def test_the_simulator_finds_the_mistake(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.make(monkeypatch)
    for seed in range(mistake.most):
        outcome = run_spec(Draw(seed, mistake.scene).spec())
        if outcome.invariant:
            assert outcome.invariant in mistake.found, outcome.detail
            print(f"found after {seed + 1} of {mistake.most} schedules")
            return
    pytest.fail(f"no invariant broke in {mistake.most} schedules of {mistake.scene!r}")
