"""The plan: pairs of servers that are made here, and launch lines that SGLang resolves.

The shipped drafter has one layer, K and V of 4 heads x 16 bfloat16 elements: 64 bytes per token and
head, 256 in all.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import mixkv_demo
from sglang_mixkv.channel.slots import SLOTS
from sglang_mixkv.config import API_KEY_ENV, Config
from sglang_mixkv.draft.layout import heads_on_rank
from sglang_mixkv.draft.targets import Target
from sglang_mixkv.engine.releases import SUPPORTED_SGLANG, sglang_version
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.tools import plan as tool
from sglang_mixkv.tools import plan_gpu, plan_pair, plan_url
from sglang_mixkv.tools.plan_need import need_of
from sglang_mixkv.tools.plan_pair import contacted, make_plan, most_tokens, segments_of
from sglang_mixkv.tools.plan_server import Model, Server, read
from sglang_mixkv.tools.plan_text import text

MODELS = Path(mixkv_demo.__file__).parent / "models" / "mla"
TARGET, DRAFTER = MODELS / "target", MODELS / "drafter"
MLA = Model("kimi", "DeepseekV3ForCausalLM", 0, 61, (), "bfloat16")
GQA = Model("llama", "LlamaForCausalLM", 8, 4, (256,) * 8, "bfloat16")
SIZES = [
    (prefill, decode)
    for prefill, decode in product((1, 2, 4, 8, 16), repeat=2)
    if not (prefill % decode and decode % prefill)
]


def eagle3(heads: int) -> Model:
    """1 layer x `heads` x 128 in bfloat16, as public heads for Kimi and DeepSeek have it."""
    return Model("eagle3", "LlamaForCausalLMEagle3", heads, 1, (256, 256), "bfloat16")


def server(role: str, tp: int, draft: Model | None = None, **changes: Any) -> Server:
    fields: dict[str, Any] = {
        "enabled": True, "config": Config(), "attention_tp": tp, "tp_size": tp, "attn_dp_size": 1,
        "dp_size": 1, "pp_size": 1, "dcp_size": 1, "page_size": 16, "kv_cache_dtype": "auto",
        "chunked_prefill_size": 8192, "disaggregation_transfer_backend": "mooncake",
        "disaggregation_enable_kv_checksum": False, "speculative_algorithm": "EAGLE3",
        "speculative_eagle_topk": 1, "target": MLA, "draft": draft,
        "stage": Target(0, 61, layer_ids=False, even=True), **changes,
    }  # fmt: skip
    return Server(role=role, **fields)


def pair(prefill_tp: int, decode_tp: int, heads: int, **changes: Any) -> tuple[Server, Server]:
    sides = (("prefill", prefill_tp), ("decode", decode_tp))
    prefill, decode = (server(role, tp, eagle3(heads), **changes) for role, tp in sides)
    return prefill, decode


# ---------------------------------------------------------------- whether it is needed


def stock_copy(held: list[int], needed: list[int], page: int, backend: str) -> float:
    """How much is wrong of the pages of a prompt after SGLang's copy: `held`, the heads of the
    prefill rank that sends, and `needed`, those of the decode rank. One letter per head and token;
    a pool's first page is given to no request."""
    pages, src_row, dst_row = 8, page * len(held), page * len(needed)
    pool: list[object] = [None] * (pages * max(src_row, dst_row))
    for at in range(1, pages):
        lies = [(at, token, head) for token in range(page) for head in held]
        start = at * (src_row if backend == "mooncake" else dst_row)
        pool[start : start + src_row] = lies
    right = [(at, t, h) for at in range(1, pages) for t in range(page) for h in needed]
    found = pool[dst_row : pages * dst_row]
    return sum(a != b for a, b in zip(found, right, strict=True)) / len(right)


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
@pytest.mark.parametrize("page", [1, 4, 64])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_the_share_is_what_stocks_copy_leaves_wrong(heads: int, page: int, backend: str) -> None:
    for theirs, ours in SIZES:
        changes = {"page_size": page, "disaggregation_transfer_backend": backend}
        need = need_of(*pair(theirs, ours, heads, **changes))
        assert need is not None
        rank = ours - 1
        held = heads_on_rank(heads, theirs, contacted(theirs, ours, rank)[0])
        needed = heads_on_rank(heads, ours, rank)
        if backend == "nixl" and len(held) > len(needed):
            assert (need.needed, need.wrong_share) == (True, None)  # it raises
            continue
        wrong = stock_copy(list(held), list(needed), page, backend)
        assert need.wrong_share == pytest.approx(wrong), (theirs, ours, need)
        assert need.needed == (wrong > 0)


WIDE = msgspec.structs.replace(GQA, kv_heads=4, head_bytes=(512,) * 8)
HYBRID = msgspec.structs.replace(MLA, hybrid=True)


@pytest.mark.parametrize(
    ("sizes", "heads", "changes", "needed", "reason"),
    [
        ((2, 1), 8, {"target": GQA}, False, "cut by heads"),
        ((2, 1), 8, {"target": WIDE}, False, "cut by heads"),
        ((8, 1), 8, {"target": WIDE}, True, "of another length"),
        ((2, 1), 4, {"target": GQA}, True, "of another length"),
        ((2, 1), 0, {}, False, "MLA"),
        ((1, 2), 8, {"dcp_size": 2}, True, "cuts no heads"),
        ((1, 2), 8, {"dcp_size": 2, "target": HYBRID}, False, "cuts the drafter's heads itself"),
        ((2, 1), 8, {"dcp_size": 2, "target": HYBRID}, True, "needs SGLang sends 4"),
        ((2, 2), 8, {"dcp_size": 2}, False, "both sides have attention TP 2"),
        ((2, 1), 8, {"draft": None}, False, "on prefill and decode"),
    ],
)
def test_whether_it_is_needed(
    sizes: tuple[int, int], heads: int, changes: dict[str, Any], needed: bool, reason: str
) -> None:
    sides = [
        msgspec.structs.replace(server(role, tp, eagle3(heads)), **changes)
        for role, tp in zip(("prefill", "decode"), sizes, strict=True)
    ]
    need = need_of(*sides)
    assert need is not None
    assert need.needed == needed
    assert reason in need.reason
    answer = text(make_plan(*sides)).split("\n\n")[0]
    assert answer.startswith("You need the plugin" if needed else "You do not need the plugin")
    assert ("is wrong" in answer) == bool(need.wrong_share)


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_each_head_is_read_once_from_a_rank_that_sglang_asks(heads: int) -> None:
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    for theirs, ours in SIZES:
        reads = make_plan(*pair(theirs, ours, heads)).reads
        for rank in range(ours):
            own = [one for one in reads if one.decode_rank == rank]
            manager = SimpleNamespace(
                is_mla_backend=True, attn_tp_size=ours, attn_cp_size=1, attn_cp_rank=0, pp_size=1,
                pp_rank=0, kv_args=SimpleNamespace(engine_rank=rank), is_hybrid_mla_backend=False,
                enable_all_cp_ranks_for_transfer=False,
            )  # fmt: skip
            info = SimpleNamespace(
                attn_tp_size=theirs, attn_cp_size=1, pp_size=1, enable_kv_cache_sharding=False,
                enable_dsa_cache_layer_split=False,
            )  # fmt: skip
            CommonKVManager._resolve_rank_mapping(manager, info)
            assert [one.prefill_rank for one in own] == info.target_tp_ranks
            found = [head for one in own for head in one.heads]
            assert found == list(heads_on_rank(heads, ours, rank))
            for one in own:
                held = heads_on_rank(heads, theirs, one.prefill_rank)
                assert set(one.heads) <= set(held)


@pytest.mark.parametrize("chunk", [0, 7, 100, 4096])
@pytest.mark.parametrize("per_slot", [1, 7, 64, 5000])
def test_the_longest_prompt_of_so_many_segments(per_slot: int, chunk: int) -> None:
    for slots in (1, 3, 16):
        longest = most_tokens(slots, per_slot, chunk)
        counts = [segments_of(tokens, per_slot, chunk) for tokens in (longest, longest + 1)]
        assert counts[0] <= slots < counts[1]


def test_figures_of_an_eagle3_drafter_of_8_heads() -> None:
    """2 -> 1: 2 x 256 bytes x 4 heads from each rank; a slot has a page beside its 4 MiB."""
    plan = make_plan(*pair(2, 1, 8))
    assert plan.draft_bytes == {"prefill_rank": 2048, "decode_rank": 4096, "all": 4096}
    assert (plan.slots, plan.slot_bytes) == (SLOTS, (4 << 20) + 4096)
    first, second = plan.reads
    assert (first.heads, second.heads) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (first.tokens_per_slot, first.bytes_per_token) == (2049, 2048)
    # A chunk of 8,192 tokens takes 4 slots of 2,049: 16 slots hold 4 chunks.
    assert first.tokens_at_once == 4 * 8192
    short, _, long, _ = plan.prompts
    assert (short.bytes, short.segments, short.messages) == (1024 * 4096, 2, 2 + 2 * 2)
    assert (long.segments, long.messages) == (2 * 4 * 4, 2 + 2 * 32)
    assert [prompt.at_once for prompt in plan.prompts] == [True, True, True, False]


def test_the_smaller_staging_buffer_counts() -> None:
    prefill, decode = pair(2, 1, 8)
    small = msgspec.structs.replace(decode, config=Config(staging_mb=64))
    assert make_plan(prefill, small).slot_bytes == (1 << 20) + 4096


@pytest.mark.parametrize("sizes", [(1, 8), (8, 1)])
def test_ranks_share_the_slots_of_the_one_that_they_meet(sizes: tuple[int, int]) -> None:
    """Of 64 slots the last 16 are kept for a reader, or a source, that has none."""
    (one, *_) = make_plan(*pair(*sizes, 8)).reads
    assert one.tokens_at_once == most_tokens(48 // 8, one.tokens_per_slot, 8192)


def test_ranks_whose_heads_nobody_needs_are_opened() -> None:
    plan = make_plan(*pair(4, 1, 2))
    assert [one.heads for one in plan.reads] == [(0,), (), (1,), ()]
    assert (plan.prompts[0].segments, plan.prompts[0].messages) == (2, 4 + 2 * 2)


# ---------------------------------------------------------------- findings

LONGER = msgspec.structs.replace(MLA, layers=62)
LATENT = Model("mtp", "DeepseekV3ForCausalLMNextN", 0, 1, (), "bfloat16")
STAGES = Target(8, 4, layer_ids=False, even=True, stages=2)


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ({"page_size": 64}, {}, r"PAIR-07\] --page-size: prefill has 64, decode has 16"),
        ({}, {"kv_cache_dtype": "fp8_e4m3"}, r"PAIR-07\] --kv-cache-dtype: prefill has auto"),
        ({}, {"disaggregation_enable_kv_checksum": True}, "metadata rows differ"),
        ({"pp_size": 2}, {"pp_size": 3}, "SGLang takes 1 or prefill's on decode"),
        ({"enabled": False}, {}, r"PAIR-01\] --enable-mixkv: on one side only"),
        ({"attention_tp": 3}, {"attention_tp": 2}, "one divides the other"),
        ({"attention_tp": 0}, {}, "no multiple of its DP-attention and CP sizes"),
        ({"attention_tp": 3}, {"attention_tp": 1}, "number of KV heads that divides"),
        ({"disaggregation_transfer_backend": "nixl"}, {}, "transfer backend: prefill has nixl"),
        ({"speculative_eagle_topk": 4}, {}, "--speculative-eagle-topk: prefill has 4"),
        ({"speculative_algorithm": "EAGLE"}, {}, "speculative algorithm: prefill has EAGLE"),
        ({"draft": eagle3(4)}, {}, "KV heads of the drafter: prefill has 4, decode has 8"),
        ({}, {"draft": None}, "decode has none; its KV cannot be moved"),
        ({"draft": LATENT}, {}, r"drafter: prefill has DeepseekV3ForCausalLMNextN \(MLA"),
        ({"draft": LATENT, "target": GQA}, {"draft": LATENT, "target": GQA}, "an MLA drafter"),
        ({"target": LONGER}, {}, r"target: prefill has .*62 layers\), decode has .*61 layers"),
        ({"stage": Target(0, 61, layer_ids=False, even=True, dcp=2)}, {}, "DCP on prefill"),
        ({"stage": STAGES, "target": GQA},
         {"stage": Target(8, 10, layer_ids=False, even=True), "target": GQA},
         "pipeline stages of different lengths"),
        ({"stock": ("prefill: no",)}, {"refused": ("decode: neither",)}, "prefill: no"),
    ],
)  # fmt: skip
def test_findings(prefill: dict[str, Any], decode: dict[str, Any], reason: str) -> None:
    sides = zip(pair(2, 1, 8), (prefill, decode), strict=True)
    plan = make_plan(*(msgspec.structs.replace(side, **changes) for side, changes in sides))
    found = "\n".join(plan.findings)
    assert re.search(reason, found), found
    assert text(plan).count("\n  - [MIXKV") == found.count("[MIXKV")


def test_nothing_is_found_in_a_pair_that_fits() -> None:
    for sizes in SIZES:
        assert make_plan(*pair(*sizes, 8)).findings == ()


def test_all_findings_come_at_once() -> None:
    prefill, decode = pair(3, 2, 8, stock=("SGLang says no",), refused=("the plugin says no",))
    changed = msgspec.structs.replace(decode, page_size=1, target=LONGER, draft=eagle3(2))
    assert len(make_plan(prefill, changed).findings) == 4 + 5


def test_the_plugins_refusals_count_where_it_is_asked_for_or_needed() -> None:
    def found(tp: int, enabled: bool | None) -> tuple[str, ...]:
        return make_plan(*pair(2, tp, 8, enabled=enabled, refused=("no",))).findings

    assert found(2, False) == ()
    assert found(2, None) == found(2, True) == found(1, False) == ("no", "no")


def test_different_drafters_are_served_cold_where_decode_has_the_flag() -> None:
    prefill, decode = pair(2, 1, 8)
    other = msgspec.structs.replace(prefill, draft=eagle3(4))
    cold = msgspec.structs.replace(decode, config=Config(on_draft_mismatch="cold"))
    assert make_plan(other, decode).findings
    assert make_plan(other, cold).findings == ()


@pytest.mark.parametrize("draft", [eagle3(8), LATENT])
def test_speculation_on_decode_alone_is_served_and_noted(draft: Model) -> None:
    plan = make_plan(server("prefill", 2), server("decode", 1, draft))
    assert plan.findings == ()
    assert any(note.startswith("speculation on decode alone") for note in plan.notes)


def test_other_names_of_models_are_noted() -> None:
    prefill, decode = pair(2, 1, 8)
    moved = msgspec.structs.replace(MLA, path="/models/kimi/")
    other = msgspec.structs.replace(MLA, path="/models/kimi-k2")
    for target, count in ((moved, 0), (other, 1)):
        notes = make_plan(prefill, msgspec.structs.replace(decode, target=target)).notes
        assert sum("nothing compares their weights" in note for note in notes) == count


# ---------------------------------------------------------------- what SGLang makes of a line


def flags(more: str = "", target: Path = TARGET, draft: Path = DRAFTER) -> str:
    return (
        f"--model-path {target} --speculative-algorithm EAGLE3 --enable-mixkv --page-size 16 "
        f"--speculative-draft-model-path {draft} {more}"
    )


def variant(folder: Path, base: Path, **changes: Any) -> Path:
    """A model folder with a changed config.json and nothing else."""
    folder.mkdir(parents=True)
    config = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


not_0_5_21 = pytest.mark.skipif(sglang_version() == "0.5.21", reason="it has no --attn-dp-size")


@not_0_5_21
def test_a_line_is_what_sglang_makes_of_it() -> None:
    one = read("decode", flags("--tp 8 --dp 8 --enable-dp-attention"))
    other = read("decode", "python -m sglang.launch_server " + flags("--tp 8 --attn-dp-size 8"))
    assert one == other
    assert (one.attention_tp, one.attn_dp_size, one.dp_size, one.stock) == (1, 8, 1, ())
    assert one.draft is not None
    assert (one.draft.kv_heads, one.draft.head_bytes) == (4, (32, 32))
    assert (one.target.kv_heads, one.target.layers, one.stage.is_mla) == (0, 5, True)
    assert one.facts is not None
    assert one.facts.bytes_per_token(4) == 256


def test_sizes_and_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 layers the first of two stages has 2, K and V of each, or as the line's variable says;
    this shell's does not count."""
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "3,2")
    line = f"--model-path {MODELS.parent / 'gqa' / 'target'} --tp 4 --pp-size 2 --attn-cp-size 2"
    found = read("prefill", line)
    assert found.stage == Target(4, 4, layer_ids=False, even=True, stages=2)
    assert (found.attention_tp, found.draft, found.facts) == (2, None, None)
    assert read("prefill", f"SGLANG_PP_LAYER_PARTITION=4,1 x {line}").stage.entries == 8
    assert read("decode", flags("--tp 4 --dp 3 --enable-dp-attention")).attention_tp == 0


def test_a_served_drafter_is_described_as_the_plan_has_it() -> None:
    """By the same calls as a rank (draft_pool.py); the types of KV as its model runner."""
    fp8 = read("prefill", flags("--kv-cache-dtype fp8_e4m3"))
    own = "--kv-cache-dtype fp8_e4m3 --speculative-draft-kv-cache-dtype bfloat16"
    assert fp8.draft is not None
    assert (fp8.draft.head_bytes, fp8.draft.dtype) == ((16, 16), "float8_e4m3fn")
    assert getattr(read("prefill", flags(own)).draft, "head_bytes", None) == (32, 32)


of_the_newest = pytest.mark.skipif(
    sglang_version() != SUPPORTED_SGLANG[-1], reason="another release has other defaults"
)


@pytest.mark.parametrize("gpu", plan_gpu.GPUS)
def test_without_a_gpu_lines_are_resolved_for_one(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a kind that can be named, and nothing stays behind."""
    from sglang.srt.runtime_context import get_platform

    monkeypatch.setattr(plan_gpu, "is_there", lambda: False)
    found = read("decode", flags("--decode-attention-backend cutedsl_mla --page-size 128"), gpu=gpu)
    assert [("Blackwell GPUs" in text) for text in found.stock] == [True] * (gpu == "hopper")
    assert any(f"as on a {gpu.title()} one" in note for note in found.notes)
    assert get_platform().device_sm not in (90, 100)


@of_the_newest
@pytest.mark.parametrize(
    ("line", "kv_heads", "layers"),
    [
        ("--speculative-algorithm NEXTN", 0, 1),
        ("--speculative-algorithm NGRAM", None, None),
        ("--speculative-algorithm DSPARK", 4, 3),
        ("--speculative-algorithm DFLASH --speculative-draft-model-path {dflash}", 4, 2),
    ],
)
def test_drafters(tmp_path: Path, line: str, kv_heads: int | None, layers: int | None) -> None:
    """NEXTN's are layers of the target, NGRAM has none, DSPARK's may lie in the target's folder."""
    target = variant(tmp_path / "target", TARGET)
    variant(target / "dspark", MODELS / "dspark", num_hidden_layers=3)
    line = line.format(dflash=MODELS / "dflash")
    found = read("prefill", f"--model-path {target} {line}")
    assert found.stock == ()
    draft = found.draft
    assert (draft and draft.kv_heads, draft and draft.layers) == (kv_heads, layers)


@pytest.mark.parametrize(
    ("role", "more", "reason"),
    [
        ("prefill", "--pp-size 2", "SGLang [0-9.]+ does not start it: Pipeline parallelism"),
        ("decode", "--tp 4 --dp 3 --enable-dp-attention", "tp_size % .*dp_size"),
        pytest.param(
            "decode",
            "--tp 8 --dp-size 2 --attn-dp-size 8",
            "--dp-size 2 with --attn-dp-size 8",
            marks=not_0_5_21,
        ),
    ],
)
def test_what_sglang_does_not_start_is_found_in_its_words(
    role: str, more: str, reason: str
) -> None:
    (found,) = read(role, flags(more)).stock
    assert re.match(f"{role}: .*{reason}", found)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (flags("--use-ray"), "--use-ray is not supported"),
        (flags("--disaggregation-mode decode"), "two launch lines swapped"),
        (flags("--tp 2 --enable-prefill-cp --cp-strategy zigzag"), "context parallelism"),
        (f"SGLANG_RUST_SERVER=1 x {flags()}", "SGLANG_RUST_SERVER=1 is not"),
    ],
)
def test_what_the_plugin_refuses_is_found(
    monkeypatch: pytest.MonkeyPatch, line: str, reason: str
) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")  # of this shell: no launch line has it
    (found,) = read("prefill", line).refused
    assert found.startswith("[MIXKV-START-03] prefill: ")
    assert reason in found


@pytest.mark.parametrize(("model", "value", "count"), [("mla", 1, 1), ("gqa", 1, 0), ("mla", 0, 0)])
@pytest.mark.parametrize("plugin", ["--enable-mixkv", ""])
def test_sglangs_staging_buffer_with_an_mla_target_is_found_once(
    model: str, value: int, count: int, plugin: str
) -> None:
    """With the plugin or without: SGLang ends such a server itself, only later."""
    target = MODELS.parent / model / "target"
    line = f"SGLANG_DISAGG_STAGING_BUFFER={value} x --model-path {target} {plugin}"
    plan = make_plan(read("prefill", line), read("decode", f"--model-path {target} {plugin}"))
    found = [text for text in plan.findings if "STAGING_BUFFER=1 with an MLA target" in text]
    assert len(found) == count
    assert all(text.startswith("[MIXKV-START-03] prefill: ") for text in found)


@pytest.mark.parametrize("line", [flags("--enable-mixkv"), f"SGLANG_ENABLE_MIXKV=1 x {flags()}"])
def test_who_has_the_plugin(line: str) -> None:
    assert read("prefill", line).enabled
    assert read("prefill", flags().replace("--enable-mixkv", "")).enabled is False


def test_a_config_file_continuations_and_a_positional_model(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    config = tmp_path / "server.yaml"
    config.write_text("tensor-parallel-size: 4\nenable-mixkv: true\npage-size: 8\n")
    line = f"sglang serve {TARGET} --config {config} \\\n --tokenizer-path x --page-size 32"
    found = read("decode", line)
    assert (found.attention_tp, found.page_size, found.enabled) == (4, 32, True)
    assert found.target.path == str(TARGET)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (flags("--page-sze 8"), "unknown flag --page-sze, the nearest is --page-size"),
        (flags("--mixkv-stging 8 x --no-such"), "unknown flag --mixkv-stging, .*--mixkv-staging-mb"
         "; unexpected word 'x'; unknown flag --no-such"),
        ("--modl-path x", "unknown flag --modl-path, the nearest is --model-path"),
        (flags("--tp two"), "argument --tp-size.*invalid int value"),
        (flags("--speculative-algorithm EAGLE9"), "Unknown speculative .*: EAGLE9"),
        ("--model-path 'x", "No closing quotation"),
        ("--config no/such.yaml", "--config: .*no/such.yaml"),
        (f"SGLANG_ENABLE_MIXKV=maybe x --model-path {TARGET}", "SGLANG_ENABLE_MIXKV .*'maybe'"),
        ("--tp 2", "--model-path is missing"),
        ("--model-path no/such", "--model-path no/such: .*the plan downloads nothing"),
        (f"--model-path {TARGET}-2", "--model-path .*-2: neither a folder"),
        (f"--model-path {TARGET.parent}", "models/mla: "),
        (flags(target=Path(__file__)), "test_plan.py: "),
        (flags(draft=Path("no/such")), "--speculative-draft-model-path no/such: .*downloads"),
        (None, "give --{role}, --{role}-url, or both"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(role: str, line: str | None, reason: str) -> None:
    pytest.importorskip("yaml")
    before = dict(os.environ)
    with pytest.raises(ValueError, match=f"{role}: .*{reason.format(role=role)}"):
        read(role, line)
    assert dict(os.environ) == before


# ---------------------------------------------------------------- running servers

INFO: dict[str, Any] = {}


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
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server whose /server_info is SGLang's own, of a resolved record."""
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=str(TARGET), tp_size=8, dp_size=4, enable_dp_attention=True, device="cuda",
        speculative_algorithm="EAGLE3", speculative_draft_model_path=str(DRAFTER),
        disaggregation_mode="prefill", kv_cache_dtype="fp8_e4m3",
    )  # fmt: skip
    args.resolve_once()
    info = {**args.resolved_dict(), "launch_command": "--enable-mixkv --mixkv-staging-mb 64"}
    monkeypatch.setattr(sys.modules[__name__], "INFO", json.loads(json.dumps(info, default=str)))
    with HTTPServer(("127.0.0.1", 0), _Server) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}/"
        made.shutdown()
        thread.join()


def test_a_running_server_is_as_it_answers(url: str) -> None:
    found = read("prefill", None, url)
    assert (found.attention_tp, found.attn_dp_size, found.kv_cache_dtype) == (2, 4, "fp8_e4m3")
    assert (found.enabled, found.config.staging_mb) == (True, 64)
    assert found.draft is not None
    assert found.draft.head_bytes == (16, 16)


def test_flags_beside_a_url_win_over_it(url: str) -> None:
    """A server names its models as it was launched: by a Hub name, or a folder of its own host."""
    INFO.update(model_path="no/such", launch_command=None)
    with pytest.raises(MixKVError, match="Give --model-path FOLDER, beside a URL as well"):
        read("prefill", None, url)
    found = read("prefill", f"--model-path {TARGET} --tp 4", url)
    assert (found.attention_tp, found.target.path) == (1, str(TARGET))
    assert found.enabled is None
    assert any("SGLANG_ENABLE_MIXKV" in note for note in found.notes)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("closed", "no connection. Start the server"),
        ("", "HTTP 401. Put the server's --api-key into SGLANG_MIXKV_API_KEY"),
        ("v1", "HTTP 404. Give the server's own URL"),
        ("other", "no JSON. Give the server's own URL"),
        ("silent", "no answer in time"),
    ],
)
def test_why_a_server_cannot_be_read(
    url: str, path: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_ENV, "right" if path else "wrong")
    monkeypatch.setattr(plan_url, "TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ports = {"closed": 1, "silent": silent.getsockname()[1]}
        address = f"http://127.0.0.1:{ports[path]}" if path in ports else url + path
        with pytest.raises(MixKVError) as found:
            read("decode", None, address)
    page = f"{address.rstrip('/')}/server_info"
    assert str(found.value).startswith(f"[MIXKV-START-04] decode: {page}: {reason}")
    assert "HTTPConnectionPool" not in str(found.value)


# ---------------------------------------------------------------- the command


def test_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    prefill, decode = ["--prefill", flags("--tp 2")], ["--decode", flags()]
    assert tool.main([*prefill, *decode]) == 0
    assert "nothing is refused or goes wrong" in capsys.readouterr().out
    assert tool.main([*prefill, "--decode", flags("--use-ray")]) == 1
    assert "[MIXKV-START-03] decode: --use-ray is not" in capsys.readouterr().out
    assert tool.main(["--prefill", flags("--tpp 2"), "--decode", "--tp 1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line[:32] for line in err.splitlines()] == [
        "error: [MIXKV-START-04] prefill:", "error: [MIXKV-START-04] decode: ",
    ]  # fmt: skip


def test_without_sglang_it_names_the_place_to_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", None)
    assert tool.main(["--prefill", flags(), "--decode", flags()]) == 2
    assert capsys.readouterr().err.count("Run the plan in the servers' image.") == 1


@of_the_newest
def test_json_has_what_the_text_has(capsys: pytest.CaptureFixture[str]) -> None:
    line = flags("--tp 2").replace("--enable-mixkv", "")
    arguments = ["--prefill", line, "--decode", line.replace("--tp 2", "")]
    assert tool.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], list(found)) == (plan_pair.SCHEMA, [
        "schema", "plugin", "sglang", "need", "prefill", "decode", "draft_bytes", "slots",
        "slot_bytes", "reads", "prompts", "findings", "notes",
    ])  # fmt: skip
    assert found["need"]["wrong_share"] == 1
    assert tool.main(arguments) == 0
    out = capsys.readouterr().out
    answer = "Without it 100% of a prompt's draft KV on decode is wrong. Start both sides with"
    assert answer in " ".join(out.split())
    rows = [line.split() for line in out.splitlines()]
    assert ["0", "1", "2..3", "128", "32,799", "65,536"] in rows
    assert "bytes per token: 128 on a prefill rank, 256 on a decode rank, 256 in all" in out


def test_neither_sglang_torch_nor_requests_is_imported_before_a_line_is_read() -> None:
    program = (
        "import sys, sglang_mixkv.tools.plan, sglang_mixkv.tools.doctor\n"
        "print(sorted({'sglang', 'torch', 'mooncake', 'requests', 'zmq'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["plan", "--prefill", flags("--tp 64"), "--decode", flags(), "--json"],
        ["doctor", "--no-seams", "--no-transfer"],
    ],
    ids=["help", "plan", "doctor"],
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
