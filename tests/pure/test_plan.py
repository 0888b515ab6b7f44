"""The plan tool against figures worked out by hand, for the shipped pair and variants of it.

Target: 5 MLA layers of (32 + 16) bfloat16 elements, 96 bytes each, 480 a token. Drafter: one
layer, K and V of 4 heads x 16 bfloat16 elements, 64 bytes per head, 256 per token. 1,000 tokens are
63 pages of 16, so 1,008 tokens travel.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rig.unserved import skip_unserved

from sglang_mixkv import demo
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.tools import plan as tool
from sglang_mixkv.tools import plan_url
from sglang_mixkv.tools.client import API_KEY_ENV
from sglang_mixkv.tools.plan_figures import Load, Plan, Sender, make_plan, stage_layers
from sglang_mixkv.tools.plan_flags import Server, from_line
from sglang_mixkv.tools.plan_resolved import resolved
from sglang_mixkv.tools.plan_svg import svg
from sglang_mixkv.tools.plan_text import text
from sglang_mixkv.tools.plan_url import from_url

MODELS = Path(demo.__file__).parent / "models" / "mla"
TARGET, DRAFTER = MODELS / "target", MODELS / "drafter"


def flags(more: str = "", target: Path = TARGET, draft: Path = DRAFTER) -> str:
    return (
        f"--model-path {target} --speculative-algorithm EAGLE3 --enable-mixkv "
        f"--speculative-draft-model-path {draft} --page-size 16 {more}"
    )


def planned(prefill: str, decode: str, **models: Path) -> Plan:
    return make_plan(
        from_line("prefill", flags(prefill, **models)), from_line("decode", flags(decode, **models))
    )


def variant(folder: Path, base: Path, **changes: Any) -> Path:
    """A model folder with a changed config.json and nothing else."""
    folder.mkdir()
    config = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def who(sender: Sender) -> tuple[int, bool, list[int], bool, bool]:
    """Rank, target, draft heads, aux, dummy."""
    heads = list(sender.draft_heads)
    return (sender.prefill_rank, bool(sender.target_heads), heads, sender.aux, sender.dummy)


# ---------------------------------------------------------------- figures


def test_two_to_one() -> None:
    plan = planned("--tp 2", "--tp 1")
    (rank,) = plan.ranks
    assert [who(s) for s in rank.senders] == [
        (0, True, [0, 1], True, False),
        (1, False, [2, 3], False, False),
    ]
    assert rank.expected_responses == 2
    # 2 draft entries x 1,008 tokens, cut; 5 target entries in one run, or 63 pages each
    assert rank.senders[0].load == Load(480, 128, 2016 + 5, 2016 + 5 * 63)
    assert rank.senders[1].load == Load(0, 128, 2016, 2016)
    assert (plan.total.target_bytes, plan.total.draft_bytes) == (480, 256)
    assert plan.refused == ()


def test_one_to_two() -> None:
    plan = planned("--tp 1", "--tp 2")
    assert [[who(s) for s in rank.senders] for rank in plan.ranks] == [
        [(0, True, [0, 1], True, False)],
        [(0, True, [2, 3], True, False)],
    ]
    assert [rank.expected_responses for rank in plan.ranks] == [1, 1]
    assert [rank.load for rank in plan.ranks] == [Load(480, 128, 2021, 2331)] * 2
    assert plan.total == Load(960, 256, 4042, 4662)


def test_context_parallelism_deals_out_the_target_alone() -> None:
    """Half of the tokens to each of two decode ranks, one range each; the drafter as without."""
    skip_unserved("mooncake", "EAGLE3", dcp_size=2)
    plan, without = planned("--tp 1", "--tp 2 --dcp-size 2"), planned("--tp 1", "--tp 2")
    assert plan.refused == ()
    assert [who(s) for rank in plan.ranks for s in rank.senders] == [
        who(s) for rank in without.ranks for s in rank.senders
    ]
    assert [rank.load for rank in plan.ranks] == [Load(240, 128, 2016 + 2500, 2016 + 2500)] * 2
    equal = planned("--tp 2 --dcp-size 2", "--tp 2 --dcp-size 2")
    assert [rank.load for rank in equal.ranks] == [Load(240, 128, 5 + 2, (5 + 2) * 32)] * 2


def test_context_parallelism_with_sparse_attention_is_refused(tmp_path: Path) -> None:
    target = variant(tmp_path / "target", TARGET, index_topk=64)
    plan = planned("--tp 1", "--tp 2 --dcp-size 2", target=target)
    assert [text for text in plan.refused if "sparse attention (index_topk)" in text]
    assert planned("--tp 1", "--tp 2", target=target).refused == ()


def test_replicated_heads_are_sent_once_and_whole(tmp_path: Path) -> None:
    """4 -> 2 with 2 heads: prefill 0 and 1 hold head 0, and one head is all of a decode row."""
    draft = variant(tmp_path / "draft", DRAFTER, num_key_value_heads=2)
    plan = planned("--tp 4", "--tp 2", draft=draft)
    assert [[who(s) for s in rank.senders] for rank in plan.ranks] == [
        [(0, True, [0], True, False), (1, False, [], False, True)],
        [(2, True, [1], True, False), (3, False, [], False, True)],
    ]
    assert [rank.expected_responses for rank in plan.ranks] == [1, 1]
    assert plan.ranks[0].load == Load(480, 64, 5 + 2, 63 * (5 + 2))


def test_mla_drafter_comes_from_one_rank(tmp_path: Path) -> None:
    draft = variant(
        tmp_path / "draft", DRAFTER, architectures=["Eagle3DeepseekV2ForCausalLM"],
        kv_lora_rank=32, qk_rope_head_dim=16,
    )  # fmt: skip
    plan = planned("--tp 4", "--tp 1", draft=draft)
    (rank,) = plan.ranks
    assert [who(s) for s in rank.senders] == [
        (0, True, [0], True, False),
        *((other, False, [], False, True) for other in (1, 2, 3)),
    ]
    assert rank.load == Load(480, 96, 6, 6 * 63)
    assert plan.draft is not None
    assert plan.draft.kind == "mla"


def test_next_token_layers_of_the_target_are_the_drafter() -> None:
    line = f"--model-path {TARGET} --speculative-algorithm NEXTN --page-size 16 --tp 2"
    plan = make_plan(from_line("prefill", line), from_line("decode", line))
    assert plan.draft is not None
    assert (plan.draft.kind, plan.draft.layers, plan.total.draft_bytes) == ("mla", 1, 2 * 96)


def test_mha_target_is_cut_by_heads(tmp_path: Path) -> None:
    """A target of the drafter's shape with 3 layers: 6 entries, all cut at 2 -> 1."""
    target = variant(tmp_path / "target", DRAFTER, num_hidden_layers=3)
    plan = planned("--tp 2", "--tp 1", target=target)
    senders = plan.ranks[0].senders
    assert [s.target_heads for s in senders] == [(0, 1), (2, 3)]
    assert senders[0].load == Load(3 * 128, 128, 8 * 1008, 8 * 1008)


@pytest.mark.parametrize(
    "spelling",
    ["--dp 8 --enable-dp-attention", "--attn-dp-size 8", "--attn-dp-size 8 --enable-dp-attention"],
)
def test_dp_attention_counts_inside_a_group(spelling: str) -> None:
    plan = planned("--tp 8", f"--tp 8 {spelling}")
    assert plan.decode is not None
    assert (plan.decode.attention_tp, plan.decode.dp_groups, len(plan.ranks)) == (1, 8, 1)
    assert plan.ranks[0].expected_responses == 4  # 4 heads on 8 ranks, 2 ranks hold the same


def test_pipeline_stages_split_the_target() -> None:
    """5 layers over 2 stages: 2 and 3. The last stage has the drafter, and sends aux."""
    plan = planned("--tp 1 --pp-size 2", "--tp 1")
    first, last = plan.ranks[0].senders
    assert (first.load.target_bytes, last.load.target_bytes) == (2 * 96, 3 * 96)
    assert (first.draft_heads, last.draft_heads) == ((), (0, 1, 2, 3))
    assert (first.aux, last.aux) == (False, True)
    assert [stage_layers(61, s, 4) for s in range(4)] == [15, 15, 15, 16]


def test_kv_dtype_sets_the_bytes() -> None:
    plan = planned("--tp 1 --kv-cache-dtype fp8_e4m3", "--tp 1 --kv-cache-dtype fp8_e4m3")
    assert (plan.total.target_bytes, plan.total.draft_bytes) == (240, 128)


def test_draft_kv_dtype_of_its_own() -> None:
    more = "--kv-cache-dtype fp8_e4m3 --speculative-draft-kv-cache-dtype bfloat16"
    plan = planned(more, more)
    assert (plan.total.target_bytes, plan.total.draft_bytes) == (240, 256)


# ---------------------------------------------------------------- what the target decides

DSA = {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 64}
V4 = {"architectures": ["DeepseekV4ForCausalLM"]}


def both(target: Path, prefill: str, decode: str = "") -> tuple[Server, Server, list[str]]:
    """Without a drafter."""
    lines = [f"--model-path {target} {more}" for more in (prefill, decode)]
    return resolved(from_line("prefill", lines[0]), from_line("decode", lines[1]))


@pytest.mark.parametrize(
    ("prefill", "decode", "dtype", "open_points"),
    [
        ("bf16", "bfloat16", "bfloat16", 0),
        ("auto", "bf16", "bfloat16", 1),
        ("fp8_e4m3", "auto", "fp8_e4m3", 1),
        ("auto", "auto", "bfloat16", 2),
    ],
)
def test_kv_dtype_of_sparse_attention(
    tmp_path: Path, prefill: str, decode: str, dtype: str, open_points: int
) -> None:
    target = variant(tmp_path / "target", TARGET, **DSA)
    lines = (f"--kv-cache-dtype {prefill}", f"--kv-cache-dtype {decode}")
    plan = planned(*lines, target=target)
    assert plan.refused == ()
    assert (plan.target.dtype, len(plan.ranks)) == (dtype, 1)
    assert sum("--kv-cache-dtype auto" in point for point in plan.unknown) == open_points


@pytest.mark.parametrize(("model", "dtypes"), [
    (DSA, ("bf16", "fp8_e4m3")),
    ({**DSA, "learnable_sink": True}, ("auto", "fp8_e4m3")),
    (V4, ("auto", "bfloat16")),
    ({}, ("bf16", "bfloat16")),
    ({}, ("auto", "bfloat16")),
])  # fmt: skip
def test_kv_dtypes_that_differ_in_any_case(
    tmp_path: Path, model: dict[str, Any], dtypes: tuple[str, str]
) -> None:
    target = variant(tmp_path / "target", TARGET, **model)
    plan = planned(*(f"--kv-cache-dtype {dtype}" for dtype in dtypes), target=target)
    assert any("KV cache dtype: prefill has" in reason for reason in plan.refused), plan.refused


@pytest.mark.parametrize(
    ("quantization", "doubtful"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, True),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, True),
        ({"kv_cache_scheme": None}, False),
        ({"quantization": {"kv_cache_quant_algo": None}}, False),
        ({"quant_method": "fp8"}, False),
        (None, False),
    ],
)
def test_a_checkpoint_that_may_quantize_kv_is_a_doubt(
    tmp_path: Path, quantization: dict[str, Any] | None, doubtful: bool
) -> None:
    target = variant(tmp_path / "target", TARGET, quantization_config=quantization)
    unknown = planned("", "", target=target).unknown
    assert any("may ask for a quantized KV cache" in point for point in unknown) == doubtful


def test_a_running_servers_kv_dtype_decides_for_sparse_attention(tmp_path: Path) -> None:
    target = variant(tmp_path / "target", TARGET, **DSA)
    said = {**INFO, "model_path": str(target), "kv_cache_dtype": "fp8_e4m3", "page_size": 64}
    plan = make_plan(
        from_line("prefill", "", said), from_line("decode", flags("--tp 1", target=target))
    )
    assert (plan.refused, plan.target.dtype) == ((), "fp8_e4m3")


@pytest.mark.parametrize(("model", "line", "page_size"), [
    (DSA, "", 64),
    (DSA, "--page-size 16", 64),
    ({**DSA, "index_kpool": 4}, "--page-size 64", 256),
    (V4, "--page-size 64", 256),
    ({}, "--page-size 16", 16),
    ({}, "", None),
])  # fmt: skip
def test_page_size_that_a_target_forces(
    tmp_path: Path, model: dict[str, Any], line: str, page_size: int | None
) -> None:
    target = variant(tmp_path / "target", TARGET, **model)
    server, _, _ = both(target, line)
    assert server.page_size == page_size


PREFILL_CP = "--tp 8 --enable-prefill-cp --cp-strategy"


@pytest.mark.parametrize(("model", "line", "sizes"), [
    ({}, f"{PREFILL_CP} zigzag", (1, 8, 1)),
    ({}, f"{PREFILL_CP} zigzag --attn-cp-size 2", (1, 8, 1)),
    ({}, f"{PREFILL_CP} zigzag --attn-dp-size 2", (2, 4, 1)),
    ({}, f"{PREFILL_CP} zigzag --dp-size 2", (2, 4, 1)),
    ({}, f"{PREFILL_CP} zigzag --dp-size 2 --enable-dp-attention", (2, 4, 1)),
    (DSA, f"{PREFILL_CP} zigzag --attn-cp-size 2", (1, 8, 1)),
    (DSA, f"{PREFILL_CP} interleave --attn-cp-size 2", (1, 2, 4)),
    (V4, f"{PREFILL_CP} interleave", (1, 8, 1)),
    ({"architectures": ["LlamaForCausalLM"]}, f"{PREFILL_CP} zigzag", (1, 1, 8)),
    ({}, "--tp 8 --attn-cp-size 2", (1, 2, 4)),
])  # fmt: skip
def test_sizes_with_prefill_context_parallelism(
    tmp_path: Path, model: dict[str, Any], line: str, sizes: tuple[int, int, int]
) -> None:
    """DP-attention groups, CP size, attention TP."""
    target = variant(tmp_path / "target", TARGET, **model)
    server, _, _ = both(target, line)
    assert (server.dp_groups, server.args.attn_cp_size, server.attention_tp) == sizes
    assert server.replicas == 1


@pytest.mark.parametrize("sizes", ["--attn-dp-size 0", "--attn-dp-size 3", "--tp 0"])
def test_sizes_that_context_parallelism_cannot_split(sizes: str) -> None:
    plan = planned(f"{PREFILL_CP} zigzag {sizes}", "")
    assert any("DP-attention and CP sizes divide" in reason for reason in plan.refused)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ("--tp 3", "--tp 2", "one divides the other"),
        ("--tp 3", "--tp 1", "number of KV heads that divides"),
        ("--tp 4 --dp 3 --enable-dp-attention", "--tp 2", "DP-attention and CP sizes divide"),
        ("--tp 4 --attn-dp-size 3", "--tp 2", "Change --tp-size or --attn-dp-size"),
        ("--tp 2", "--page-size 64", "page size: prefill has 16, decode has 64"),
        ("", "--kv-cache-dtype fp8_e4m3", "KV cache dtype: prefill has auto"),
        ("", "--speculative-algorithm NONE", "drafter KV: prefill has some, decode has none"),
        ("--use-ray", "", "prefill: --use-ray is not supported"),
        ("--tp 2 --enable-prefill-cp", "", "prefill: attention context parallelism (--attn-cp"),
        ("--disaggregation-transfer-backend mori", "", "other than mooncake and nixl is not"),
        ("--disaggregation-mode decode", "", "two launch lines swapped"),
        ("--pp-size 2", "--pp-size 3", "--pp-size: expected 1 or the prefill's 2"),
        ("", "--disaggregation-enable-kv-checksum", "on one side only"),
        (
            "",
            "--mixkv-on-draft-mismatch cold --disaggregation-decode-enable-radix-cache",
            "would become a prefix that other requests share",
        ),
        ("--hicache-storage-backend file", "", "--hicache-storage-backend with a drafter is not"),
        ("", "--tp 2 --dcp-size 2 --disaggregation-transfer-backend nixl", "a drafter over NIXL"),
        ("--tp 2 --dcp-size 2", "--tp 2", "--dcp-size 1 on prefill, or decode's 1"),
        ("--tp 4 --dcp-size 2", "--tp 2 --dcp-size 2", "equal attention-TP sizes with --dcp-size"),
        ("--speculative-eagle-topk 4", "--speculative-eagle-topk 1", "speculative top-k"),
    ],
)
def test_refused(prefill: str, decode: str, reason: str) -> None:
    plan = planned(prefill, decode)
    assert [text for text in plan.refused if reason in text], plan.refused


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ("--speculative-algorithm DFLASH --pp-size 2", "", "prefill with DFLASH: SGLang 0.5.23"),
        ("--pp-size 2", "", "--pp-size above 1 goes with EAGLE and DSPARK"),
        ("", "--speculative-algorithm DSPARK --pp-size 2", "decode with DSPARK: SGLang 0.5.23"),
        ("--speculative-algorithm dspark --pp-size 2", "", ""),
        ("", "--speculative-algorithm EAGLE --pp-size 2", "decode with EAGLE: SGLang 0.5.23"),
        ("--speculative-algorithm NEXTN --pp-size 2", "--pp-size 2", "decode with EAGLE3: SGLang"),
        ("", "--speculative-algorithm DFLASH --disaggregation-decode-enable-radix-cache",
         "--disaggregation-decode-enable-radix-cache goes with"),
        ("", "--speculative-algorithm DSPARK --disaggregation-decode-enable-radix-cache", ""),
        ("", "--tp 2 --attn-dp-size 2 --speculative-algorithm DSPARK", "--enable-dp-lm-head"),
        ("", "--tp 2 --attn-dp-size 2 --speculative-algorithm DFLASH --enable-dp-lm-head", ""),
        ("--speculative-algorithm DFLASH --speculative-dflash-block-size 8 "
         "--speculative-num-draft-tokens 16", "", "--speculative-num-draft-tokens differ"),
        ("--speculative-algorithm DFLASH --speculative-dflash-block-size 8", "", ""),
        ("--speculative-algorithm DSPARK --speculative-dspark-block-size 7", "", ""),
        ("", "--tp 8 --dp-size 2 --attn-dp-size 8", "--dp-size above 1 does not go with"),
        ("", "--tp 8 --dp-size 2 --attn-dp-size 8 --enable-dp-attention", "Drop --dp-size"),
        ("", "--tp 8 --dp-size 8 --enable-dp-attention", ""),
        ("--tp 8 --dp-size 2", "", ""),
    ],
)  # fmt: skip
def test_what_sglang_refuses_is_refused_in_its_words(
    prefill: str, decode: str, reason: str
) -> None:
    found = [text for text in planned(prefill, decode).refused if "does not start it" in text]
    assert len(found) == bool(reason), found
    assert reason in "".join(found)


BLOCK = "--speculative-algorithm {} --page-size 16 --enable-mixkv --model-path {} --tp {}"


def of_dspark(tp: int, target: Path, more: str = "") -> Any:
    return from_line("prefill" if tp > 1 else "decode", BLOCK.format("DSPARK", target, tp) + more)


@pytest.mark.parametrize("layers", [3, 5])
def test_a_dspark_drafter_in_a_folder_of_the_targets(tmp_path: Path, layers: int) -> None:
    skip_unserved("mooncake", "DSPARK")
    target = variant(tmp_path / "target", TARGET)
    changed = {"architectures": ["Qwen3DSparkModel"], "num_hidden_layers": layers}
    variant(target / "dspark", DRAFTER, **changed)
    plan = make_plan(of_dspark(2, target), of_dspark(1, target))
    assert plan.refused == ()
    assert plan.draft is not None
    assert (plan.draft.architecture, plan.draft.layers) == ("Qwen3DSparkModel", layers)
    assert plan.total.draft_bytes == layers * 256


def test_a_bundled_dspark_drafter_is_left_to_sglang(tmp_path: Path) -> None:
    """DeepSeek-V4's: state, no entries of KV."""
    skip_unserved("mooncake", "DSPARK")
    bundled = variant(tmp_path / "bundled", TARGET, dspark_block_size=5)
    plan = make_plan(of_dspark(2, bundled), of_dspark(1, bundled))
    assert (plan.refused, plan.draft) == ((), None)
    assert any("inside the target's checkpoint" in point for point in plan.unknown)
    with pytest.raises(MixKVError, match="holds no DSPARK drafter"):
        make_plan(of_dspark(2, TARGET), of_dspark(1, TARGET))


def test_one_sided_opt_in_is_refused() -> None:
    prefill = from_line("prefill", flags())
    plain = flags().replace("--enable-mixkv", "")
    assert any(
        "--enable-mixkv" in r for r in make_plan(prefill, from_line("decode", plain)).refused
    )
    by_environment = from_line("decode", f"env SGLANG_ENABLE_MIXKV=1 python -m x {plain}")
    assert make_plan(prefill, by_environment).refused == ()


def test_environment_on_the_line_is_checked() -> None:
    line = f"SGLANG_DISAGG_STAGING_BUFFER=1 python -m sglang.launch_server {flags()}"
    plan = make_plan(from_line("prefill", line), from_line("decode", flags()))
    (refusal,) = plan.refused
    assert refusal.startswith("[MIXKV-START-03] prefill: SGLANG_DISAGG_STAGING_BUFFER=1 is not")


def test_different_drafters_are_refused(tmp_path: Path) -> None:
    other = variant(tmp_path / "draft", DRAFTER, head_dim=32)
    plan = make_plan(from_line("prefill", flags()), from_line("decode", flags(draft=other)))
    assert any("bytes per token and head" in reason for reason in plan.refused)
    assert plan.ranks == ()


# ---------------------------------------------------------------- what it reads


def test_aliases_continuations_and_config_file(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    config = tmp_path / "server.yaml"
    config.write_text("tensor-parallel-size: 4\nenable-dp-attention: true\npage-size: 8\n")
    line = f"sglang serve --config {config} \\\n --model {TARGET} --data-parallel-size 2 \\\n"
    server = from_line("decode", line + "--page-size 32 --speculative-algo EAGLE3 --unknown 3")
    assert (server.attention_tp, server.page_size, server.has_drafter) == (2, 32, True)
    assert server.args.model_path == str(TARGET)


def test_attention_context_parallelism_shrinks_attention_tp() -> None:
    assert from_line("prefill", "--tp 8 --attn-cp-size 2").attention_tp == 4


@pytest.mark.parametrize("line", ["", "--disaggregation-transfer-backend mooncake"])
def test_mooncake_tcp_is_mooncake(line: str) -> None:
    over_tcp = "--disaggregation-transfer-backend mooncake_tcp"
    assert planned(over_tcp, line).refused == planned(line, over_tcp).refused == ()


@pytest.mark.parametrize(
    ("line", "page_size"),
    [
        ("--attention-backend fa3", None),
        ("--attention-backend flashmla --page-size 1", 64),
        ("--prefill-attention-backend flashmla --page-size 1", 1),
        ("--attention-backend trtllm_mla --page-size 32", 32),
        ("--decode-attention-backend trtllm_mla --page-size 16", 64),
        ("--prefill-attention-backend trtllm_mla --page-size 16", 16),
        ("--attention-backend tokenspeed_mla", 64),
        ("--decode-attention-backend cutedsl_mla --page-size 128", 64),
        ("--attention-backend trtllm_mha --page-size 128", 128),
        ("--prefill-attention-backend trtllm_mha --page-size 1", 64),
        ("--speculative-draft-attention-backend trtllm_mha --page-size 1", 64),
        ("--attention-backend hpc_ops --page-size 32", 64),
        ("--attention-backend trtllm_mla --decode-attention-backend flashmla --page-size 32", 64),
    ],
)
def test_page_size_that_a_backend_forces(line: str, page_size: int | None) -> None:
    assert from_line("decode", line).page_size == page_size


def test_what_it_cannot_know_is_said() -> None:
    line = f"--model-path {TARGET} --speculative-algorithm EAGLE3 " + (
        f"--speculative-draft-model-path {DRAFTER}"
    )
    plan = make_plan(from_line("prefill", line), from_line("decode", line))
    assert sum("no --page-size" in point for point in plan.unknown) == 2
    assert sum("--enable-mixkv is not set" in point for point in plan.unknown) == 2
    assert not any("no --page-size" in point for point in planned("", "").unknown)


def test_a_model_that_is_no_folder_ends_the_tool(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--model-path no/such-model"
    assert tool.main(["--prefill", line, "--decode", line]) == 2
    assert "local folder" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--tp two", r"\[MIXKV-START-04\] {role}: launch line: argument --tp"),
        ("--model-path 'x", "{role}: launch line: No closing quotation"),
        ("--config no/such.yaml", "{role}: --config: .*no/such.yaml"),
        ("SGLANG_ENABLE_MIXKV=maybe x", "{role}: .*SGLANG_ENABLE_MIXKV='maybe'"),
        ("SGLANG_MIXKV_VERIFY=maybe " + flags(), "{role}: .*SGLANG_MIXKV_VERIFY='maybe'"),
        ("--tp 2", "{role}: --model-path is missing"),
        ("--model-path hub/name", "beside a URL as --{role} '--model-path FOLDER'"),
        (flags(draft=Path("hub/name")), "as --{role} '--speculative-draft-model-path FOLDER'"),
        (flags("--kv-cache-dtype mxfp8"), "{role}: expected a KV cache dtype among"),
    ],
)
def test_an_error_names_its_launch_line(role: str, line: str, told: str) -> None:
    pytest.importorskip("yaml")
    lines = {"prefill": flags(), "decode": flags(), role: line}
    with pytest.raises(ValueError, match=told.format(role=role)):
        make_plan(*(from_line(name, words) for name, words in lines.items()))


INFO = {
    "tp_size": 2, "dp_size": 1, "pp_size": 1, "page_size": 16, "model_path": str(TARGET),
    "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(DRAFTER),
    "disaggregation_mode": "prefill", "speculative_eagle_topk": 1, "kv_cache_dtype": "auto",
    "launch_command": "python -m sglang.launch_server --enable-mixkv",
}  # fmt: skip


class _Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"no JSON" if self.path.startswith("/other") else json.dumps(INFO).encode()
        known = self.path == "/server_info" or body == b"no JSON"
        key = self.headers["Authorization"] in (None, "Bearer right")
        self.send_response((200 if known else 404) if key else 401)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_a_running_server_is_read(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--prefill-url", url, "--decode", flags("--tp 1"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prefill"]["attention_tp"] == 2


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("closed", "no connection. Start the server"),
        ("", "HTTP 401: it asks for a key. Put that of --api-key into SGLANG_MIXKV_API_KEY"),
        ("v1", "expected HTTP 200; got 404"),
        ("other", "expected JSON; got something else"),
    ],
)
def test_why_a_server_cannot_be_read(
    url: str, path: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_ENV, "right" if path else "wrong")
    address = "http://127.0.0.1:1" if path == "closed" else url + path
    with pytest.raises(MixKVError) as found:
        from_url("decode", address)
    page = f"{address.rstrip('/')}/server_info"
    assert str(found.value).startswith(f"[MIXKV-START-04] decode: {page}: {told}")
    assert "HTTPConnectionPool" not in str(found.value)


def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_url, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(MixKVError, match=r"no answer within 0\.1 s"):
            from_url("decode", address)


def test_flags_beside_a_url_win_over_it(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server names its models as it was launched: by a Hub id, or a folder of its own host."""
    monkeypatch.setitem(INFO, "model_path", "moonshotai/Kimi-K2-Instruct")
    both = ["--prefill-url", url, "--decode", flags("--tp 1")]
    assert tool.main(both) == 2
    assert "--prefill '--model-path FOLDER'" in capsys.readouterr().err.replace("\n", " ")
    assert tool.main([*both, "--prefill", f"--model-path {TARGET}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prefill"]["attention_tp"] == 2
    assert tool.main(["--decode", flags("--tp 1")]) == 2


def test_a_running_servers_dp_attention_is_the_resolved_one() -> None:
    """SGLang moves the deprecated --dp-size to attn_dp_size, and reports the flag beside it."""
    resolved = {**INFO, "tp_size": 8, "attn_dp_size": 4, "enable_dp_attention": True}
    server = from_line("decode", "", resolved)
    assert (server.dp_groups, server.attention_tp) == (4, 2)


def test_a_server_that_does_not_say_leaves_it_open() -> None:
    server = from_line("prefill", "", {**INFO, "launch_command": None})
    assert server.enabled is None
    plan = make_plan(server, from_line("decode", flags("--tp 1")))
    assert plan.refused == ()
    assert any("SGLANG_ENABLE_MIXKV" in point for point in plan.unknown)


def test_neither_sglang_torch_nor_requests_is_imported() -> None:
    program = (
        "import sys, sglang_mixkv.tools.plan, sglang_mixkv.tools.doctor\n"
        "print(sorted({'sglang', 'torch', 'mooncake', 'requests'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True)
    assert done.stdout == "[]\n", done.stderr


# ---------------------------------------------------------------- what it prints


def test_json_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--prefill", flags("--tp 2"), "--decode", flags(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    assert set(found) == {
        "schema", "plugin", "prefill", "decode", "target", "draft", "page_size", "ranks", "total",
        "refused", "unknown",
    }  # fmt: skip
    load = {"target_bytes", "draft_bytes", "descriptors_one_run", "descriptors_scattered"}
    assert set(found["total"]) == load
    rank = found["ranks"][0]
    assert set(rank) == {"decode_rank", "decode_stage", "expected_responses", "senders"}
    assert set(rank["senders"][0]) == {
        "prefill_rank", "stage", "dummy", "target_heads", "draft_heads", "aux", "state", "load",
    }  # fmt: skip
    assert set(found["draft"]) == {
        "architecture", "kind", "kv_heads", "layers", "dtype", "row_bytes",
    }  # fmt: skip


def test_text_has_every_sender_and_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prefill", flags("--tp 2"), "--decode", flags("--use-ray")]
    assert tool.main(arguments) == 1
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["0", "0", "latent", "0..1", "yes", "-", "480", "128", "2,021", "to", "2,331"] in rows
    assert ["0", "1", "-", "2..3", "-", "-", "0", "128", "2,016"] in rows
    assert "  - [MIXKV-START-03] decode: --use-ray is not supported: start without Ray" in out


def test_text_without_ranks_names_the_reason() -> None:
    assert "one divides the other" in text(planned("--tp 3", "--tp 2"))


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["plan", "--prefill", flags("--tp 2"), "--decode", flags()],
        ["plan", "--prefill", flags("--tp 64"), "--decode", flags(), "--json"],
        ["doctor", "--no-seams", "--no-transfer"],
    ],
    ids=["help", "plan", "long", "doctor"],
)
def test_a_tool_ends_quietly_when_its_reader_has_gone(words: list[str]) -> None:
    """With the status that a shell gives one that SIGPIPE ended. Output of any length."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "sglang_mixkv", *words]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_svg_has_a_box_a_rank_and_greys_dummies(tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    lines = ["--prefill", flags("--tp 8"), "--decode", flags("--tp 2")]
    assert tool.main([*lines, "--svg", str(file)]) == 0
    space = "{http://www.w3.org/2000/svg}"
    root = ET.parse(file).getroot()
    kinds = [group.get("class") for group in root.iter(f"{space}g")]
    assert len(list(root.iter(f"{space}rect"))) == 8 + 2
    assert (kinds.count("sent"), kinds.count("dummy")) == (4, 4)
    words = [part.text for part in root.iter(f"{space}text")]
    assert {"draft 0", "draft 1", "draft 2", "draft 3"} <= set(words)


def test_svg_of_a_refused_pair_is_a_sentence() -> None:
    picture = svg(planned("--tp 3", "--tp 2"))
    ET.fromstring(picture)
    assert "refused: " in picture
