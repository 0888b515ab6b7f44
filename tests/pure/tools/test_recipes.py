"""Pairs of launch lines from public recipes, with the expected verdict and findings of `plan`.

Each expected result was judged by hand. `plan` needs only the config.json of a model. Layers, heads
and widths are those of the public models where they decide which bytes are moved. All other sizes
are those of mixkv_demo's small pairs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

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
K3_FULL = [*range(4, 93, 4), 93]  # numbered from 1; the other 69 of 93 layers are KDA


def like(name: str, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a small pair's model with some changes."""
    return {**json.loads((SMALL / name / "config.json").read_text()), **changes}


def drafter(name: str, layers: int, heads: int, width: int) -> dict[str, Any]:
    return like(
        name, num_hidden_layers=layers, num_key_value_heads=heads, num_attention_heads=64,
        head_dim=width, hidden_size=7168,
    )  # fmt: skip


def wrapped(architecture: str, kind: str, **text: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": kind, "dtype": "bfloat16",
            "text_config": like("target", **text)}  # fmt: skip


def dense(
    architecture: str, kind: str, *, layers: int, heads: int, width: int, **more: Any
) -> dict[str, Any]:
    """Return the configuration of a model with KV heads."""
    return {
        "architectures": [architecture], "model_type": kind, "dtype": "bfloat16",
        "num_hidden_layers": layers, "num_key_value_heads": heads, "head_dim": width,
        "num_attention_heads": 64, "hidden_size": 7168, "intermediate_size": 2048,
        "vocab_size": 512, "max_position_embeddings": 131072, **more,
    }  # fmt: skip


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
    "deepseek-ai/DeepSeek-V4.1": {
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", **MLA, **INDEX,
        "dtype": "bfloat16", "num_key_value_heads": 1, "num_hidden_layers": 43,
        "num_attention_heads": 32, "sliding_window": 128, "compress_ratios": [0, 2] * 21 + [0],
        "dspark_block_size": 5,
    },
    "MiniMaxAI/MiniMax-M3": dense(
        "MiniMaxM3SparseForCausalLM", "mixtral", layers=60, heads=4, width=128,
        sparse_attention_config={"sparse_disable_index_value": [1] * 60},
    ),
    "minimax-m3-eagle3-mha": drafter("drafter", 1, 48, 128),
    "meta-llama/Llama-3.1-70B": dense("LlamaForCausalLM", "llama", layers=80, heads=8, width=128),
    "meta-llama/Llama-3.2-1B": dense("LlamaForCausalLM", "llama", layers=16, heads=8, width=64),
    "Qwen/QwQ-32B": dense("Qwen2ForCausalLM", "qwen2", layers=64, heads=8, width=128),
    "zai-org/GLM-4.5-Air": dense("Glm4MoeForCausalLM", "glm4_moe", layers=46, heads=8, width=128),
    "zai-org/GLM-5.2": like("target", **V3 | INDEX | {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
        "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64}),
    "glm-5.2-dspark": drafter("dspark", 3, 16, 64),
    "novita/kimi-k2.6-dspark": drafter("dspark", 3, 8, 128),
    "openai/gpt-oss-120b": dense(
        "GptOssForCausalLM", "gpt_oss", layers=36, heads=8, width=64, sliding_window=128),
    "nvidia/gpt-oss-eagle3": dense(
        "LlamaForCausalLMEagle3", "llama", layers=1, heads=8, width=64),
    "Qwen/Qwen3-Next": dense(
        "Qwen3NextForCausalLM", "qwen3_next", layers=48, heads=2, width=256,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4, num_nextn_predict_layers=1),
    "XiaomiMiMo/MiMo-V2-Flash": dense(
        "MiMoV2FlashForCausalLM", "mimo_v2_flash", layers=48, heads=4, width=192,
        v_head_dim=128, sliding_window=128, hybrid_layer_pattern=[0, 1] * 24,
        swa_num_key_value_heads=8, swa_num_attention_heads=64, swa_head_dim=192,
        swa_v_head_dim=128),
    "meituan-longcat/LongCat-Flash": {
        "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", **MLA,
        "dtype": "bfloat16", "num_layers": 28, "num_attention_heads": 64, "hidden_size": 6144,
        "num_nextn_predict_layers": 1},
    "inclusionAI/Ling-2.5": {
        "architectures": ["BailingMoeV2_5ForCausalLM"], "model_type": "bailing_hybrid", **MLA,
        "dtype": "bfloat16", "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 64, "hidden_size": 8192, "head_dim": 128, "layer_group_size": 8,
        "rope_scaling": None, "num_nextn_predict_layers": 1},
    "stepfun-ai/Step-3.5-Flash": {
        "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "dtype": "bfloat16",
        "num_attention_heads": 64, "num_attention_groups": 8, "num_hidden_layers": 48,
        "head_dim": 128, "hidden_size": 4096, "sliding_window": 512, "layer_types":
        ["full_attention", *["sliding_attention"] * 3] * 12, "num_nextn_predict_layers": 3},
    "meta-llama/Llama-4-Maverick": {
        "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
        "text_config": {"model_type": "llama4_text", "dtype": "bfloat16", "num_hidden_layers": 48,
                        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                        "hidden_size": 5120, "attention_chunk_size": 8192},
        "vision_config": {"model_type": "llama4_vision_model"}},
    "lightseekorg/kimi-k2.6-eagle3-mla": like("target", **V3 | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"], "num_hidden_layers": 1}),
    "lightseekorg/kimi-k3-dspark": {"architectures": ["K3DSparkModel"], "model_type": "k3_dspark"},
    "RedHatAI/speculator.eagle3": {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "transformer_layer_config": {"model_type": "llama"}},
}  # fmt: skip

ON, NIXL = "--enable-mixkv", "--disaggregation-transfer-backend nixl"
MODE = "--disaggregation-mode ROLE"
K3 = (
    f"{MODE} --model-path moonshotai/Kimi-K3 --trust-remote-code --speculative-algorithm DSPARK "
    "--speculative-draft-model-path RadixArk/Kimi-K3-DSpark --speculative-dspark-block-size 7 "
    f"--page-size 64 {ON}"
)
K25 = (
    f"{MODE} --model-path moonshotai/Kimi-K2.5 --trust-remote-code --speculative-algorithm DFLASH "
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
HEAD = r"LlamaForCausalLMEagle3 .* EAGLE3, not EAGLE"

GLM = f"{SERVER} --model-path zai-org/GLM-5.2"
M3 = f"{SERVER} --model-path MiniMaxAI/MiniMax-M3"
LLAMA = f"{SERVER} --model-path meta-llama/Llama-3.1-70B"
K26 = f"{SERVER} --model-path moonshotai/Kimi-K2.5 --tp-size 8"
HEAD3 = f"--speculative-algorithm EAGLE3 {DRAFTS} --speculative-draft-model-path"
DSPARK = "--speculative-algorithm DSPARK --speculative-draft-model-path"
GPT_OSS = f"{SERVER} --model-path openai/gpt-oss-120b {HEAD3} nvidia/gpt-oss-eagle3"
LWS = "---\n".join(f"""\
kind: LeaderWorkerSet
spec:
  leaderWorkerTemplate:
    size: 2
    leaderTemplate:
      spec:
        containers:
        - command:
          - python3
          - -m
          - sglang.launch_server
          - --model-path
          - deepseek-ai/DeepSeek-V3.1
          - --disaggregation-ib-device
          # as your network is
          - mlx5_bond_0,mlx5_bond_1
          - --chunked-prefill-size
          - "CHUNK"
          #          - --init-expert-location
          #          - /home/attachment_ep_statistics
          - --enable-dp-attention
          - --dp-size
          - "16"
          - --tp-size
          - "16"
          - --disaggregation-mode
          - {role}
          - --dist-init-addr
          - $(LWS_LEADER_ADDRESS):20102
          - --nnodes
          - $(LWS_GROUP_SIZE)
          - --node-rank
          - "0"
    workerTemplate: {{}}
""" for role in ("prefill", "decode")).replace("$(LWS_GROUP_SIZE)", '"2"')  # fmt: skip
DYNAMO = "kind: DynamoGraphDeployment\nspec:\n  services:\n" + "".join(f"""\
    {role}:
      extraPodSpec:
        mainContainer:
          command: [/bin/sh, -c]
          args:
            - |
              set -e
              ulimit -l unlimited
              # this is the {role} role
              exec python3 -m dynamo.sglang \\
                --model-path "$MODEL_PATH" \\
                --served-model-name "$SERVED_MODEL_NAME" \\
                --tp-size 2 --dp-size 2 --enable-dp-attention \\
                --dyn-reasoning-parser qwen3 \\
                --disaggregation-mode {role} \\
                --disaggregation-transfer-backend nixl \\
                --kv-events-config '{{"publisher":"zmq"}}'
          env:
            - name: MODEL_PATH
              value: Qwen/Qwen3-Next
            - {{name: SERVED_MODEL_NAME, value: a}}
""" for role in ("prefill", "decode"))  # fmt: skip

# Per pair: the common part of both lines, the rest of prefill's, the rest of decode's, whether the
# pair needs the plugin, and why.
RECIPES = {
    "Kimi-K3, a pipeline over NIXL": (
        f"{K3} {NIXL}", "--tp-size 1 --pp-size 16", "--tp-size 16",
        True, "does not send it rows of 16: requests fail",
        {"share": None}),
    "Kimi-K3, a pipeline over Mooncake, with a storage tier": (
        K3, "--tp-size 1 --pp-size 8 --enable-hierarchical-cache --hicache-storage-backend "
        "mooncake", "--tp-size 8", True, "over other requests' rows and past the end",
        {"share": 1.0, "noted": "prefill: .* only servers of attention TP 1 find .* store"}),
    "Kimi-K3, DCP: SGLang cuts the heads itself from ranks that hold enough": (
        K3, "--tp-size 1 --pp-size 8", "--tp-size 8 --dcp-size 8",
        False, "SGLang cuts the drafter's heads itself", {"gpu": "blackwell"}),
    "Kimi-K3, DCP from ranks that hold fewer": (
        K3, "--tp-size 16", "--tp-size 8 --dcp-size 8",
        True, "SGLang sends 1 of the 2 KV heads a decode rank needs",
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
        f"{V31} {EAGLE3}", "--tp 8", "--tp 16", False, "each rank holds one KV head", {}),
    "DeepSeek-V4 contains its drafter (sglang#33411)": (
        f"sglang serve --model-path deepseek-ai/DeepSeek-V4-Flash --tp 4 {NIXL} "
        "--speculative-algorithm DSPARK --moe-runner-backend marlin", "", "--base-gpu-id 4",
        False, "the drafter is MLA", {}),
    "DeepSeek-V4 with its MTP layer (sglang#34410)": (
        f"{SERVER} --model-path deepseek-ai/DeepSeek-V4-Flash --tp 4 {MTP}", "",
        "--dp 4 --enable-dp-attention", False, "the drafter is MLA", {}),
    "LongCat-Flash with its MTP layer": (
        f"{SERVER} --model-path meituan-longcat/LongCat-Flash {MTP}", "--tp 8",
        "--tp 8 --dp 8 --enable-dp-attention", False, "the drafter is MLA", {}),
    "Ling-2.5, a hybrid MLA target, with its MTP layer": (
        f"{SERVER} --model-path inclusionAI/Ling-2.5 {MTP}", "--tp 8", "--tp 4", False,
        "the drafter is MLA", {}),
    "Step-3.5, for which SGLang enables multi-layer EAGLE": (
        f"{SERVER} --model-path stepfun-ai/Step-3.5-Flash {MTP} {ON}", "--tp 8", "--tp 8",
        False, "both sides have", {"found": ["--enable-multi-layer-eagle is not supported, and "
                                            "SGLang sets it itself here: start both"] * 2}),
    "Llama-4 with an EAGLE3 head of as many KV heads": (
        f"{SERVER} --model-path meta-llama/Llama-4-Maverick {HEAD3} eagle3", "--tp 8", "--tp 4",
        False, "by heads exactly", {}),
    "Ascend (sglang#13208)": (
        f"{SERVER} {V31} --tp-size 16 --attention-backend ascend --device npu --quantization "
        "w8a8_int8 --disaggregation-transfer-backend ascend --enable-dp-attention "
        f"--speculative-algorithm NEXTN {DRAFTS}", "--dp-size 2", "--dp-size 8",
        False, "the drafter is MLA", {"noted": "SGLang's checks for npu were not run"}),
    "SGLang's documentation, two nodes": (
        f"{SERVER} {V31} --disaggregation-ib-device ${{device_name}} {TWO_NODES} --dp-size 8 "
        "--enable-dp-attention --moe-a2a-backend deepep", "--ssl-keyfile /key", "", False, NEITHER,
        {"noted": r"device_name is not set in it, and plan does not need it(.|\n)*"
         r"prefill: --ssl-keyfile /key depends on the server's host"}),
    "a comment and arithmetic of the shell (sglang#17212)": (
        f"# GLM-4.5 Air\n{SERVER} \\\n  --model-path zai-org/GLM-4.5-Air --tp-size 4 \\\n",
        "  --chunked-prefill-size $((16384 * 4)) \\\n    # --speculative-algo EAGLE", MTP,
        None, r"line 2: only a shell computes it.*SGLANG_MIXKV_PLAN=prefill.json", {}),
    "one prefill server for a decode server of twelve times its size": (
        "export MC_TE_METRIC=true\nexport SGLANG_ENABLE_MIXKV=1\n# export SGLANG_RUST_SERVER=1\n"
        f"{SERVER} {V31} --attention-backend trtllm_mla --kv-cache-dtype fp8_e4m3 "
        "--moe-runner-backend flashinfer_cutlass --enable-dp-attention --enable-dp-lm-head",
        "--tp-size 4 --dp-size 4 --ep-size 4", "--tp-size 48 --dp-size 48 --ep-size 48",
        False, NEITHER, {"noted": "resolved for a Blackwell GPU"}),
    "GLM-5.3's crash: an MTP layer, FP8 KV (sglang#39072)": (
        f"{GLM} {MTP} --kv-cache-dtype fp8_e4m3", "--tp 8", "--tp 8 --dp 2 --enable-dp-attention",
        False, "the drafter is MLA", {}),
    "MTP on decode alone (sglang#32527)": (
        GLM, "--tp 8", f"--tp 8 --dp 8 --enable-dp-attention {MTP}", False,
        "without a drafter on prefill", {"noted": "start cold"}),
    "GLM-5.2 with a GQA DSpark head": (
        f"{GLM} {DSPARK} glm-5.2-dspark {ON}", "--tp 4",
        "--tp 8 --dp 8 --enable-dp-attention --enable-dp-lm-head", True, FROM_ONE, {"share": 1.0}),
    "gpt-oss, whose drafter has the target's heads (sglang#32226)": (
        f"{GPT_OSS} {ON}", "--tp 2", "--tp 4", False, "by heads exactly as the target's",
        {"noted": "Mooncake's TCP(.|\n)*of no use here"}),
    "EAGLE3 without a draft path (sglang#36528)": (
        f"{SERVER} --model-path moonshotai/Kimi-K2.5 --speculative-algorithm EAGLE3 {DRAFTS}",
        "--tp 8", "--tp 8 --dp 8 --enable-dp-attention", False, "the drafter is MLA",
        {"found": [f"{role}: EAGLE3 needs --spec.*-path" for role in ("prefill", "decode")]}),
    "EAGLE with a target that has no MTP layer": (
        f"{LLAMA} {MTP} {ON}", "--tp 2", "--tp 1", False, "by heads exactly",
        {"found": [f"{role}: EAGLE needs --spec.*-path" for role in ("prefill", "decode")]}),
    "MiniMax-M3's two drafters, one on each side (vllm-ascend#16509)": (
        M3, f"--tp 4 {HEAD3} minimax-m3-eagle3-mha", f"--tp 4 {HEAD3} eagle3", False,
        "both sides have attention TP 4",
        {"found": ["KV heads of the drafter: prefill has 48, decode has 8"]}),
    "MiniMax-M3 at unequal sizes (sglang#33383, #36095)": (
        f"{M3} {HEAD3} eagle3 {ON}", "--tp 4", "--tp 8", None, "",
        {"found": ["PAIR-03. target with minimax_index_k state at unequal TP"]}),
    "MiniMax-M3 over NIXL, without the plugin and a drafter": (
        f"{M3} {NIXL}", "--tp 4", "--tp 4 --dp 4 --enable-dp-attention", None, "",
        {"found": ["PAIR-03. target with minimax_index_k state at unequal TP"]}),
    "DeepSeek-V4 with an EAGLE3 head (sglang#33344)": (
        f"{SERVER} --model-path deepseek-ai/DeepSeek-V4-Flash {HEAD3} eagle3", "--tp 8",
        "--tp 8 --dp 8 --enable-dp-attention", None, "", {"found": ["Only EAGLE and DSPARK"] * 2,
                                                         "any": True}),
    "Kimi-K2.6 with a GQA DSpark head, 8 draft tokens for a block of 8": (
        f"{K26} {DSPARK} novita/kimi-k2.6-dspark --speculative-dspark-block-size 8 "
        "--speculative-num-draft-tokens 8", "", "--dp 8 --enable-dp-attention "
        "--enable-dp-lm-head", True, FROM_ONE, {"share": 1.0, "found": ["does not start"] * 2}),
    "Kimi-K3.1, every second rank (LithosAI)": (
        K3, "--tp-size 32", "--tp-size 8", True, "a decode rank holds 2", {"share": 1.0}),
    "an MLA DSpark head that SGLang has no loader for": (
        f"{K26} {DSPARK} lightseekorg/kimi-k3-dspark", "", "", None,
        "has no loader for model type `k3_dspark`", {}),
    "a head in speculators' format": (
        f"{K26} {HEAD3} RedHatAI/speculator.eagle3", "", "", None, "has no loader for it", {}),
    "Kimi-K2.6 with an MLA head under EAGLE (sglang#25673)": (
        f"{K26} {MTP} --speculative-draft-model-path lightseekorg/kimi-k2.6-eagle3-mla", "",
        "--dp 8 --enable-dp-attention", False, "the drafter is MLA",
        {"found": [rf"{role}: Eagle3DeepseekV2.* is a drafter for .* EAGLE3, not EAGLE"
                   for role in ("prefill", "decode")]}),
    "dtypes that differ (vllm#21177)": (
        f"{LLAMA} {HEAD3} eagle3 --tp 2", "--dtype float16", "--dtype bfloat16", False,
        "both sides have", {"found": ["dtype of the target's KV: prefill has float16",
                                      "dtype of the drafter's KV: prefill has float16"]}),
    "Qwen3-Next, a hybrid target": (
        f"{SERVER} --model-path Qwen/Qwen3-Next {MTP} --tp 2", "", "--dp 2 --enable-dp-attention",
        False, "by heads exactly", {"noted": "Mooncake's TCP"}),
    "MiMo-V2, for which SGLang enables multi-layer EAGLE": (
        f"{SERVER} --model-path XiaomiMiMo/MiMo-V2-Flash {MTP} {ON}", "--tp 4", "--tp 4",
        False, "both sides have", {"found": ["--enable-multi-layer-eagle is not supported, and "
                                            "SGLang sets it itself here: start both"] * 2}),
    "GLM-5.2, MoRI, HiCache (InferenceX#2679)": (
        f"{GLM} {MTP} --disaggregation-transfer-backend mori --page-size 64 --tp 8",
        "--enable-hierarchical-cache", "--dp 8 --enable-dp-attention", False,
        "the drafter is MLA", {}),
    "DeepSeek-V3 as of early 2025, a log and an ampersand (sglang#12688)": (
        f"nohup {SERVER} {V31} {MTP} --cuda-graph-max-bs-decode 16", "--tp 8 > p.log 2>&1 &",
        "--tp 8 > d.log 2>&1 &", False, "the drafter is MLA", {}),
    "Kimi-K2.6 on MI355X, Mooncake (ROCm's Infera)": (
        f"{K26} {HEAD3} eagle3 --attention-backend aiter", "", "--dp 8 --enable-dp-attention",
        True, FROM_ONE, {"share": 1.0}),
    "one side for Blackwell, the other for any GPU": (
        f"{K26} {HEAD3} eagle3 {ON}", "", "--tp-size 4 --attention-backend trtllm_mla",
        True, FROM_ONE, {"share": 1.0, "gpu": "blackwell", "noted": "prefill and decode: resolved "
                         "for a Blackwell GPU"}),
    "Dynamo's flag for a plugin of SGLang": (
        f"python3 -m dynamo.sglang {MODE} {V31} {HEAD3} eagle3 {ON} --dyn-tool-call-parser kimi_k2",
        "--tp 8", "--tp 8 --dp 8 --enable-dp-attention", True, FROM_ONE,
        {"share": 1.0,
         "found": ["Dynamo's parser rejects --enable-mixkv: set SGLANG_ENABLE_MIXKV"] * 2}),
    "neither line has a mode": (
        f"sglang serve {V31} {HEAD3} eagle3 {ON}", "--tp 8", "--tp 4", True, FROM_ONE,
        {"share": 1.0, "found": [r"START-03\] \w+: --disaggregation-mode null is not"] * 2}),
    "LeaderWorkerSets of SGLang's documentation": (
        LWS.replace("CHUNK", "262144"), "", "", False, NEITHER, {"noted": "mlx5_bond_0"}),
    "Dynamo's recipe of a hybrid target, in one manifest": (
        DYNAMO, "", "", False, NEITHER, {}),
    "GLM-4.5-Air's own page: both servers and the router": (
        f"{SERVER} --model-path zai-org/GLM-4.5-Air --tp-size 4 --disaggregation-ib-device mlx5_0\n"
        .replace("ROLE", "prefill") +
        f"{SERVER} --model-path zai-org/GLM-4.5-Air --tp-size 4 --base-gpu-id 4 {MTP}\n"
        .replace("ROLE", "decode") + "python -m sglang_router.launch_router --pd",
        "", "", False, "without a drafter on prefill", {"noted": "--disaggregation-ib-dev"}),
    "two prefill and two decode servers in a benchmark's script": (
        "export MODEL=meta-llama/Llama-3.1-70B\n" + "".join(
            f"CUDA_VISIBLE_DEVICES={n} {SERVER} --model-path $MODEL --tp {tp} --port 3000{n} "
            f"{HEAD3} eagle3 {more} > log{n} 2>&1 &\n".replace("ROLE", role)
            for n, (role, tp, more) in enumerate([
                ("prefill", 2, "--enable-hierarchical-cache --hicache-storage-backend file"),
                ("decode", 1, "")] * 2)),
        "", "", False, "by heads exactly", {}),
    "containers of a benchmark's script": (
        f"docker rm -f server || true\ndocker run -d --name server --gpus '\"device=0\"' -e "
        f"SGLANG_ENABLE_MIXKV=1 sglang {SERVER} {V31} {HEAD3} eagle3 --host 0.0.0.0 \\\n",
        "  --tp 8\necho started", "  --tp 8 --dp 8 --enable-dp-attention\necho started",
        True, FROM_ONE, {"share": 1.0}),
    "a standalone drafter of half the width": (
        f"{LLAMA} --speculative-algorithm STANDALONE {DRAFTS} --speculative-draft-model-path "
        "meta-llama/Llama-3.2-1B", "--tp 4", "--tp 2", True, "target rows' length",
        {"share": None, "noted": "Mooncake's TCP"}),
    "a RoleBasedGroup's sh -c": (
        "kind: RoleBasedGroup\nspec:\n  roles:\n" + "".join(
            f"  - name: {role}\n    template: {{spec: {{containers: [{{command: [sh, -c, "
            f'"python3 -m sglang.launch_server --model-path Qwen/QwQ-32B --tp=2 '
            f'--disaggregation-mode {role} --port 8000"]}}]}}}}\n'
            for role in ("prefill", "decode")), "", "", False, NEITHER, {}),
    "a draft path that DeepSeek does not need": (
        f"{SERVER} {V31} --speculative-algorithm EAGLE --speculative-draft-model-path "
        f"deepseek-ai/DeepSeek-V3.1 {DRAFTS}", "--tp 8", "--tp 16", False, "the drafter is MLA",
        {}),
    "replicas on prefill": (
        f"docker run --shm-size 32g sglang {SERVER} --model-path Qwen/QwQ-32B --tp 2",
        "--dp-size 4", "", False, NEITHER, {"found": ["of 4 replicas"]}),
    "a script for AMD's GPUs": (
        f"set -ex\nexport SGLANG_USE_AITER=1 SGLANG_HOST_IP=10.2.224.32\n{SERVER} {V31} --tp 8 "
        "--host $SGLANG_HOST_IP --mem-fraction-static 0.5 2>&1 | tee log_ROLE.log", "", "",
        False, NEITHER, {}),
    "options of a script for Hygon's": (
        f'model_path={V31.split()[1]}\noption="--chunked-prefill-size -1"\n'
        f'option+=" {MTP} --disaggregation-ib-device mlx5_0,mlx5_1 "\n'
        f"{SERVER} --model-path $model_path ${{option}} \\\n --tp-size 8 --dtype bfloat16",
        "", "", None, "option is set again in line 3.*SGLANG_MIXKV_PLAN=prefill.json", {}),
    "options of a script, in one assignment": (
        f'model_path={V31.split()[1]}\nexport option="--chunked-prefill-size -1 {MTP} '
        f'--disaggregation-ib-device mlx5_0,mlx5_1 "\n'
        f"{SERVER} --model-path $model_path ${{option}} \\\n --tp-size 8 --dtype bfloat16",
        "", "", False, "the drafter is MLA", {"noted": "mlx5_0,mlx5_1"}),
    # Pairs without findings, for the table by model (scripts/docs/tables.py).
    "Kimi-K2.6 with a Llama EAGLE3 head over NIXL": (
        f"{K26} {HEAD3} lightseekorg/kimi-k2.5-eagle3 {NIXL} {ON}", "",
        "--dp 8 --enable-dp-attention", True, FROM_ONE, {"share": 1 - 1 / 8}),
    "Kimi-K2.6 with an MLA EAGLE3 head": (
        f"{K26} {HEAD3} lightseekorg/kimi-k2.6-eagle3-mla", "", "--dp 8 --enable-dp-attention",
        False, "the drafter is MLA", {}),
    "Kimi-K2.6 with a GQA DSpark head": (
        f"{K26} {DSPARK} novita/kimi-k2.6-dspark --speculative-dspark-block-size 7 {ON}", "",
        "--dp 8 --enable-dp-attention --enable-dp-lm-head", True, FROM_ONE, {"share": 1.0}),
    "Llama-3.1 with an EAGLE3 head of as many KV heads": (
        f"{LLAMA} {HEAD3} eagle3", "--tp 4", "--tp 8", False, "by heads exactly", {}),
    "QwQ with an EAGLE3 head of as many KV heads, over NIXL": (
        f"{SERVER} --model-path Qwen/QwQ-32B {HEAD3} eagle3 {NIXL}", "--tp 4", "--tp 2", False,
        "by heads exactly", {}),
    "Kimi-K3, DCP on prefill alone (sglang#32837)": (
        K3, "--tp-size 8 --dcp-size 8", "--tp-size 8", None, "",
        {"gpu": "blackwell", "found": ["--dcp-size: prefill has 8 at .* decode has 1 at"]}),
    "Kimi-K3, DCP of two sizes, without a drafter": (
        f"{SERVER} --model-path moonshotai/Kimi-K3", "--tp-size 2 --dcp-size 2",
        "--tp-size 8 --dcp-size 8", None, "",
        {"gpu": "blackwell", "found": ["--dcp-size: prefill has 2 at .* decode has 8 at"]}),
    "GLM-5.2 with DCP, which SGLang does not start (sglang#39330)": (
        f"{GLM} {DSPARK} glm-5.2-dspark {ON} --tp 8", "", "--dcp-size 8", False, "both sides have",
        {"any": True, "found": ["decode: .*does not start it: DSA DCP does not support"],
         "count": 1}),
    "Kimi-K2.6 with EAGLE3 on Ascend": (
        f"{K26.replace('--tp-size 8', '')} --device npu --attention-backend ascend {HEAD3} eagle3 "
        f"--disaggregation-transfer-backend ascend --tp 16 {ON}", "",
        "--dp 16 --enable-dp-attention", True, FROM_ONE,
        {"share": 1.0, "found": [rf"START-03\] {role}: --{flag}\S* other than" for role in
                                 ("prefill", "decode") for flag in ("disaggregation", "device")]}),
    # Public lines of autumn 2026, each judged by the source of SGLang 0.5.23.
    "DeepSeek-V4.1 DSpark at unequal sizes": (
        f"{SERVER} --model-path deepseek-ai/DeepSeek-V4.1 --moe-runner-backend marlin "
        "--speculative-algorithm DSPARK", "--tp 4", "--tp 8", None, "",
        {"found": ["SGLang refuses .* DSpark PD requires the same TP size"]}),
    "DeepSeek-V4.1, one side with TRT-LLM's KV layout": (
        f"{SERVER} --model-path deepseek-ai/DeepSeek-V4.1 --tp 4", "--dsv4-attn-backend trtllm", "",
        None, "", {"gpu": "blackwell", "found": ["does not start it: --dsv4-attn-backend trtllm",
                                                 "SGLang refuses .* KV layout mismatch"]}),
    "a wide expert-parallel pair's staging, copied for Kimi (llm-d)": (
        f"export SGLANG_DISAGG_STAGING_BUFFER=1\n{K26} {HEAD3} eagle3 {ON}", "",
        "--dp 8 --enable-dp-attention", True, FROM_ONE,
        {"share": 1.0, "found": ["prefill: SGLang exits at startup, since SGLANG_DISAGG_STAGING",
                                 "decode: SGLang exits at startup"]}),
    "staging in chunks that are no multiple of the page": (
        f"SGLANG_DISAGG_STAGING_BUFFER=1 {GPT_OSS} --page-size 64 --chunked-prefill-size", "-1",
        "-1", False, "both sides have",
        {"found": ["prefill: SGLang exits .* multiple of the page, 64; got -1"]}),
    "chunks that are no multiple of the page": (
        f"{GPT_OSS} --page-size 64 --chunked-prefill-size", "4000", "8192", False,
        "both sides have", {"found": ["prefill: .*chunked_prefill_size must be divisible by"]}),
    "only some of the speculative flags": (
        f"{K26} --speculative-algorithm EAGLE3 --speculative-draft-model-path eagle3 {ON}",
        "--speculative-num-steps 3", "--speculative-eagle-topk 1", False, "both sides have",
        {"found": ["prefill: .*topk and --speculative-num-draft-tokens missing: give all three",
                   "decode: .*num-steps and --speculative-num-draft-tokens missing"]}),
    "a number of draft tokens that SGLang replaces": (
        f"{K26} --speculative-algorithm EAGLE3 --speculative-draft-model-path eagle3 {ON} "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 9",
        "", "--dp 8 --enable-dp-attention", True, FROM_ONE,
        {"share": 1.0, "noted": "SGLang takes --speculative-num-draft-tokens 4 instead of 9"}),
    "Mooncake over TCP by its own name": (
        f"{GPT_OSS} --disaggregation-transfer-backend mooncake_tcp {ON}", "--tp 2", "--tp 4",
        False, "by heads exactly", {"found": ["Mooncake's TCP, .* Use RDMA"]}),
    "MC_FORCE_TCP=0, which Mooncake takes as set": (
        f"export MC_FORCE_TCP=0\n{GPT_OSS} {ON}", "--tp 2", "--tp 4",
        False, "by heads exactly", {"found": ["Mooncake's TCP, .* Use RDMA"]}),
    "a flag of an older SGLang in Dynamo's wide recipe": (
        f"python3 -m dynamo.sglang {MODE} {V31} --tp 8 --prefill-round-robin-balance --router-mode "
        "kv --disaggregation-bootstrap-port $PORT", "", "--dp 8 --enable-dp-attention", False,
        NEITHER, {"found": [r"\w+: neither Dynamo nor SGLang \S+ knows --prefill-round-r"] * 2}),
    "Kimi-K3 with DCP on two nodes, rank and address as arguments": (
        f"RANK=${{1:?rank}}; ADDR=${{2:?addr}}\nexport MC_FORCE_MNNVL=1\nexec {SERVER} "
        '--model-path moonshotai/Kimi-K3 --nnodes 2 --node-rank "$RANK" --dist-init-addr "$ADDR" '
        "--context-length ${CTX:-40960}", "--tp-size 8", "--tp-size 8 --dcp-size 8", False, NEITHER,
        {"gpu": "blackwell", "noted": "CTX is taken as its default(.|\n)*--node-rank: RANK"}),
    "GLM-5.2 on MI355X, a key and ports from the environment": (
        f"{GLM} --tp-size 8 --api-key \"$API_KEY\" --port \"$PORT\" --kv-cache-dtype fp8_e4m3 "
        "--speculative-algorithm NEXTN --speculative-num-steps 2 --speculative-num-draft-tokens 3 "
        "--speculative-eagle-topk 1 --disaggregation-ib-device '{\"0\":\"bnxt_re_bond0\"}'",
        "", "--disaggregation-bootstrap-port \"$BOOTSTRAP_PORT\"", False, "the drafter is MLA",
        {"noted": "--api-key: API_KEY is not set in it, and plan does not need it"}),
    "a RoleBasedGroup of Dynamo workers, patches of a template": (
        "roles:\n  - {name: processor, patch: {spec: {containers: [{command: [python3, -m, "
        "dynamo.frontend]}]}}}\n" + "".join(
            f"  - name: {role}\n    standalonePattern: {{patch: {{spec: {{containers: [{{command: "
            f"[python3, -m, dynamo.sglang], args: [--disaggregation-mode={role}, "
            f"--model-path=Qwen/QwQ-32B]}}]}}}}}}\n" for role in ("prefill", "decode")),
        "", "", False, NEITHER, {}),
    "SGLang's LeaderWorkerSet of two nodes: ports of the leader, the controller's size": (
        "---\n".join(
            f"leader: {{spec: {{containers: [{{command: {node}, args: [--port, '1']}}]}}}}\n"
            f"worker: {{spec: {{containers: [{{command: {node}}}]}}}}\n"
            for role, more in (("prefill", ""), ("decode", ", --enable-dp-attention, --dp, '16'"))
            for node in [f"[python3, -m, sglang.launch_server, --model-path, moonshotai/Kimi-K2.5, "
                         f"--tp, '16', --nnodes, $(LWS_GROUP_SIZE), --node-rank, "
                         f"$(LWS_WORKER_INDEX), --disaggregation-mode, {role}{more}]"]),
        "", "", False, NEITHER, {"noted": "--nnodes: LWS_GROUP_SIZE is filled in by"}),
    "a recipe of srt-slurm, with DP attention and the role's variables": (
        "backend:\n  type: sglang\n  prefill_environment: {SGLANG_ENABLE_MIXKV: '1'}\n"
        "  decode_environment: {SGLANG_ENABLE_MIXKV: 1, MC_FORCE_MNNVL: '1'}\n  sglang_config:\n"
        + "".join(
            f"    {role}: {{model-path: moonshotai/Kimi-K2.5, tensor-parallel-size: 8, {more}"
            f"disaggregation-mode: {role}, speculative_algorithm: EAGLE3, cuda-graph-bs-decode: "
            "[1, 2], moe-dense-tp-size: 1, trust-remote-code: true, speculative-draft-model-path: "
            "eagle3}\n"
            for role, more in (("prefill", ""), ("decode", "enable-dp-attention: true, "
                                                 "data-parallel-size: 8, "))),
        "", "", True, FROM_ONE, {"share": 1.0}),
    "Dynamo's script with an array of tracing flags": (
        "TRACE_ARGS=()\npython3 -m dynamo.frontend &\n" + "".join(
            f"OTEL_SERVICE_NAME=w CUDA_VISIBLE_DEVICES=1 python3 -m dynamo.sglang --model-path "
            f"Qwen/QwQ-32B --disaggregation-mode {role} --enable-metrics \"${{TRACE_ARGS[@]}}\" &\n"
            for role in ("prefill", "decode")),
        "", "", None, "line 3: TRACE_ARGS is computed in line 1.*SGLANG_MIXKV_PLAN=pre", {}),
    "an image's script, which assembles its arguments": (
        'if [ "$PD_ROLE" == prefill ]; then\n  ENGINE_ARGS="--disaggregation-mode prefill '
        '$ENGINE_ARGS"\nfi\neval "python3 -m sglang.launch_server $ENGINE_ARGS"', "", "", None,
        "ENGINE_ARGS may be changed in line 1 .*SGLANG_MIXKV_PLAN=prefill.json", {}),
    "Ascend's script, with a loop over addresses and its own environment": (
        "for i in \"${!D_IP[@]}\"; do\n  source /usr/local/Ascend/set_env.sh\n"
        f"  {SERVER} {V31} --host ${{D_IP[$i]}} --nnodes 2 --node-rank $i\ndone", "", "", None,
        r"line 2 \(source\) can set anything", {}),
    "two servers and the router in a page of commands": (
        "".join(f"# {role} node\n{SERVER.replace('ROLE', role)} --model-path Qwen/QwQ-32B --port "
                f"3000{n} --host 192.168.0.1{n} --tp-size 2\n"
                for n, role in enumerate(("prefill", "decode")))
        + "python3 -m sglang_router.launch_router --pd-disaggregation --prefill http://a 8998\n",
        "", "", False, NEITHER, {}),
    "decode's line without a model": (
        f"{MODE} --tensor-parallel-size=8", "--model-path Qwen/QwQ-32B", "--enable-hierarchical-ca"
        "che", None, "decode: --model-path is missing on the launch line", {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with each model's config.json below the model's public name."""
    import sglang.srt.model_loader  # noqa: F401  # with this process's variables, not a line's

    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_plan_of_a_recipe(recipe: tuple[Any, ...], models: Path) -> None:
    """`plan` gives a recipe the expected verdict and exactly the expected findings."""
    both, *own, needed, why, says = recipe
    names = "|".join(map(re.escape, sorted(MODELS, key=len, reverse=True)))

    def server(role: str, line: str) -> Any:
        whole = f"{both} {line}".replace("ROLE", role)
        here = re.sub(rf"(?<=[ =])({names})(?=[\s,\]}}]|$)", rf"{models}/\1", whole)
        return read(role, here, gpu=says.get("gpu"))

    roles = zip(("prefill", "decode"), own, strict=True)
    found = says.get("found", [])
    if needed is None and not found:
        with pytest.raises(ValueError, match=why):
            [server(*one) for one in roles]
        return
    plan = make_plan(*(server(*one) for one in roles))
    if plan.need and plan.need.needed and not (plan.prefill.enabled or plan.decode.enabled):
        own = [one for one in plan.findings if "on neither side, and the pair needs it" in one]
        assert len(own) == (not (plan.prefill.refused or plan.decode.refused))
        plan = replace(plan, findings=tuple(one for one in plan.findings if one not in own))
    if says.get("any"):
        assert re.search(found[0], "\n".join(plan.findings)), plan.findings
        assert len(plan.findings) == says.get("count", len(plan.findings)), plan.findings
        return
    assert len(plan.findings) == len(found), plan.findings
    for pattern, finding in zip(found, plan.findings, strict=True):
        assert re.search(pattern, finding), finding
    assert re.search(says.get("noted", ""), "\n".join(plan.notes))
    if needed is None or (needed and plan.prefill.refused):
        assert text(plan).startswith("Neither stock SGLang nor the plugin serves this pair")
    if needed is None:
        return
    assert plan.need is not None
    assert (plan.need.needed, plan.need.wrong_share) == (needed, says.get("share", 0.0))
    assert why in plan.need.reason
