"""Launch lines that people use (rig/recipes.py) as cases of the ring, made of their plans.

What the plan says of each pair: tests/pure/test_recipes.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rig.model import draft_bytes
from rig.recipes import RECIPES, Recipe, plan_of, write_models
from rig.ring import run

from sglang_mixkv.engine.releases import SUPPORTED_SGLANG, sglang_version
from sglang_mixkv.tools import plan_line

pytestmark = pytest.mark.skipif(
    sglang_version() != SUPPORTED_SGLANG[-1], reason="another release has other flags and defaults"
)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Their folder. Neither a GPU here nor the CPU engine counts."""
    monkeypatch.setattr(plan_line, "has_device", lambda: False)
    write_models(tmp_path)
    return tmp_path


def cases() -> list[object]:
    return [
        pytest.param(recipe, id=recipe.name, marks=() if recipe.sampled else pytest.mark.full)
        for recipe in RECIPES
    ]


@pytest.mark.parametrize("recipe", cases())
def test_every_byte_of_the_pair(
    recipe: Recipe, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recipe.not_run:
        pytest.skip(recipe.not_run)
    for name, value in recipe.variables().items():
        monkeypatch.setenv(name, value)
    plan = plan_of(recipe, models)
    case = recipe.case(plan)
    outcome = run(case)
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}, outcome.reasons
    moved = draft_bytes(case) if plan.prefill.draft is not None else 0
    assert outcome.total("sent_bytes_total") == outcome.total("needed_bytes_total") == moved
    assert (moved > 0) == bool(plan.reads)
