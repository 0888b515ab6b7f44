"""Launch lines that people use (rig/recipes.py): what the plan says of each pair."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rig.recipes import RECIPES, Recipe, plan_of, write_models

from sglang_mixkv.engine.releases import SUPPORTED_SGLANG, sglang_version
from sglang_mixkv.tools import plan_line

pytestmark = pytest.mark.skipif(
    sglang_version() != SUPPORTED_SGLANG[-1], reason="another release has other flags and defaults"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their folder."""
    import sglang.srt.model_loader  # noqa: F401  # with this process's variables, not a line's

    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host with a GPU, too, a line is resolved for the one that it names."""
    monkeypatch.setattr(plan_line, "has_device", lambda: False)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_the_plan_takes_the_pair(recipe: Recipe, models: Path) -> None:
    """With the right verdict, and as findings what is refused, nothing else."""
    plan = plan_of(recipe, models)
    assert len(plan.findings) == len(recipe.found), plan.findings
    for pattern, finding in zip(recipe.found, plan.findings, strict=True):
        assert re.search(pattern, finding)
    assert plan.need is not None
    assert (plan.need.needed, plan.need.wrong_share) == (recipe.needs, recipe.share)
    assert recipe.why in plan.need.reason
