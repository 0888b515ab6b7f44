"""Pairs of launch lines that people use, after public recipes, with what the plan says of them.

Each answer was judged by hand. Of a model a line needs config.json alone: sizes are those of the
public models where they decide what is moved (layers, heads, widths), and of the small pairs of
mixkv_demo, or transformers' defaults, elsewhere.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mixkv_demo
from sglang_mixkv.tools.plan_pair import Plan, make_plan
from sglang_mixkv.tools.plan_server import read

SMALL = Path(mixkv_demo.__file__).parent / "models" / "mla"
LONG = {"max_position_embeddings": 262144}
MLA = {**LONG, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
       "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip
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


def _plain(architecture: str, kind: str, heads: int, layers: int, **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": kind, "dtype": "bfloat16", **LONG,
            "num_key_value_heads": heads, "num_hidden_layers": layers,
            "num_attention_heads": 32, **more}  # fmt: skip


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
    "meta-llama/Llama-3.1-8B-Instruct": _plain("LlamaForCausalLM", "llama", 8, 32),
    "Qwen/Qwen3-8B": _plain("Qwen3ForCausalLM", "qwen3", 8, 36),
    "zai-org/GLM-4.5-Air": _plain("Glm4MoeForCausalLM", "glm4_moe", 8, 46, head_dim=128),
    "deepseek-ai/DeepSeek-V4-Flash": _plain(
        "DeepseekV4ForCausalLM", "deepseek_v4", 1, 43, **MLA, **INDEX, sliding_window=128,
        compress_ratios=[0] * 43, dspark_block_size=5,
    ),
    "Qwen/Qwen3.5-397B-A17B": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "text_config": _plain("", "qwen3_5_moe_text", 2, 60, head_dim=256),
    },
    "lightseekorg/kimi-k2.5-eagle3": _drafter("drafter", 1, 64, 128),
    "lightseekorg/kimi-k2.6-eagle3-mla": _like(
        "target", **V3 | {"num_hidden_layers": 1}, architectures=["Eagle3DeepseekV2ForCausalLM"]
    ),
    "XiaomiMiMo/MiMo-V2.5": _plain(
        "MiMoV2FlashForCausalLM", "mimo_v2_flash", 4, 48, hybrid_layer_pattern=[0] * 48
    ),
}  # fmt: skip


def write_models(folder: Path) -> None:
    """Each model's config.json below this folder, by its public name."""
    for name, config in CONFIGS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class Recipe:
    """`prefill`, `decode`: launch lines or scripts. `needs`: whether the plugin is needed, and
    `why`, a part of the plan's reason; None for lines that cannot be read, and why not. `share`: of
    the draft KV, what is wrong without it. `found`: a pattern for each finding. `noted`: one for a
    note. `gpu`: the plan's option."""

    name: str
    prefill: str
    decode: str
    needs: bool | None
    why: str
    share: float | None = 0.0
    found: tuple[str, ...] = ()
    noted: str = ""
    gpu: str | None = None

    def line(self, role: str, folder: Path) -> str:
        """With the role for ROLE, and the models in this folder."""
        text = str(getattr(self, role)).replace("ROLE", role)
        names = "|".join(map(re.escape, CONFIGS))
        return re.sub(rf"(?<= )({names})(?=\s)", rf"{folder}/\1", text)


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
V3X = "--model-path deepseek-ai/DeepSeek-V3"
V31, V32 = (f"{V3X}.{n} {ON}" for n in (1, 2))
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
SERVER = "python3 -m sglang.launch_server --disaggregation-mode ROLE --trust-remote-code"
SERVE = "sglang serve --disaggregation-mode ROLE --trust-remote-code"
LLAMA = "--model-path meta-llama/Llama-3.1-8B-Instruct"
TWO_NODES = "--dist-init-addr ${master_ip}:5000 --nnodes 2 --node-rank 0 --tp-size 16"
GLM_AIR = (
    f"# GLM-4.5 Air\n{SERVER} \\\n  --model-path zai-org/GLM-4.5-Air --tp-size 4 \\\n"
    "  --kv-cache-dtype fp8_e4m3 --attention-backend fa3"
)
K25_EAGLE = (
    f"{SERVER} --model-path moonshotai/Kimi-K2.5 --speculative-num-steps 3 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
)
NEITHER = "no draft KV is moved without a drafter on prefill and decode"
DECODE_ALONE = "no draft KV is moved without a drafter on prefill"
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
          found=("prefill: SGLang .* does not start it: .*only supports pp_size == 1",
                 "prefill: SGLang .* does not start it: Pipeline parallelism currently")),
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
          needs=False, why=DECODE_ALONE),
    _pair("glm-5 drafts on both sides", f"{GLM} {MTP} {ON}", "--tp 4", "--tp 8",
          needs=False, why="the drafter is MLA"),
    # As their authors gave them: SGLang's documentation, tests and issues, and others' recipes.
    _pair("SGLang's documentation, Llama",
          f"{SERVER} {LLAMA} --disaggregation-ib-device mlx5_roce0", "--port 30000",
          "--port 30001 --base-gpu-id 1",
          needs=False, why=NEITHER, noted="prefill: --disaggregation-ib-device mlx5_roce0 depends"),
    _pair("SGLang's documentation, two nodes",
          f"{SERVER} {V3X}.1 --disaggregation-ib-device ${{device_name}} {TWO_NODES} --dp-size 8 "
          "--enable-dp-attention --moe-a2a-backend deepep --mem-fraction-static 0.8",
          "--host ${local_ip}", "--max-running-requests 128",
          needs=False, why=NEITHER, noted=r"as it stands: \$\{device_name\} \$\{master_ip\}:5000"),
    _pair("SGLang's test of different TP sizes",
          f"SGLANG_DISAGG_STAGING_BUFFER=1 {SERVER} {LLAMA}", "--tp 4",
          "--tp 2 --base-gpu-id 4", needs=False, why=NEITHER),
    _pair("sglang#6684", f"{SERVER} {V3X}.1 --tensor-parallel-size 2 --chunked-prefill-size 0 "
          '--disaggregation-ib-device "mlx5_1,mlx5_2,mlx5_3,mlx5_4" --speculative-algo EAGLE '
          "--speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 4",
          "--host 192.168.0.43", "--host 192.168.0.44 --mem-fraction-static 0.6",
          needs=False, why="the drafter is MLA", noted="mlx5_1,mlx5_2,mlx5_3,mlx5_4 depends"),
    _pair("sglang#17212", GLM_AIR,
          "--chunked-prefill-size $((16384 * 4)) \\\n    # --speculative-algo EAGLE", MTP,
          needs=None, why=r"prefill: argument --chunked-prefill-size: invalid int value: '\$\(\("),
    _pair("sglang#17212, computed", GLM_AIR, "--chunked-prefill-size 65536", MTP,
          needs=False, why=DECODE_ALONE, noted="speculation on decode alone"),
    _pair("sglang#13208", f"{SERVER} {V3X}.1 --tp-size 16 --attention-backend ascend --device npu "
          "--quantization w8a8_int8 --disaggregation-transfer-backend ascend --moe-a2a-backend "
          "deepep --enable-dp-attention --speculative-algorithm NEXTN --speculative-num-steps 3 "
          "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
          "--dp-size 2 --deepep-mode normal", "--dp-size 8 --deepep-mode low_latency",
          needs=False, why="the drafter is MLA", noted="what SGLang checks on npu was not checked"),
    _pair("sglang#15665", f"{SERVER} {LLAMA} --tp 4 --preferred-sampling-params "
          '{"temperature":0.7,"top_k":20}', "", "--disable-radix-cache",
          needs=None, why="--preferred-sampling-params: invalid loads value"),
    _pair("sglang#24488", f"nohup env NCCL_IB_HCA=mlx5_0 \\\n {SERVE} --model-path zai-org/GLM-5 "
          "--moe-a2a-backend deepep --disaggregation-ib-device mlx5_0 --tp 16 --dp 16 --nnodes 2 "
          "--node-rank 0 --dist-init-addr 10.255.208.20:5000 --enable-dp-attention "
          "--enable-dp-lm-head", "> prefill.log 2>&1 &", "> decode.log 2>&1 &",
          needs=False, why=NEITHER),
    _pair("sglang#26445", f"{SERVE} --model-path zai-org/GLM-5 --context-length 202752 --tp 16 "
          "--ep 8 --dp 1 --disaggregation-ib-device 'mlx5_bond_0,mlx5_bond_1' --kv-cache-dtype "
          f"bfloat16 {MTP}", "", "--load-balance-method follow_bootstrap_room --enable-hisparse",
          needs=False, why="the drafter is MLA"),
    _pair("sglang#32209", f"{SERVER} --model-path zai-org/GLM-5 --quantization modelopt_fp4 --tp 8 "
          "--moe-runner-backend flashinfer_trtllm", "--dsa-prefill-backend trtllm",
          f"--dp-size 8 --enable-dp-attention --dsa-decode-backend trtllm {MTP}",
          needs=False, why=DECODE_ALONE, noted="speculation on decode alone"),
    _pair("sglang#33411", f"{SERVE} --model-path deepseek-ai/DeepSeek-V4-Flash --tp 4 "
          "--speculative-algorithm DSPARK --moe-runner-backend marlin", "", "--base-gpu-id 4",
          needs=False, why="the drafter is MLA"),
    _pair("sglang#36140", f"{SERVER} --model-path moonshotai/Kimi-K3 --page-size 64 --tp-size 4",
          "", DFLASH, needs=False, why=DECODE_ALONE, noted="speculation on decode alone"),
    _pair("sglang#23945", f"{SERVER} --model-path XiaomiMiMo/MiMo-V2.5 --tp 8 --dp 2 {ON} "
          f"--enable-dp-attention --enable-dp-lm-head {MTP} --enable-multi-layer-eagle", "", "",
          needs=False, why="both sides have attention TP 4",
          found=tuple(f"{side}: --enable-multi-layer-eagle is not supported" for side in ROLES)),
    # An EAGLE3 head under EAGLE, with KV heads and without.
    _pair("sglang#21272", f"{K25_EAGLE} --speculative-algorithm EAGLE "
          "--speculative-draft-model-path lightseekorg/kimi-k2.5-eagle3", "--tp 8",
          "--tp 8 --dp 8 --enable-dp-attention", needs=True, why=FROM_ONE, share=1.0,
          found=tuple(f"{side}: LlamaForCausalLMEagle3 .* EAGLE3, got EAGLE" for side in ROLES)),
    _pair("sglang#25673", f"{K25_EAGLE} --tp 8 --ep 8 --speculative-algo EAGLE "
          "--speculative-draft-model-path lightseekorg/kimi-k2.6-eagle3-mla", "", "",
          needs=False, why="the drafter is MLA",
          found=tuple(f"{side}: Eagle3DeepseekV2ForCausalLM .* EAGLE3, got" for side in ROLES)),
    _pair("sglang#19689", f"{K25_EAGLE} --speculative-algorithm EAGLE3 "
          "--speculative-draft-model-path lightseekorg/kimi-k2.5-eagle3", "--tp-size 8",
          "--tp-size 6", needs=None, why="",
          found=("one divides the other", "decode: expected a number of KV heads")),
    _pair("one prefill server for twelve of decode",
          "export MC_TE_METRIC=true\nexport SGLANG_ENABLE_MIXKV=1\n# export SGLANG_RUST_SERVER=1\n"
          f"{SERVER} {V3X}.1 --attention-backend trtllm_mla --kv-cache-dtype fp8_e4m3 "
          "--moe-runner-backend flashinfer_cutlass --enable-dp-attention --enable-dp-lm-head",
          "--tp-size 4 --dp-size 4 --ep-size 4", "--tp-size 48 --dp-size 48 --ep-size 48",
          needs=False, why=NEITHER, noted="resolved as on a Blackwell GPU"),
    _pair("a wrapper before Python", "MC_GID_INDEX=3 MOONCAKE_PROTOCOL=\"rdma\" "
          f"/opt/run-with-new-libstdc.sh {SERVER} {V3X}.1 --dist-init-addr 10.99.91.39:5000 "
          "--tp-size 16 --nnodes 2 --node-rank 0 --disable-cuda-graph", "", "",
          needs=False, why=NEITHER),
    _pair("Dynamo's guide to speculation", "python3 -m dynamo.sglang --disaggregation-mode ROLE "
          f"--model-path Qwen/Qwen3-8B --page-size 16 --enable-metrics {NIXL} "
          "--speculative-algorithm EAGLE3 --speculative-draft-model-path eagle3 "
          "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5",
          "", "", needs=False, why="both sides have attention TP 1"),
    _pair("InferenceX, Qwen3.5 on MI355X", f"{SERVER} --model-path Qwen/Qwen3.5-397B-A17B "
          f"--attention-backend aiter --disaggregation-transfer-backend mori {MTP}", "--tp-size 4",
          "--tp-size 8", needs=False, why="no rank holds more than one"),
)  # fmt: skip
