"""Pairs of launch lines that people use, after public recipes, with what the plan says of them.

Each answer was judged by hand. Of a model a line needs config.json alone: sizes are those of the
public models where they decide what is moved (layers, heads, widths), and of the small pairs of
mixkv_demo elsewhere.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import mixkv_demo
from sglang_mixkv.engine.releases import SUPPORTED_SGLANG, sglang_version
from sglang_mixkv.tools.plan import text
from sglang_mixkv.tools.plan_pair import make_plan
from sglang_mixkv.tools.plan_server import read

pytestmark = pytest.mark.skipif(
    sglang_version() != SUPPORTED_SGLANG[-1], reason="another release has other flags and defaults"
)

SMALL = Path(mixkv_demo.__file__).parent / "models" / "mla"
MLA = {"max_position_embeddings": 262144, "kv_lora_rank": 512, "q_lora_rank": 1536,
       "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip
V3 = {**MLA, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128}
INDEX = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
K3_FULL = [*range(4, 93, 4), 93]  # from 1; the other 69 of 93 layers are KDA


def like(name: str, **changes: Any) -> dict[str, Any]:
    """A configuration of the small pair with these changes."""
    return {**json.loads((SMALL / name / "config.json").read_text()), **changes}


def drafter(name: str, layers: int, heads: int, width: int) -> dict[str, Any]:
    return like(
        name, num_hidden_layers=layers, num_key_value_heads=heads, num_attention_heads=64,
        head_dim=width, hidden_size=7168,
    )  # fmt: skip


def wrapped(architecture: str, kind: str, **text: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": kind, "dtype": "bfloat16",
            "text_config": like("target", **text)}  # fmt: skip


MODELS = {
    "moonshotai/Kimi-K3": wrapped(
        "KimiK3ForConditionalGeneration", "kimi_k3", **MLA, hidden_size=7168,
        architectures=["KimiK3LinearForCausalLM"], model_type="kimi_linear",
        num_hidden_layers=93, num_attention_heads=96, num_key_value_heads=96,
        num_experts=896, num_experts_per_token=16, linear_attn_config={
            "kda_layers": [n for n in range(1, 94) if n not in K3_FULL], "head_dim": 128,
            "full_attn_layers": K3_FULL, "num_heads": 96, "short_conv_kernel_size": 4},
    ),
    "RadixArk/Kimi-K3-DSpark": drafter("dspark", 5, 16, 64),
    "moonshotai/Kimi-K2.5": wrapped(
        "KimiK25ForConditionalGeneration", "kimi_k25",
        **V3 | {"num_attention_heads": 64, "num_key_value_heads": 64},
    ),
    "z-lab/Kimi-K2.5-DFlash": drafter("dflash", 6, 8, 128),
    "lightseekorg/kimi-k2.5-eagle3": drafter("drafter", 1, 64, 128),
    "deepseek-ai/DeepSeek-V3.1": like("target", **V3),
    "eagle3": drafter("drafter", 1, 8, 128),
    "deepseek-ai/DeepSeek-V4-Flash": {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", **MLA, **INDEX,
        "dtype": "bfloat16", "num_key_value_heads": 1, "num_hidden_layers": 43,
        "num_attention_heads": 32, "sliding_window": 128, "compress_ratios": [0] * 43,
        "dspark_block_size": 5,
    },
}  # fmt: skip

ON, NIXL = "--enable-mixkv", "--disaggregation-transfer-backend nixl"
K3 = (
    "--model-path moonshotai/Kimi-K3 --trust-remote-code --speculative-algorithm DSPARK "
    "--speculative-draft-model-path RadixArk/Kimi-K3-DSpark --speculative-dspark-block-size 7 "
    f"--page-size 64 {ON}"
)
K25 = (
    "--model-path moonshotai/Kimi-K2.5 --trust-remote-code --speculative-algorithm DFLASH "
    "--speculative-draft-model-path z-lab/Kimi-K2.5-DFlash --speculative-dflash-block-size 8 "
    f"--page-size 64 {ON}"
)
DRAFTS = (
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
)  # fmt: skip
MTP = f"--speculative-algorithm EAGLE {DRAFTS}"
SERVER = "python3 -m sglang.launch_server --disaggregation-mode ROLE --trust-remote-code"
V31 = "--model-path deepseek-ai/DeepSeek-V3.1"
K25_EAGLE = (
    f"{SERVER} --model-path moonshotai/Kimi-K2.5 {DRAFTS} --speculative-draft-model-path "
    "lightseekorg/kimi-k2.5-eagle3"
)
EAGLE3 = f"--speculative-algorithm EAGLE3 --speculative-draft-model-path eagle3 {DRAFTS} {NIXL}"
TWO_NODES = "--dist-init-addr ${master_ip}:5000 --nnodes 2 --node-rank 0 --tp-size 16"
NEITHER = "no draft KV is moved without a drafter on prefill and decode"
FROM_ONE = "fills it from one prefill rank, which holds"
HEAD = r"LlamaForCausalLMEagle3 .* EAGLE3, got EAGLE"

RECIPES = {  # both lines; prefill's; decode's; whether it is needed, and why
    "Kimi-K3, a pipeline over NIXL": (
        f"{K3} {NIXL}", "--tp-size 1 --pp-size 16", "--tp-size 16",
        True, "does not send it rows of 16: requests fail",
        {"share": None}),
    "Kimi-K3, a pipeline over Mooncake, with a storage tier": (
        K3, "--tp-size 1 --pp-size 8 --enable-hierarchical-cache --hicache-storage-backend "
        "mooncake", "--tp-size 8", True, "over other rows and beyond the pool",
        {"share": 1.0, "noted": "prefill: .* store is found by .* attention TP 1 alone"}),
    "Kimi-K3, DCP: SGLang cuts the heads itself from ranks that hold as many": (
        K3, "--tp-size 1 --pp-size 8", "--tp-size 8 --dcp-size 8",
        False, "SGLang cuts the drafter's heads itself", {"gpu": "blackwell"}),
    "Kimi-K3, DCP from ranks that hold fewer": (
        K3, "--tp-size 16", "--tp-size 8 --dcp-size 8",
        True, "of 2 KV heads that a decode rank needs SGLang sends 1",
        {"share": 0.5, "gpu": "blackwell"}),
    "Kimi-K2.5, DP-attention over NIXL": (
        f"{K25} {NIXL}", "--tp-size 8", "--tp-size 8 --attn-dp-size 8 --enable-dp-lm-head",
        True, FROM_ONE, {"share": 1 - 1 / (8 * 64)}),
    "Kimi-K2.5, DCP": (
        K25, "--tp-size 1", "--tp-size 8 --dcp-size 8",
        True, "SGLang cuts no heads beside this target", {"share": None}),
    "an EAGLE3 head under EAGLE (sglang#21272)": (
        f"{K25_EAGLE} --speculative-algorithm EAGLE", "--tp 8",
        "--tp 8 --dp 8 --enable-dp-attention", True, FROM_ONE,
        {"share": 1.0, "found": [f"prefill: {HEAD}", f"decode: {HEAD}"]}),
    "sizes that do not divide (sglang#19689)": (
        f"{K25_EAGLE} --speculative-algorithm EAGLE3", "--tp-size 8", "--tp-size 6", None, "",
        {"found": ["one divides the other", "decode: expected a number of KV heads"]}),
    "DeepSeek-V3.1, more ranks than heads": (
        f"{V31} {EAGLE3}", "--tp 8", "--tp 16", False, "no rank holds more than one", {}),
    "DeepSeek-V4 has its drafter inside (sglang#33411)": (
        f"sglang serve --model-path deepseek-ai/DeepSeek-V4-Flash --tp 4 {NIXL} "
        "--speculative-algorithm DSPARK --moe-runner-backend marlin", "", "--base-gpu-id 4",
        False, "the drafter is MLA", {}),
    "Ascend (sglang#13208)": (
        f"{SERVER} {V31} --tp-size 16 --attention-backend ascend --device npu --quantization "
        "w8a8_int8 --disaggregation-transfer-backend ascend --enable-dp-attention "
        f"--speculative-algorithm NEXTN {DRAFTS}", "--dp-size 2", "--dp-size 8",
        False, "the drafter is MLA", {"noted": "what SGLang checks on npu was not checked"}),
    "SGLang's documentation, two nodes": (
        f"{SERVER} {V31} --disaggregation-ib-device ${{device_name}} {TWO_NODES} --dp-size 8 "
        "--enable-dp-attention --moe-a2a-backend deepep", "--ssl-keyfile /key", "", False, NEITHER,
        {"noted": r"as it stands: \$\{device_name\} \$\{master_ip\}:5000(.|\n)*"
         r"prefill: --ssl-keyfile /key depends on the server's host"}),
    "a comment and arithmetic of the shell (sglang#17212)": (
        f"# GLM-4.5 Air\n{SERVER} \\\n  --model-path zai-org/GLM-4.5-Air --tp-size 4 \\\n",
        "  --chunked-prefill-size $((16384 * 4)) \\\n    # --speculative-algo EAGLE", MTP,
        None, r"prefill: argument --chunked-prefill-size: invalid int value: '\$\(\(", {}),
    "one prefill server for twelve of decode": (
        "export MC_TE_METRIC=true\nexport SGLANG_ENABLE_MIXKV=1\n# export SGLANG_RUST_SERVER=1\n"
        f"{SERVER} {V31} --attention-backend trtllm_mla --kv-cache-dtype fp8_e4m3 "
        "--moe-runner-backend flashinfer_cutlass --enable-dp-attention --enable-dp-lm-head",
        "--tp-size 4 --dp-size 4 --ep-size 4", "--tp-size 48 --dp-size 48 --ep-size 48",
        False, NEITHER, {"noted": "resolved as on a Blackwell GPU"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each model's config.json below this folder, by its public name."""
    import sglang.srt.model_loader  # noqa: F401  # with this process's variables, not a line's

    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_plan_takes_the_pair(recipe: tuple[Any, ...], models: Path) -> None:
    """With the right verdict, and as findings what is refused, nothing else."""
    both, *own, needed, why, says = recipe
    names = "|".join(map(re.escape, MODELS))

    def server(role: str, line: str) -> Any:
        whole = f"{both} {line}".replace("ROLE", role)
        here = re.sub(rf"(?<= )({names})(?=\s)", rf"{models}/\1", whole)
        return read(role, here, gpu=says.get("gpu"))

    roles = zip(("prefill", "decode"), own, strict=True)
    found = says.get("found", [])
    if needed is None and not found:
        with pytest.raises(ValueError, match=why):
            [server(*one) for one in roles]
        return
    plan = make_plan(*(server(*one) for one in roles))
    assert len(plan.findings) == len(found), plan.findings
    for pattern, finding in zip(found, plan.findings, strict=True):
        assert re.search(pattern, finding), finding
    assert re.search(says.get("noted", ""), "\n".join(plan.notes))
    if needed is None:
        assert text(plan).startswith("Neither stock SGLang nor the plugin serves this pair")
        return
    assert plan.need is not None
    assert (plan.need.needed, plan.need.wrong_share) == (needed, says.get("share", 0.0))
    assert why in plan.need.reason
