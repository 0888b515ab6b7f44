"""The shipped pairs: prompts and models that belong together, and what trained them."""

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
def test_what_trains_a_pair_knows_the_shipped_one(
    target: str, kind: str, symbols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's models read the checkpoints, and the damage that it does to a KV head is what
    these drafters are sensitive to."""
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
