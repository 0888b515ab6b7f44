"""The shipped pairs of target and drafter, and the script that trained them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize(
    ("target", "kind", "symbols"),
    [("mla", "eagle3", 24), ("gqa", "eagle3", 24), ("mla", "dflash", 48)],
)
def test_the_trainer_loads_the_shipped_pair(
    target: str, kind: str, symbols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's model loads a shipped drafter, whose accept length drops with a damaged head.

    The trainer trains drafters to depend on each KV head, so that a test notices a wrong one.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts" / "train_pair"))
    train, drafters = (importlib.import_module(name) for name in ("train", "drafters"))
    folder = train.SHIPPED / target / train.FOLDERS[kind]
    config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    model = drafters.MODELS[kind](config)
    train.load(model, folder)
    path = train.SHIPPED / target / "target"
    large = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        inputs = model.batch(large, 4, symbols, symbols, torch.Generator().manual_seed(5))
        for damage, least, most in ((None, 3.7, 4), (drafters.Damage(0), 1, 1.5)):
            logits = model(large, inputs, damage)
            assert least <= drafters.accept_length(logits, inputs) <= most
