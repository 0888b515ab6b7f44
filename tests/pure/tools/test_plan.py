"""The `plan` command with pairs of servers made here, and with launch lines that SGLang resolves.

The shipped drafter has one layer. Its K and V have 4 heads of 16 bfloat16 elements each, which take
64 bytes per token and head. test_recipes.py tests complete launch lines from public recipes.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rig.channel.contacts import contacted

import mixkv_demo
from sglang_mixkv.__main__ import run
from sglang_mixkv.channel.handshake import Target
from sglang_mixkv.config import Config
from sglang_mixkv.draft.layout import heads_on_rank, routes
from sglang_mixkv.engine.releases import SUPPORTED_SGLANG, sglang_version
from sglang_mixkv.tools import plan as tool
from sglang_mixkv.tools import plan_pair, plan_server
from sglang_mixkv.tools.plan_launch import LaunchRow
from sglang_mixkv.tools.plan_model import Facts, Model
from sglang_mixkv.tools.plan_pair import SCHEMA, PairReport, make_plan, need_of
from sglang_mixkv.tools.plan_server import Server, read

MODELS = Path(mixkv_demo.__file__).parent / "models" / "mla"
TARGET, DRAFTER = MODELS / "target", MODELS / "drafter"
SIZES = [(p, d) for p, d in product((1, 2, 4, 8, 16), repeat=2) if not (p % d and d % p)]


newest = sglang_version() == SUPPORTED_SGLANG[-1]


def model(heads: int, layers: int, head_bytes: tuple[int, ...], name: str, kind: str = "") -> Model:
    return Model(Facts(name, kind, heads, head_bytes, "bfloat16"), layers)


def eagle3(heads: int, kind: str = "EAGLE3") -> Model:
    """Return a drafter with one layer and heads of 128, like public ones for Kimi and DeepSeek."""
    return model(heads, 1, (256, 256), "LlamaForCausalLMEagle3", kind)


MLA = model(0, 61, (), "DeepseekV3ForCausalLM")
GQA, WIDE = (model(n, 4, (w,) * 8, "LlamaForCausalLM") for n, w in ((8, 256), (4, 512)))
LATENT = model(0, 1, (), "DeepseekV3ForCausalLMNextN")


def pair(prefill_tp: int, decode_tp: int, heads: int, **changes: Any) -> tuple[Server, Server]:
    fields: dict[str, Any] = {
        "enabled": True, "config": Config(), "gpu": "", "tp_size": 8, "attn_dp_size": 1,
        "dp_size": 1, "pp_size": 1, "dcp_size": 1, "page_size": 16, "kv_cache_dtype": "auto",
        "disaggregation_transfer_backend": "mooncake",
        "disaggregation_enable_kv_checksum": False, "speculative_eagle_topk": 1, "target": MLA,
        "draft": eagle3(heads), "stage": Target(0, 61, layer_ids=False, even=True),
        "sglang": sglang_version(), **changes,
    }  # fmt: skip
    prefill = Server(role="prefill", mode="prefill", attention_tp=prefill_tp, **fields)
    return prefill, replace(prefill, role="decode", mode="decode", attention_tp=decode_tp)


# ---------------------------------------------------------------- whether a pair needs the plugin


def stock_copy(held: list[int], needed: list[int], page: int, backend: str) -> float:
    """Return the share of a prompt's pages that is wrong after SGLang's copy. `held`: the heads of
    the sending prefill rank. `needed`: the heads of the decode rank. A pool has one element per
    head and token, and no request uses its first page."""
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
@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_the_share_is_what_stocks_copy_leaves_wrong(heads: int, page: int, backend: str) -> None:
    for theirs, ours in SIZES:
        changes = {"page_size": page, "disaggregation_transfer_backend": backend}
        need = need_of(*pair(theirs, ours, heads, **changes))
        held = heads_on_rank(heads, theirs, contacted(theirs, ours, ours - 1)[0])
        needed = heads_on_rank(heads, ours, ours - 1)
        if backend == "nixl" and len(held) > len(needed):
            assert (need.needed, need.wrong_share) == (True, None)  # NIXL raises
            continue
        wrong = stock_copy(list(held), list(needed), page, backend)
        assert need.wrong_share == pytest.approx(wrong), (theirs, ours, need)
        assert need.needed == (wrong > 0)


@pytest.mark.parametrize(
    ("sizes", "heads", "target", "reason"),
    [((2, 1), 8, GQA, "by heads exactly"), ((2, 1), 8, WIDE, "by heads exactly"),
     ((8, 1), 8, WIDE, "target rows' length"), ((2, 1), 4, GQA, "target rows' length"),
     ((8, 4), 4, GQA, "target rows' length"), ((8, 16), 8, GQA, "by heads exactly"),
     ((8, 16), 8, WIDE, "target rows' length")],
)  # fmt: skip
def test_whether_it_is_needed_beside_a_target_with_kv_heads(
    sizes: tuple[int, int], heads: int, target: Model, reason: str
) -> None:
    answer = tool.text(make_plan(*pair(*sizes, heads, target=target)))
    is_needed = reason == "target rows' length"
    assert answer.startswith("You need the plugin" if is_needed else "You do not need the plugin")
    assert reason in " ".join(answer.split())


@pytest.mark.parametrize(
    ("sizes", "stores", "changes", "is_needed"),
    [
        ((8, 16), ("", ""), {}, True),
        ((8, 16), ("tag", "tag"), {"target": replace(MLA, hybrid=True)}, True),
        ((8, 16), (None, None), {}, False),
        ((8, 16), ("", None), {}, False),
        ((8, 16), ("tag", "other"), {}, False),
        ((8, 8), ("", ""), {}, False),
        ((8, 16), ("", ""), {"target": GQA}, False),  # draft heads are named as this target's heads
        ((8, 16), ("", ""), {"draft": LATENT}, False),
    ],
)
def test_whether_it_is_needed_for_mooncakes_store(
    sizes: tuple[int, int],
    stores: tuple[str | None, str | None],
    changes: dict[str, Any],
    is_needed: bool,
) -> None:
    """With 8 heads, each rank holds one, so a pair needs the plugin only because of the store. The
    store confuses rank 1 of 8, which holds head 1, with rank 1 of 16, which holds head 0."""
    sides = zip(pair(*sizes, 8, **changes), stores, strict=True)
    need = need_of(*(replace(side, store=store) for side, store in sides))
    assert (need.needed, "Mooncake's store" in need.reason) == (is_needed, is_needed)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
@pytest.mark.parametrize("sizes", [(1, 4), (1, 16), (2, 8), (4, 2), (4, 4)])
def test_whether_it_is_needed_with_dcp(sizes: tuple[int, int], backend: str, hybrid: bool) -> None:
    """With DCP, the verdict is what test_stock.py observes in SGLang's managers."""
    target = replace(MLA, hybrid=hybrid)
    changes = {"target": target, "disaggregation_transfer_backend": backend}
    prefill, decode = pair(*sizes, 16, **changes)
    theirs, ours = sizes
    need = need_of(prefill, replace(decode, dcp_size=2))
    if theirs == ours:
        expected, share = False, 0.0
    elif backend == "nixl" or not hybrid:
        expected, share = True, None
    else:
        expected, share = theirs > ours, max(0, 1 - ours / theirs)
    assert (need.needed, need.wrong_share) == (expected, share), need
    assert ("hang" in need.reason) == (expected and backend == "nixl")


# ---------------------------------------------------------------- figures


def test_ranks_are_read_that_sglang_asks() -> None:
    """`contacted` returns the ranks that SGLang contacts."""
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    for theirs, ours in SIZES:
        for rank in range(ours):
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
            assert [*contacted(theirs, ours, rank)] == info.target_tp_ranks


def test_figures_of_an_eagle3_drafter() -> None:
    """The heads, bytes and ranks of a plan are those that the channel would read."""
    for (theirs, ours), heads in product(SIZES, (1, 2, 8, 32)):
        held = [heads_on_rank(heads, theirs, rank) for rank in contacted(theirs, ours, 0)]
        table = [*filter(None, routes(held, heads_on_rank(heads, ours, 0)))]
        ranks = f"each of {len(table)} prefill ranks" if len(table) > 1 else "one prefill rank"
        size = f"{512 * len(table[0]):,} bytes per token"
        text = tool.text(make_plan(*pair(theirs, ours, heads)))
        assert f"\nreads    {len(table[0])} of the drafter's heads, {size}, from {ranks}\n" in text
    prefill, decode = pair(2, 1, 8)
    small = make_plan(prefill, replace(decode, config=Config(staging_mb=64)))
    assert "256 MiB on each prefill rank, 64 MiB on each decode rank" in tool.text(small)


def test_what_is_not_moved_has_no_figures() -> None:
    """A plan has no figures if the plugin is not needed, or cannot move the draft KV."""
    other, latent = pair(2, 1, 8), {"draft": LATENT}
    for sides in (
        (other[0], replace(other[1], draft=eagle3(4))), pair(2, 1, 8, **latent), pair(3, 2, 6),
        pair(2, 2, 8, enabled=False),
    ):  # fmt: skip
        assert "staging" not in tool.text(make_plan(*sides))
    assert "\nstaging " in tool.text(make_plan(*pair(2, 1, 8, enabled=False)))


@pytest.mark.parametrize(
    ("readers", "staging_mb", "share"),
    [(1, 256, "share 24 slots, which hold 49,176 tokens"), (48, 256, "share 1 slots, which hold"),
     (49, 256, "--mixkv-staging-mb 262 each"), (128, 256, "--mixkv-staging-mb 683 each"),
     (128, 679, "--mixkv-staging-mb 683 each"), (128, 683, "share 1 slots, which hold 2,049 t")],
)  # fmt: skip
def test_a_plan_says_how_servers_share_slots(readers: int, staging_mb: int, share: str) -> None:
    """A plan says how many slots decode ranks share. Each of them reads two ranks per server."""
    prefill, decode = pair(2, 1, 8)
    prefill = replace(prefill, config=Config(staging_mb=staging_mb))
    said = " ".join(tool.text(make_plan(prefill, decode), 1, readers).split())
    ranks = f"{readers} decode ranks read" if readers > 1 else "1 decode rank reads"
    assert f"{ranks} a prefill rank, and a decode rank reads 2 (" in said
    assert share in said
    groups = replace(decode, attn_dp_size=8)
    assert "busy     24 decode ranks" in tool.text(make_plan(prefill, groups), 1, 3)


@pytest.mark.parametrize(
    ("sizes", "heads", "page", "channel", "stock"),
    [
        ((2, 1), 8, 1, 8, 16_384),
        ((2, 1), 8, 64, 8, 256),
        ((1, 4), 16, 16, 4, 1_024),
        ((1, 2), 1 << 16, 4, 0, 4_096),
    ],
)
def test_a_plan_compares_the_descriptors(
    sizes: tuple[int, int], heads: int, page: int, channel: int, stock: int
) -> None:
    """A plan compares the channel's number of descriptors with SGLang's. A slot holds 2,049 tokens
    of 4 heads. In the first two cases, a decode rank reads two prefill ranks."""
    prefill, decode = (replace(side, page_size=page) for side in pair(*sizes, heads))
    plan = make_plan(prefill, decode)
    ranges = f"ranges   {channel} for 8,192 tokens on a decode rank; SGLang's own transfer takes "
    assert f"\n{ranges}up to {stock:,}\n" in tool.text(plan)
    assert tool.whole(plan, 1, 1)["transfer"].chunk == (stock, channel)


# ---------------------------------------------------------------- findings


def plan_with(prefill: dict[str, Any], decode: dict[str, Any], tp: int = 1) -> PairReport:
    sides = zip(pair(2, tp, 8), (prefill, decode), strict=True)
    return make_plan(*(replace(side, **changes) for side, changes in sides))


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ({"page_size": 64}, {}, r"PAIR-03\] --page-size: prefill has 64, decode has 16"),
        ({}, {"kv_cache_dtype": "fp8_e4m3"}, r"PAIR-03\] --kv-cache-dtype: prefill has auto"),
        ({}, {"disaggregation_enable_kv_checksum": True}, "metadata rows differ"),
        ({"pp_size": 2}, {"pp_size": 3}, r"SGLang refuses .*Decode pp size \(3\) should be equal"),
        ({"attn_cp_size": 2}, {"dcp_size": 2}, "SGLang refuses .*requires prefill attention CP=1"),
        ({"stage": Target(0, 61, layer_ids=False, even=True, dcp=8)}, {},
         r"PAIR-03\] --dcp-size: prefill has 8 at attention TP 2, decode has 1 at attention TP 1"),
        ({"speculative_eagle_topk": 4}, {"speculative_eagle_topk": 2}, "--speculative-eagle-topk"),
        ({"dp_size": 2}, {}, "of 2 replicas .* SGLang fails .* Start each as its own"),
        ({"tcp": True, "target": GQA}, {"target": GQA}, "Mooncake's TCP.*Use RDMA"),
        ({"enabled": False}, {}, r"PAIR-01\] --enable-mixkv: only on decode. Set it on both\.$"),
        ({"enabled": False, "attention_tp": 1}, {}, "Set it on both, or on neither"),
        ({"enabled": False}, {"enabled": False}, "on neither side, and the pair needs it"),
        ({"mode": "decode"}, {"mode": "prefill"}, "prefill; got decode. Are the two .* swapped"),
        ({"mode": "decode"}, {"attention_tp": 2}, "prefill; got decode. Both lines have the same"),
        ({"dcp_size": 2, "stage": Target(0, 61, False, True, dcp=2)}, {}, "--dcp-size: prefill"),
        ({"attention_tp": 3}, {"attention_tp": 2}, "one divides the other"),
        ({}, {"attention_tp": 0}, "one divides the other"),
        ({"draft": eagle3(8, "EAGLE")}, {}, "prefill: .*Eagle3 is a drafter for .* not EAGLE"),
        ({"attention_tp": 3}, {"attention_tp": 1}, r"PAIR-04\] prefill: expected a number of KV"),
        ({"draft": eagle3(4)}, {}, "KV heads of the drafter: prefill has 4, decode has 8"),
        ({}, {"draft": None}, "decode has none; its KV cannot be moved"),
        ({"draft": LATENT}, {}, r"drafter: prefill has DeepseekV3ForCausalLMNextN \(MLA"),
        ({"draft": LATENT, "target": GQA}, {"draft": LATENT, "target": GQA}, "an MLA drafter"),
        ({"target": replace(MLA, layers=62)}, {}, r"target: prefill has .*62 layers\), decode has"),
        ({"stock": ("prefill: no",), "page_size": 64}, {"refused": ("decode: neither",)},
         "prefill: no\ndecode: neither\n.*page-size"),
        ({"stock": ("prefill: no",), "page_size": 64, "resolved": False}, {}, "^prefill: no$"),
        ({}, {"target": replace(MLA, facts=replace(MLA.facts, dtype="float16"))},
         r"PAIR-03\] dtype of the target's KV: prefill has bfloat16, decode has float16; its num"),
    ],
)  # fmt: skip
def test_findings(prefill: dict[str, Any], decode: dict[str, Any], reason: str) -> None:
    """Each problem of a pair is a finding. test_facts.py tests other differences of two rows."""
    plan = plan_with(prefill, decode)
    found, text = "\n".join(plan.findings), tool.text(plan)
    assert re.search(reason, found), found
    no_route = any(one in found for one in ("PAIR-04", "when it meets", "--dcp-size"))
    assert no_route == (not plan.need)
    assert text.startswith("Neither stock SGLang nor") == (no_route or "refused" in decode)


@pytest.mark.parametrize("asked", ["requests.post(", "requests.get(url).text and requests.get("])
def test_a_check_of_sglang_that_cannot_run_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """SGLang catches the errors of its request to the prefill server, and would ask again."""
    real, sides = plan_pair._source, pair(2, 2, 8)
    assert [*plan_pair._asked_of_sglang(*sides)] == []
    monkeypatch.setattr(
        plan_pair, "_source", lambda file: real(file).replace("requests.get(", asked)
    )
    (finding,) = plan_pair._asked_of_sglang(*sides)
    assert "makes of a pair does not run in plan: SGLang may refuse this pair" in finding


def test_sglang_is_asked_about_a_pair() -> None:
    """`plan` runs SGLang's own check of a pair. The check covers MiniMax's state since 0.5.23 and
    MXFP8's since 0.5.22. The plugin's own rule covers both states in all releases."""
    for state, own, has in (
        ("minimax_index_k", "MiniMax sparse PD requires matching attention TP sizes", newest),
        ("block_scale", "attention TP sizes with MXFP8 KV", sglang_version() != "0.5.21"),
    ):
        changes = {"target": replace(GQA, states=(state,))}
        asked = [*plan_pair._asked_of_sglang(*pair(4, 8, 8, **changes))]
        assert [own in text for text in asked] == [True] * has, asked
        stage = replace(pair(1, 1, 8)[0].stage, heads=8, states=changes["target"].states)
        plan = make_plan(*pair(4, 8, 8, stage=stage, **changes))
        assert (plan.need, len(plan.findings)) == (None, 1)
        assert "SGLang does not split it by heads" in plan.findings[0]
        assert make_plan(*pair(4, 4, 8, stage=stage, **changes)).findings == ()
    wide, narrow = (replace(MLA, met={"kv_layout": name}) for name in "ab")
    prefill, decode = pair(2, 1, 8)
    plan = make_plan(replace(prefill, target=wide), replace(decode, target=narrow))
    assert [("KV layout mismatch" in text) for text in plan.findings] == [True] * newest
    v41 = {"target": replace(MLA, met={"dsv41_spec_layout": {"num_draft_tokens": 4}})}
    plan = make_plan(*pair(2, 1, 8, **v41))
    assert "DSpark PD requires the same TP size" in plan.findings[0]
    assert [*plan_pair._asked_of_sglang(*pair(2, 2, 8, **v41))] == []
    gqa_dcp = pair(2, 2, 8, target=GQA, dcp_size=2)
    assert "requires an MLA or hybrid-MLA KV pool" in make_plan(*gqa_dcp).findings[0]


def test_what_is_no_finding() -> None:
    """Refusals are findings only if the plugin is enabled or needed. Some differences are notes."""
    for sizes in SIZES:
        assert make_plan(*pair(*sizes, 8)).findings == ()
    cold = {"config": Config(on_draft_mismatch="cold")}
    assert plan_with({"draft": eagle3(4)}, cold).findings == ()
    assert plan_with({"target": GQA}, {"tcp": True, "target": GQA}).findings == ()
    for one, other in ((None, 4), (4, None), (0, 4), (4, 4)):
        topks = ({"speculative_eagle_topk": topk} for topk in (one, other))
        assert plan_with(*topks).findings == ()
    off, on = {"enabled": False, "refused": ("no",)}, {"enabled": True, "refused": ("no",)}
    assert plan_with(off, off, tp=2).findings == ()
    assert plan_with(on, on, tp=2).findings == plan_with(off, off).findings == ("no",)
    for prefill, decode, note in (
        ({"draft": None}, {"draft": LATENT}, "only decode speculates"),
        ({"draft": LATENT}, {"draft": LATENT}, "is of no use here: drop it on both sides"),
        ({}, {"draft": replace(eagle3(8), window=2048)}, "the last 2,048 tokens' draft KV"),
    ):
        plan = plan_with(prefill, decode)
        assert plan.findings == ()
        assert sum(note in text for text in plan.notes) == 1


# ---------------------------------------------------------------- what SGLang makes of a line

of_the_newest = pytest.mark.skipif(not newest, reason="another release has other defaults")


def flags(more: str = "", draft: Path = DRAFTER) -> str:
    return (
        f"--model-path {TARGET} --speculative-algorithm EAGLE3 --enable-mixkv --page-size 16 "
        f"--speculative-draft-model-path {draft} {more}"
    )


ROLE = "--disaggregation-mode"


@pytest.mark.parametrize("on", ["SGLANG_ENABLE_MIXKV=1 x {}", "x {} --enable-mixkv", "x {}"])
def test_a_plugin_that_sglang_leaves_out_is_a_finding(on: str) -> None:
    """SGLang loads only the plugins in SGLANG_PLUGINS, if it is set."""
    line = on.format(flags().replace("--enable-mixkv", ""))
    for names, is_out in (("other,mixkvs", on != "x {}"), ("other, mixkv", False)):
        found = read("decode", f"SGLANG_PLUGINS='{names}' {line}").refused
        assert ("decode: SGLANG_PLUGINS leaves out mixkv" in " ".join(found)) == is_out


def test_a_line_is_what_sglang_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is resolved as SGLang resolves it. The first of two stages has 2 of 5 layers, or the
    number that a variable in the line sets. Variables of this process have no effect."""
    one = read("decode", "python -m sglang.launch_server " + flags("--tp 8 --dp 8 "
               "--enable-dp-attention"))  # fmt: skip
    assert (one.attention_tp, one.attn_dp_size, one.enabled, one.stock) == (1, 8, True, ())
    assert one.facts == Facts("LlamaForCausalLMEagle3", "EAGLE3", 4, (32, 32), "bfloat16")
    assert (one.target.kv_heads, one.target.layers, one.stage.is_mla) == (0, 5, True)
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "3,2")
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    line = f"--model-path {MODELS.parent / 'gqa' / 'target'} --tp 4 --pp-size 2 --attn-cp-size 2"
    found = read("prefill", line)
    assert found.stage == Target(4, 4, layer_ids=False, even=True, stages=2)
    assert (found.attention_tp, found.draft, found.enabled, found.tcp) == (2, None, False, False)
    changed = read("prefill", f"SGLANG_ENABLE_MIXKV=1 SGLANG_PP_LAYER_PARTITION=4,1 x {line}")
    assert (changed.stage.entries, changed.enabled) == (8, True)
    former = read("prefill", f"SGL_PP_LAYER_PARTITION=4,1 x {line}")  # SGLang renames it
    assert former.stage.entries == 8


def test_a_config_file_continuations_and_a_positional_model(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    config = tmp_path / "server.yaml"
    config.write_text("tensor-parallel-size: 4\nenable-mixkv: true\npage-size: 8\n")
    line = f"sglang serve {TARGET} --config {config} \\\n --tokenizer-path x --page-size 32"
    found = read("decode", line)
    assert (found.attention_tp, found.page_size, found.enabled) == (4, 32, True)
    config.write_text("a: [1")
    with pytest.raises(ValueError, match="decode: --config: "):
        read("decode", line)
    with pytest.raises(ValueError, match="takes --config FILE only, and ignores --config=FILE"):
        read("decode", f"sglang serve {TARGET} --config={config}")
    config.write_text(f"one: {{model-path: {TARGET}, tp-size: 4}}\ntwo: {{tp-size: 2}}")
    line = f"dynamo.sglang --disagg-config {config} --disagg-config-key one --dyn-x y --page-size 8"
    found = read("decode", line)
    assert (found.attention_tp, found.page_size, found.stock) == (4, 8, ())
    (stray,) = read("decode", line.replace("--dyn-x y", "--dyn-x y z")).stock
    assert stray.endswith("knows a word that follows no flag")
    with pytest.raises(ValueError, match="three"):
        read("decode", line.replace("one", "three"))


@of_the_newest
@pytest.mark.parametrize(
    ("more", "store"),
    [("", None), ("--hicache-storage-backend file", None),
     ("--hicache-storage-backend mooncake", ""),
     ("--hicache-storage-backend mooncake --hicache-storage-backend-extra-config "
      "'{\"extra_backend_tag\": \"a\"}'", '{"extra_backend_tag": "a"}')],
)  # fmt: skip
def test_a_server_has_the_settings_of_mooncakes_store(more: str, store: str | None) -> None:
    assert read("decode", flags(f"--enable-hierarchical-cache {more}")).store == store


CUTEDSL = "--decode-attention-backend cutedsl_mla --page-size 128"


@pytest.mark.parametrize(
    ("more", "gpu", "kind", "starts"),
    [("", None, "hopper", True), (CUTEDSL, None, "blackwell", True),
     (CUTEDSL, "hopper", "hopper", False),
     (f"{CUTEDSL} --tp 4 --dp 3 --enable-dp-attention", None, "hopper", False)],
)  # fmt: skip
def test_a_line_is_resolved_for_a_gpu_on_which_it_starts(
    more: str, gpu: str | None, kind: str, starts: bool
) -> None:
    """A line is resolved for the given GPU or one on which it starts. The platform is restored."""
    from sglang.srt.runtime_context import get_platform

    found = read("decode", flags(more), gpu=gpu)
    assert (found.gpu, not found.stock) == (kind, starts), found.stock
    assert get_platform().device_sm not in (90, 100)


@of_the_newest
@pytest.mark.parametrize(
    ("line", "shape"),
    [
        ("--speculative-algorithm NEXTN", (0, 1, None, set())),
        ("--speculative-algorithm NGRAM", None),
        ("--speculative-algorithm DSPARK", (4, 3, None, {32})),
        ("--speculative-algorithm DFLASH --speculative-draft-model-path {dflash}",
         (4, 2, None, {32})),
        (flags("--kv-cache-dtype fp8_e4m3"), (4, 1, None, {16})),
        (flags("--kv-cache-dtype fp8_e4m3 --speculative-draft-kv-cache-dtype bfloat16"),
         (4, 1, None, {32})),
        (flags("--speculative-draft-window-size 512 --speculative-draft-attention-backend fa3"),
         (4, 1, 512, {32})),
    ],
)  # fmt: skip
def test_drafters(tmp_path: Path, line: str, shape: Any) -> None:
    """`plan` finds a drafter's heads, layers, window and widths. NEXTN uses layers of the target,
    NGRAM has no drafter, and DSPARK's may be in the target's folder."""
    target, draft = tmp_path / "target", tmp_path / "target" / "dspark"
    draft.mkdir(parents=True)
    (target / "config.json").write_text((TARGET / "config.json").read_text())
    config = json.loads((MODELS / "dspark" / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    found = read("prefill", f"--model-path {target} {line.format(dflash=MODELS / 'dflash')}")
    one = found.draft
    assert found.stock == ()
    assert shape == (one and (one.kv_heads, one.layers, one.window, {*one.facts.head_bytes}))


@pytest.mark.parametrize(
    ("line", "reasons"),
    [
        (flags("--pp-size 2 --enable-hierarchical-cache --disable-radix-cache"),
         ["prefill: SGLang [0-9.]+ does not start it: Pipeline parallelism",
          "hierarchical-cache"]),
        (flags("--tp 4 --dp 3 --enable-dp-attention"), ["prefill: .*tp_size % .*dp_size"]),
        (flags("--use-ray"), [r"\[MIXKV-START-03\] prefill: --use-ray is not supported"]),
        (f"SGLANG_RUST_SERVER=1 x {flags()}", ["SGLANG_RUST_SERVER=1 is not"]),
    ],
)  # fmt: skip
def test_what_does_not_start_is_found(
    monkeypatch: pytest.MonkeyPatch, line: str, reasons: list[str]
) -> None:
    """All reasons why a line does not start are reported, even if one of the checks raises."""
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")  # does not affect lines without this variable
    server = read("prefill", line)
    found = "\n".join((*server.stock, *server.refused))
    assert [bool(re.search(reason, found)) for reason in reasons] == [True] * len(reasons), found
    assert ("RUST" in found) == ("RUST" in line)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (flags("--page-sze 8"), "not know --page-sze; the closest match is --page-size"),
        (flags("--mixkv-stging 8 x --no-such"), "--mixkv-stging --no-such.*--mixkv-staging-mb"),
        (flags("--api-key= sk-1"), "SGLang does not know a word that follows no flag\\.$"),
        (flags("--enable=sk-1"), "ambiguous option: --enable could match"),
        (flags("--tp two"), "argument --tp-size.*invalid int value"),
        ("--model-path 'x", "No closing quotation"),
        (f"SGLANG_ENABLE_MIXKV=maybe x --model-path {TARGET}", "SGLANG_ENABLE_MIXKV .*'maybe'"),
        ("--tp 2", "--model-path is missing"),
        ("prefill.sh", "expected a launch line of SGLang or Dynamo, found none"),
        (f"--model-path {TARGET}-2", "--model-path .*-2: neither a folder .*config.json"),
        (flags(draft=Path("no/such")), "--speculative-draft-model-path no/such: neither"),
    ],
)
def test_what_cannot_be_read(line: str, reason: str) -> None:
    before = dict(os.environ)
    with pytest.raises(ValueError, match=f"decode: .*{reason}"):
        read("decode", line)
    assert dict(os.environ) == before


# ---------------------------------------------------------------- the command


def test_exit_statuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prefill, both = ["--prefill", flags(f"--tp 2 {ROLE} prefill")], tmp_path / "both.sh"
    both.write_text(f"x {flags(f'--tp 2 {ROLE} prefill')}\ny {flags(f'{ROLE} decode')}\n")
    decode = ["--decode", str(both)]
    assert tool.main([*prefill, *decode]) == 0
    assert "\nfindings: none\n" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO(both.read_text()))
    assert tool.main(["--prefill", "-", "--decode", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["need"]["needed"]
    ray = ["--decode", flags(f"--use-ray {ROLE} decode"), "--decode-servers", "3"]
    assert tool.main([*prefill, *ray]) == 1
    found = capsys.readouterr().out
    assert "[MIXKV-START-03] decode: --use-ray is not" in found
    assert "busy     3 decode ranks read a prefill rank" in found
    assert tool.main([*prefill, *ray, "--json"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert (plan["schema"], plan["need"]["wrong_share"], len(plan["findings"])) == (SCHEMA, 1, 1)
    assert tool.main(["--prefill", flags("--tpp 2"), "--decode", "--tp 1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line[:32] for line in err.splitlines()] == [
        "error: [MIXKV-START-04] prefill:", "error: [MIXKV-START-04] decode: ",
    ]  # fmt: skip
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", None)
    plan_server._parser.cache_clear()
    assert tool.main([*prefill, *decode]) == 2
    assert capsys.readouterr().err.count("Run plan in the servers' image") == 1


def test_rows_beside_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is read from a JSON file or a log. An unusable row is explained in one line, and so are
    two rows in one file. A pair of rows is read without importing torch."""
    sides = pair(2, 1, 8, enabled=False)
    rows = [json.dumps(json.loads(msgspec.json.encode(LaunchRow(1, "0.4", side.sglang, side))),
                       separators=(",", ":")) for side in sides]  # fmt: skip
    files = [tmp_path / "prefill.log", tmp_path / "decode.json"]
    files[0].write_text(f"a\n[server] {rows[0]}\nb {{\n")
    files[1].write_text(json.dumps(json.loads(rows[1]), indent=2))
    both = ["--prefill", str(files[0]), "--decode", str(files[1])]
    assert tool.main(both) == 1
    assert "on neither side, and the pair needs it" in capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "sglang_mixkv", "plan", *both],
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, "torch" in done.stderr) == (1, False)
    other = rows[1].replace('"heads":0', '"heads":"0"')
    with monkeypatch.context() as without:  # on a host without SGLang
        without.setitem(sys.modules, "sglang", None)
        without.setattr(plan_pair, "find_spec", lambda name: None)
        without.setattr(plan_pair, "sglang_version", lambda: "none")
        plan_pair._source.cache_clear()
        assert tool.main(both) == 1
        assert "check of a pair was taken from SGLang none" in capsys.readouterr().out
    plan_pair._source.cache_clear()
    for text, words in (
        (rows[1][:-9], "the row is damaged"), (other, "the row is damaged"),
        (rows[1].replace('plan":1', 'plan":2'), "has format 2, of sglang-mixkv 0.4; expected 1"),
        (f"{rows[1]}\n{rows[0]}", "expected one row of SGLANG_MIXKV_PLAN, got 2"),
        ('{"sglang_mixkv_plan":1,"plugin":"0.4","sglang":"1","error":"no model"}',
         "SGLang 1 did not resolve the launch: no model"),
    ):  # fmt: skip
        files[1].write_text(text)
        assert tool.main(both) == 2
        assert (said := capsys.readouterr().err).count("\n") == 1
        assert words in said


def test_json_has_the_sizes_and_what_its_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON has the documented fields, and counts of equal numbers instead of lists."""
    lines = [flags(f"--tp {tp} {ROLE} {role}") for tp, role in ((2, "prefill"), (1, "decode"))]
    words = ["--prefill", lines[0], "--decode", lines[1], "--json", "--decode-servers", "3"]
    assert tool.main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    moved = plan["transfer"]
    assert (moved["readers"], moved["sources"], moved["heads"], moved["ranks"]) == (3, 2, 2, 2)
    assert plan["decode"]["draft"]["facts"]["head_bytes"] == {"32": 2}
    page = (Path(tool.__file__).parents[2] / "docs" / "tools.md").read_text()
    table = page[page.index("`--json` has:") : page.index("## doctor")]
    assert all(f"`{name}`" in table for name in plan), set(plan)
    assert f"| {SCHEMA}; it changes" in table
    ways = page[page.index("There are three ways") : page.index("| exit status")]
    assert len(ways.split()) < 350


def test_a_terminal_is_told_what_plan_waits_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one second, `plan` prints what it waits for, but only on a terminal."""
    monkeypatch.setattr(tool, "_plan", lambda args: time.sleep(1.5))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert tool.main(["--prefill", "", "--decode", ""]) == 2
    assert capsys.readouterr().err == "SGLang is being asked about both lines ...\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    tool.main(["--prefill", "", "--decode", ""])
    assert capsys.readouterr().err == ""


@of_the_newest
def test_one_kind_of_gpu_for_both_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """If one line needs Blackwell, the other line is resolved for Blackwell too, unless it would
    not start there."""
    page = "--page-size 128"
    for more, gpus in ((page, "prefill and decode: resolved for a Blackwell"),
                       (f"{page} --tp 4 --dp 3 --enable-dp-attention",
                        "prefill: resolved for a Hopper")):  # fmt: skip
        tool.main(["--prefill", flags(more), "--decode", flags(CUTEDSL)])
        assert gpus in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["doctor", "--no-seams", "--no-transfer"]])
def test_a_tool_ends_quietly_when_its_reader_has_gone(words: list[str]) -> None:
    """A tool whose output pipe is closed has the exit status that a shell reports for SIGPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "sglang_mixkv", *words]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_tool_that_is_interrupted_has_a_shells_status_for_it() -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert run(interrupted) == 128 + signal.SIGINT
