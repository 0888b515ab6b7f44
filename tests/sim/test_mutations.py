"""The simulator finds each defect that it must."""

from __future__ import annotations

import pytest

import tests.sim.mutations  # noqa: F401  which fill MUTATIONS
from tests.sim.mutating import MUTATIONS, mutated
from tests.sim.runner import run_many

MOST = 20_000  # schedules


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_defect_is_found(name: str) -> None:
    with mutated(name):
        result = run_many(range(MOST), covered=False)
    assert result.found, f"{name}: not in {result.schedules} schedules"
    found = result.found[0]
    assert found.invariant not in ("crash TypeError", "crash AttributeError"), found.detail
    print(f"{name}: {found.invariant}, after {result.schedules} schedules: {found.detail}")


def test_the_code_itself_has_none_of_them() -> None:
    """Undone, as the next tests need it."""
    for name in MUTATIONS:
        with mutated(name):
            pass
    assert not run_many(range(200)).found
