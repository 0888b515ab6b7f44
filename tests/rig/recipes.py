"""Pairs of launch lines that people use, after public recipes, with what the plan says of them.

Of a model a line needs config.json alone: sizes are those of the public models where they decide
what is moved (layers, heads, widths), and of the small pairs of mixkv_demo elsewhere.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mixkv_demo
from sglang_mixkv.tools.plan_pair import Plan, make_plan
from sglang_mixkv.tools.plan_server import read

SMALL = Path(mixkv_demo.__file__).parent / "models" / "mla"
MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
       "v_head_dim": 128}  # fmt: skip
V3 = {**MLA, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128}
ROLES = ("prefill", "decode")
INDEX = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
K3_FULL = [*range(4, 93, 4), 93]  # from 1; the other 69 of 93 layers are KDA


def _like(name: str, **changes: Any) -> dict[str, Any]:
    """A configuration of the small pair with these changes."""
    found = json.loads((SMALL / name / "config.json").read_text())
    return {**found, **changes}


def _drafter(name: str, layers: int, heads: int, width: int) -> dict[str, Any]:
    return _like(
        name, num_hidden_layers=layers, num_key_value_heads=heads, num_attention_heads=64,
        head_dim=width, hidden_size=7168,
    )  # fmt: skip


def _kimi_k3() -> dict[str, Any]:
    linear = {"kda_layers": [n for n in range(1, 94) if n not in K3_FULL],
              "full_attn_layers": K3_FULL, "num_heads": 96, "head_dim": 128,
              "short_conv_kernel_size": 4}  # fmt: skip
    text = _like(
        "target", **MLA, architectures=["KimiK3LinearForCausalLM"], model_type="kimi_linear",
        num_hidden_layers=93, num_attention_heads=96, num_key_value_heads=96, hidden_size=7168,
        linear_attn_config=linear, num_experts=896, num_experts_per_token=16,
    )  # fmt: skip
    return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3",
            "text_config": text, "dtype": "bfloat16"}  # fmt: skip


def _kimi_k25() -> dict[str, Any]:
    text = _like("target", **V3 | {"num_attention_heads": 64, "num_key_value_heads": 64})
    return {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
            "text_config": text, "dtype": "bfloat16"}  # fmt: skip


def _glm_5() -> dict[str, Any]:
    return _like(
        "target", **MLA | {"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256},
        **INDEX, architectures=["GlmMoeDsaForCausalLM"], model_type="glm_moe_dsa",
        num_hidden_layers=78, num_attention_heads=64, num_key_value_heads=64, rope_scaling=None,
    )  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "moonshotai/Kimi-K3": _kimi_k3(),
    "RadixArk/Kimi-K3-DSpark": _drafter("dspark", 5, 16, 64),
    "moonshotai/Kimi-K2.5": _kimi_k25(),
    "z-lab/Kimi-K2.5-DFlash": _drafter("dflash", 6, 8, 128),
    "deepseek-ai/DeepSeek-V3.1": _like("target", **V3),
    "deepseek-ai/DeepSeek-V3.2": _like(
        "target", **V3, **INDEX, architectures=["DeepseekV32ForCausalLM"], model_type="deepseek_v32"
    ),
    "eagle3": _drafter("drafter", 1, 8, 128),
    "dflash": _drafter("dflash", 6, 8, 128),
    "zai-org/GLM-5": _glm_5(),
}


def write_models(folder: Path) -> None:
    """Each model's config.json below this folder, by its public name."""
    for name, config in CONFIGS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class Recipe:
    """`prefill`, `decode`: what follows `python -m sglang.launch_server --disaggregation-mode ...`,
    with variables in front. `gpu`: one of the plan's. `needs`: whether the plugin is needed, and
    `why`, a part of the plan's reason. `share`: of the draft KV, what is wrong without it. `found`:
    a pattern for each finding."""

    name: str
    prefill: str
    decode: str
    needs: bool
    why: str
    share: float | None = 0.0
    found: tuple[str, ...] = ()
    gpu: str = "hopper"

    def line(self, role: str, folder: Path) -> str:
        """The whole launch line, with the models in this folder."""
        words = shlex.split(getattr(self, role))
        count = next(i for i, word in enumerate(words) if word.startswith("--"))
        flags = [str(folder / word) if word in CONFIGS else word for word in words[count:]]
        command = ["python", "-m", "sglang.launch_server", "--disaggregation-mode", role]
        return shlex.join([*words[:count], *command, *flags])


def plan_of(recipe: Recipe, folder: Path) -> Plan:
    """Of its lines, with the models in this folder."""
    sides = (read(role, recipe.line(role, folder), gpu=recipe.gpu) for role in ROLES)
    return make_plan(*sides)


def _pair(name: str, both: str, prefill: str, decode: str, **says: Any) -> Recipe:
    return Recipe(name, f"{both} {prefill}", f"{both} {decode}", **says)


ON, NIXL = "--enable-mixkv", "--disaggregation-transfer-backend nixl"
K3 = (
    "--model-path moonshotai/Kimi-K3 --trust-remote-code --speculative-algorithm DSPARK "
    "--speculative-draft-model-path RadixArk/Kimi-K3-DSpark --speculative-dspark-block-size 7 "
    f"--page-size 64 {ON}"
)
NVLINK = (
    f"SGLANG_MOONCAKE_CUSTOM_MEM_POOL=NVLINK MC_FORCE_MNNVL=true {K3} --kv-cache-dtype fp8_e4m3"
)
K25 = (
    "--model-path moonshotai/Kimi-K2.5 --trust-remote-code --speculative-algorithm DFLASH "
    "--speculative-draft-model-path z-lab/Kimi-K2.5-DFlash --speculative-dflash-block-size 8 "
    f"--page-size 64 {ON}"
)
EAGLE3 = (
    "--speculative-algorithm EAGLE3 --speculative-draft-model-path eagle3 --page-size 64 "
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
)
V31, V32 = (f"--model-path deepseek-ai/DeepSeek-V3.{n} {ON}" for n in (1, 2))
DFLASH = (
    "--speculative-algorithm DFLASH --speculative-draft-model-path dflash --page-size 64 "
    "--speculative-dflash-block-size 8"
)
GLM = (
    "--model-path zai-org/GLM-5 --trust-remote-code --kv-cache-dtype fp8_e4m3 --page-size 64 "
    f"{NIXL}"
)
MTP = (
    "--speculative-algorithm EAGLE --speculative-num-steps 2 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 3"
)
FROM_ONE = "fills it from one prefill rank, which holds"

RECIPES = (
    # Kimi-K3: a pipeline on prefill, over the transfer of SGLang's cookbook, and over Mooncake.
    _pair("k3 pp16 to tp16, nixl", f"{K3} {NIXL}", "--tp-size 1 --pp-size 16", "--tp-size 16",
          needs=True, why="does not send it rows of 16: requests fail", share=None),
    _pair("k3 pp8 to tp8, mooncake", K3, "--tp-size 1 --pp-size 8", "--tp-size 8",
          needs=True, why="over other rows and beyond the pool", share=1.0),
    # DCP on decode: SGLang cuts the heads itself from prefill ranks that hold as many.
    _pair("k3 pp8 to dcp8", K3, "--tp-size 1 --pp-size 8", "--tp-size 8 --dcp-size 8",
          needs=False, why="SGLang cuts the drafter's heads itself", gpu="blackwell"),
    _pair("k3 tp16 to dcp8", K3, "--tp-size 16", "--tp-size 8 --dcp-size 8",
          needs=True, why="of 2 KV heads that a decode rank needs SGLang sends 1", share=0.5,
          gpu="blackwell"),
    # Dynamo's: equal sizes, FP8, a host cache on prefill, Mooncake's memory over NVLink.
    _pair("k3 tp8 to dcp8, host cache, nvlink", NVLINK,
          "--tp-size 8 --enable-hierarchical-cache --hicache-size 100 --disable-overlap-schedule",
          "--tp-size 8 --dcp-size 8",
          needs=False, why="both sides have attention TP 8", gpu="blackwell"),
    _pair("k3 with a storage tier", K3,
          "--tp-size 8 --enable-hierarchical-cache --hicache-storage-backend mooncake",
          "--tp-size 16",
          needs=True, why="over other rows and beyond the pool", share=1.0,
          found=("hicache-storage-backend with a drafter is not",)),
    # Kimi-K2.5 with DFLASH, and both spellings of DP-attention.
    _pair("k2.5 dflash tp8 to attn-dp8", K25, "--tp-size 8",
          "--tp-size 8 --attn-dp-size 8 --enable-dp-lm-head",
          needs=True, why=FROM_ONE, share=1.0),
    _pair("k2.5 dflash tp8 to dp8, nixl", f"{K25} {NIXL}", "--tp-size 8",
          "--tp-size 8 --dp 8 --enable-dp-attention --enable-dp-lm-head",
          needs=True, why=FROM_ONE, share=1 - 1 / (8 * 64)),
    _pair("k2.5 dflash with a pipeline", K25, "--tp-size 1 --pp-size 8", "--tp-size 8",
          needs=True, why="over other rows", share=1.0,
          found=("prefill: SGLang .* does not start it: .*only supports pp_size == 1",)),
    _pair("k2.5 dflash to dcp8", K25, "--tp-size 1", "--tp-size 8 --dcp-size 8",
          needs=True, why="SGLang cuts no heads beside this target", share=None),
    # DeepSeek-V3.x: an EAGLE3 head, and DFLASH beside DSA.
    _pair("v3.1 eagle3 tp8 to dp16", f"{V31} {EAGLE3}", "--tp 8",
          "--tp 16 --dp 16 --enable-dp-attention",
          needs=True, why=FROM_ONE, share=1.0),
    _pair("v3.1 eagle3 tp8 to tp16, nixl", f"{V31} {EAGLE3} {NIXL}", "--tp 8", "--tp 16",
          needs=False, why="no rank holds more than one"),
    _pair("v3.2 dflash tp4 to tp8", f"{V32} {DFLASH}", "--tp 4", "--tp 8",
          needs=True, why="over other rows", share=1.0),
    # GLM-5: speculation on decode alone, with the MTP layer of the target.
    _pair("glm-5 drafts on decode alone", f"{GLM} {ON}", "--tp 4",
          f"--tp 16 --dp 16 --enable-dp-attention --enable-dp-lm-head {MTP}",
          needs=False, why="no draft KV is moved without a drafter on prefill"),
    _pair("glm-5 drafts on both sides", f"{GLM} {MTP} {ON}", "--tp 4", "--tp 8",
          needs=False, why="the drafter is MLA"),
)  # fmt: skip
