"""The shipped pairs: models, launch flags and prompts that belong together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mixkv_demo import __main__ as demo
from mixkv_demo import pair
from sglang_mixkv.refusals import SPECULATIVE

ARCHITECTURES = {
    "EAGLE3": "LlamaForCausalLMEagle3",
    "DFLASH": "DFlashDraftModel",
    "DSPARK": "Qwen3DSparkModel",
}


@pytest.mark.parametrize("name", pair.PAIRS)
def test_a_pairs_drafter_is_of_its_algorithm(name: str) -> None:
    words = pair.model_flags(name)
    flags = dict(zip(words[::2], words[1::2], strict=True))
    algorithm = flags["--speculative-algorithm"]
    assert algorithm in SPECULATIVE
    folder = Path(flags["--speculative-draft-model-path"])
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [ARCHITECTURES[algorithm]]
    assert (folder / "model.safetensors").stat().st_size < 500_000
    assert pair.model_flags(name, speculative=False) == words[:2]


@pytest.mark.parametrize("name", pair.PAIRS)
def test_prompts_are_the_pairs_own(name: str) -> None:
    known = {len(prompt) - 2 for prompt in pair.prompts(pair=name)}
    assert known == ({48} if name in ("mla-dflash", "mla-dspark") else {24, 48, 96, 160, 200})
    for prompt, cousin in zip(pair.prompts(pair=name), pair.cousins(name), strict=True):
        assert sorted(cousin) == sorted(prompt)
        assert cousin[: len(prompt) // 2] == prompt[: len(prompt) // 2]
        assert cousin != prompt


def test_every_choice_of_the_demo_is_a_pair_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for target in pair.TARGETS:
        for drafter in pair.DRAFTERS:
            line = ["--pair", target, "--drafter", drafter]
            if pair.pair_name(target, drafter) in pair.PAIRS:
                assert demo.parse(line).drafter == drafter
                continue
            with pytest.raises(SystemExit):
                demo.parse(line)
            assert f"the {target} target has no {drafter} drafter" in capsys.readouterr().err
    assert demo.parse([]).drafter == "eagle3"
