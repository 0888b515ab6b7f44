"""Launch lines that people use (rig/recipes.py): what the plan says of each pair."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rig.recipes import RECIPES, Recipe, plan_of, write_models

from sglang_mixkv.engine.releases import SUPPORTED_SGLANG, sglang_version
from sglang_mixkv.tools.plan import text

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


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_the_plan_takes_the_pair(recipe: Recipe, models: Path) -> None:
    """With the right verdict, and as findings what is refused, nothing else."""
    if recipe.needs is None and not recipe.found:
        with pytest.raises(ValueError, match=recipe.why):
            plan_of(recipe, models)
        return
    plan = plan_of(recipe, models)
    assert len(plan.findings) == len(recipe.found), plan.findings
    for pattern, finding in zip(recipe.found, plan.findings, strict=True):
        assert re.search(pattern, finding), finding
    assert re.search(recipe.noted, "\n".join(plan.notes))
    if recipe.needs is None:
        assert plan.need is None
        assert text(plan).startswith("Neither stock SGLang nor the plugin serves this pair")
        return
    assert plan.need is not None
    assert (plan.need.needed, plan.need.wrong_share) == (recipe.needs, recipe.share)
    assert recipe.why in plan.need.reason
