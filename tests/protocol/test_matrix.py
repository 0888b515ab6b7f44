"""Every byte of every decode buffer is correct for all attention-TP pairs, head counts and kinds of
targets."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from rig.ring.model import Cache, Case, Request
from rig.ring.run import Outcome, Servers, right, run, start
from rig.ring.special import Special

from mixkv_demo.ports import free_port

pytestmark = pytest.mark.transports(2, tcp=True)
few = pytest.mark.transports(1)  # each value once

SIZES = (1, 2, 4, 8)
DRAFTS = {
    "gqa1": Cache("mha", heads=1, k_bytes=6, v_bytes=10),
    "gqa2": Cache("mha", heads=2),
    "gqa4": Cache("mha", heads=4, layers=2, k_bytes=4, v_bytes=4),
    "gqa8": Cache("mha", heads=8, k_bytes=4, v_bytes=2),
    "DSPARK": Cache("mha", layers=5, heads=16, k_bytes=4, v_bytes=4),  # Kimi-K3's
    "DFLASH": Cache("mha", layers=6, heads=8, k_bytes=4, v_bytes=4),  # Kimi-K2's
}
REQUESTS = (
    Request(23, chunk_pages=2),
    Request(8, chunk_pages=1),
    Request(1),
    Request(12, prefix_pages=2),
)
SHAPES = [(1, 2), (2, 1), (2, 2)]


def with_drafter(draft: str) -> dict[str, Any]:
    return {"draft": DRAFTS[draft], "algorithm": draft if draft.isupper() else "EAGLE3"}


@pytest.mark.parametrize("draft", ["gqa1", "gqa4", "gqa8", "DSPARK"])
@pytest.mark.parametrize("prefill_tp", SIZES)
@pytest.mark.parametrize("decode_tp", SIZES)
def test_every_byte(prefill_tp: int, decode_tp: int, draft: str) -> None:
    seed = prefill_tp * 100 + decode_tp
    right(Case(prefill_tp, decode_tp, requests=REQUESTS, seed=seed, **with_drafter(draft)))


GQA = Cache("mha", layers=4, heads=4, k_bytes=4, v_bytes=4)
MLA = Cache("mla", layers=4)
# Hybrid pools publish layer ids, and have linear-attention state that is split by TP rank. Each
# pipeline stage sends its layers; the last one also sends the drafter and the metadata row.
TARGETS: dict[str, dict[str, Any]] = {
    "gqa": {"target": GQA, **with_drafter("gqa8")},
    "gqa, block drafter": {"target": GQA, **with_drafter("DFLASH")},
    "gqa, stages": {"target": GQA, "prefill_pp": 2, **with_drafter("gqa4")},
    "gqa, hybrid": {"target": GQA, "hybrid": True, **with_drafter("gqa2")},
    "gqa, hybrid stages": {"target": GQA, "hybrid": True, "prefill_pp": 2, **with_drafter("gqa1")},
    # Sliding-window layers have their own pages, which SGLang sends as state. The drafter uses the
    # pages of the full-attention layers.
    "gqa, window": {"target": GQA, "target_window": 9, **with_drafter("gqa2")},
    "mla, hybrid": {"target": MLA, "hybrid": True, **with_drafter("DSPARK")},
    "mla, stages": {"target": MLA, "prefill_pp": 2, **with_drafter("gqa4")},
    # Kimi-K3's shape. With KV heads in the drafter, SGLang allows stages only for DSPARK.
    "mla, four hybrid stages": {
        "target": replace(MLA, layers=8), "hybrid": True, "prefill_pp": 4, **with_drafter("DSPARK")
    },
    "mla drafter": {"draft": Cache("mla", k_bytes=12)},  # SGLang moves MLA drafters itself
    "without a drafter": {"draft": None},
    "gqa without a drafter": {"target": GQA, "draft": None},
}  # fmt: skip


@few
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SHAPES)
@pytest.mark.parametrize("name", TARGETS)
def test_targets(prefill_tp: int, decode_tp: int, name: str, backend: str) -> None:
    if (name, prefill_tp, backend) == ("gqa, stages", decode_tp, "nixl"):
        pytest.skip("SGLang cannot move this target over NIXL (test_target_alone.py)")
    right(Case(prefill_tp, decode_tp, requests=REQUESTS, **TARGETS[name]))


DSA_REQUESTS = (Request(150, chunk_pages=2), Request(64, chunk_pages=1), Request(1), Request(130))
INDEX_K = {
    "all": (True, True, True, True),
    "shared": (True, False, True, False),  # item lengths [8448, 0, 8448, 0]
    "stage without": (True, True, False, False),
}
POOLS = {"plain": {}, "stages": {"prefill_pp": 2}, "hybrid": {"hybrid": True}}


@few
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SHAPES)
@pytest.mark.parametrize("index_k", INDEX_K)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("draft", ["none", "heads", "mtp"])
def test_dsa_target(prefill_tp: int, decode_tp: int, index_k: str, pool: str, draft: str) -> None:
    """DSA targets (DeepSeek-V3.2, GLM-5, LongCat) keep index keys in their own pages, which SGLang
    sends as state. Not every layer has index keys. Those of DeepSeek's MTP layer follow those of
    the target in one list. In a hybrid model, the MTP layer has no index keys."""
    of_mtp = Cache("mla", k_bytes=24, index_k=() if pool == "hybrid" else (True,))
    drafts = {"none": None, "heads": Cache("mha", heads=2), "mtp": of_mtp}
    target = Cache("mla", layers=4, k_bytes=24, index_k=INDEX_K[index_k])
    right(
        Case(
            prefill_tp, decode_tp, target=target, draft=drafts[draft], page_size=64,
            requests=DSA_REQUESTS, **POOLS[pool],
        )
    )  # fmt: skip


@few
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(4, 2), (2, 4)])
def test_drafter_without_kv_entries(prefill_tp: int, decode_tp: int) -> None:
    """The KV of DeepSeek-V4's DSPARK is state without heads, which SGLang's own transfer sends."""
    special = Special(draft_is_state=True)
    case = Case(prefill_tp, decode_tp, draft=None, algorithm="DSPARK", special=special)
    outcome = right(replace(case, requests=REQUESTS))
    assert outcome.total("needed_bytes_total") == 0


@few
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "prefill_dp", "decode_dp"),
    [(2, 1, 1, 2), (2, 2, 1, 2), (1, 2, 2, 1), (2, 1, 2, 2), (4, 2, 1, 2)],
)
def test_dp_attention(prefill_tp: int, decode_tp: int, prefill_dp: int, decode_dp: int) -> None:
    """Routes depend on the attention-TP sizes within a DP rank. Each DP rank is a peer."""
    sizes = {"prefill_dp": prefill_dp, "decode_dp": decode_dp}
    right(Case(prefill_tp, decode_tp, requests=REQUESTS, **sizes, **with_drafter("gqa4")))


@few
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("dp", [1, 2])
def test_several_prefill_servers(prefill_tp: int, decode_tp: int, dp: int) -> None:
    """One decode server alternates between requests from two prefill servers."""
    requests = (*REQUESTS, Request(17, chunk_pages=1), Request(5), Request(9), Request(30))
    right(Case(prefill_tp, decode_tp, prefills=2, decode_dp=dp, requests=requests))


@few
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(4, 2), (2, 4), (2, 1)])
def test_page_sizes_and_page_edges(prefill_tp: int, decode_tp: int, page_size: int) -> None:
    """Prompts have 2 x page_size - 1, 2 x page_size and 2 x page_size + 1 tokens, in one or several
    chunks, with and without a prefix cached on decode."""
    requests = tuple(
        Request(max(1, page_size * 2 + edge), prefix, chunk)
        for edge in (-1, 0, 1)
        for prefix in (0, 2)
        for chunk in (0, 1)
    )
    right(Case(prefill_tp, decode_tp, page_size=page_size, requests=requests))


@few
@pytest.mark.parametrize(("target", "draft"), [("fp8", "bf16"), ("bf16", "fp8"), ("fp8", "fp8")])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(4, 2), (2, 4)])
def test_dtypes(prefill_tp: int, decode_tp: int, target: str, draft: str) -> None:
    right(
        Case(
            prefill_tp, decode_tp, target=Cache("mla", layers=2, k_bytes=24, dtype=target),
            draft=Cache("mha", heads=4, dtype=draft), requests=REQUESTS,
        )
    )  # fmt: skip


@few
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "heads"),
    [(3, 1, 3), (1, 3, 3), (6, 3, 6), (3, 6, 6), (6, 2, 6), (6, 3, 3), (2, 6, 6)],
)
def test_sizes_that_are_not_powers_of_two(prefill_tp: int, decode_tp: int, heads: int) -> None:
    """SGLang requires that the number of heads is a multiple or a divisor of the TP size, and that
    one TP size is a multiple of the other."""
    draft = Cache("mha", heads=heads, layers=3)
    right(Case(prefill_tp, decode_tp, draft=draft, requests=REQUESTS))


# ---------------------------------------------------------------- surplus pages


@few
@pytest.mark.parametrize("surplus", [0, 2])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_only_the_prompts_rows_are_moved(
    prefill_tp: int, decode_tp: int, surplus: int, backend: str
) -> None:
    """Prefill may send more pages than the prompt fills; `num_kv_tokens` is the number of tokens
    sent. Decode allocates only the pages that the prompt fills. Prompts end at a page boundary or
    one token before it, in one or several chunks, with and without a prefix. The last of several
    chunks may have only surplus pages."""
    # SGLang's own transfer over NIXL fails if decode has no page for the last chunk.
    chunks = (0,) if (backend, surplus) == ("nixl", 2) else (0, 1)
    requests = tuple(itertools.starmap(Request, itertools.product((8, 7), (0, 2), chunks)))
    special = Special(surplus={"prefill": surplus})
    right(Case(prefill_tp, decode_tp, requests=requests, special=special))


@few
def test_a_fully_cached_prompt_needs_no_draft_kv() -> None:
    """If decode has cached the whole prompt, SGLang's last chunk has no page (decode.py)."""
    right(Case(2, 1, requests=(Request(0, prefix_pages=2), Request(8))))


# ---------------------------------------------------------------- a drafter on one side


@few
@pytest.mark.parametrize("lacks_it", ["prefill", "decode"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp", "dcp"), [(2, 1, 1), (1, 2, 1), (1, 4, 2)])
def test_a_side_without_a_drafter_is_served(
    prefill_tp: int, decode_tp: int, dcp: int, lacks_it: str
) -> None:
    """The target is correct, and the drafter's rows on decode are zero."""
    case = Case(
        prefill_tp, decode_tp, dcp=dcp, requests=REQUESTS[:3],
        special=Special(draft_on={lacks_it: False}),
    )  # fmt: skip
    outcome = run(case)
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
    cold = decode_tp * len(case.requests) if lacks_it == "prefill" else 0
    for at in (), ("no_drafter",):
        assert outcome.total("rooms_total", "cold", *at) == cold
    assert outcome.total("sent_bytes_total") == 0


@few
@pytest.mark.mooncake_only
def test_an_mla_drafter_beside_a_gqa_target_is_refused_at_start() -> None:
    pair = {"target": Cache("mha", heads=4), "draft": Cache("mla", k_bytes=24)}
    outcome = run(Case(1, 1, requests=REQUESTS, **pair))
    assert len(outcome.wrong) == 2
    assert all("MIXKV-START-05" in error for error in outcome.wrong)


# ---------------------------------------------------------------- decode context parallelism


# DCP distributes the target's tokens over ranks, while the drafter is split by heads. One request
# has a prefix of one decode page, and some chunks end inside a decode page.
DCP_REQUESTS = (
    Request(23, chunk_pages=1),
    Request(8),
    Request(1),
    Request(29, prefix_pages=1, chunk_pages=3),
)


@pytest.mark.transports(2)
@pytest.mark.parametrize("prefill_tp", [1, 2, 8])
@pytest.mark.parametrize(("decode_tp", "dcp"), [(2, 2), (4, 2), (4, 4), (8, 4)])
@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("hybrid", [False, True])
def test_dcp_from_a_server_without_it(
    prefill_tp: int, decode_tp: int, dcp: int, heads: int, hybrid: bool
) -> None:
    right(
        Case(
            prefill_tp, decode_tp, dcp=dcp, hybrid=hybrid, requests=DCP_REQUESTS,
            draft=Cache("mha", heads=heads, k_bytes=4, v_bytes=6), seed=heads,
        )
    )  # fmt: skip


@pytest.mark.transports(2)
@pytest.mark.parametrize(("stages", "tp"), [(4, 4), (2, 8)])
def test_dcp_from_stages_of_one_rank(stages: int, tp: int) -> None:
    """The pair has Kimi-K3's topology at a small size, with 16 draft heads. Stock SGLang hangs with
    it over NIXL (test_stock.py)."""
    right(
        Case(
            1, tp, prefill_pp=stages, dcp=tp, hybrid=True, requests=DCP_REQUESTS,
            target=Cache("mla", layers=2 * stages, k_bytes=24), draft=Cache("mha", heads=16),
        )
    )  # fmt: skip


@few
@pytest.mark.parametrize(("tp", "dcp"), [(2, 2), (4, 2), (4, 4), (8, 4)])
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("hybrid", [False, True])
def test_dcp_between_equal_servers(tp: int, dcp: int, heads: int, hybrid: bool) -> None:
    right(
        Case(
            tp, tp, prefill_dcp=dcp, dcp=dcp, hybrid=hybrid, requests=DCP_REQUESTS,
            draft=Cache("mha", heads=heads),
        )
    )  # fmt: skip


# ---------------------------------------------------------------- pairs that are refused


@pytest.mark.transports(2)
@pytest.mark.parametrize("sizes", [(4, 1), (2, 4), (4, 2), (2, 2)])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("draft", [None, Cache("mha", heads=4)])
def test_other_dcp_sizes_are_refused(
    sizes: tuple[int, int], hybrid: bool, draft: Cache | None
) -> None:
    prefill_dcp, dcp = sizes
    decode_tp = 4 if prefill_dcp != dcp else 2
    fits = Case(4, 4, prefill_dcp=prefill_dcp, dcp=prefill_dcp, hybrid=hybrid, draft=draft)
    reason = refusal_of(fits, replace(fits, decode_tp=decode_tp, dcp=dcp))
    assert f"--dcp-size: prefill has {prefill_dcp} at attention TP 4" in reason


MISFITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "buffers of the target": ({}, {"target": Cache("mla", layers=3, k_bytes=24)}),
    "bytes of a token of the target": ({}, {"target": Cache("mla", layers=2, k_bytes=20)}),
    "buffers of the MLA drafter": (
        {"draft": Cache("mla", k_bytes=24)}, {"special": Special(draft_on={"decode": False})}
    ),
    "bytes of a row of linear-attention state": (
        {"hybrid": True}, {"special": Special(state_dtype="bfloat16")}
    ),
}  # fmt: skip


@pytest.mark.transports(2)
@pytest.mark.parametrize("what", MISFITS)
@pytest.mark.parametrize("decode_tp", [1, 2])
def test_other_buffers_are_refused(what: str, decode_tp: int) -> None:
    """Prefill and decode serve different models, or the same model with different flags."""
    both, changes = MISFITS[what]
    fits = Case(2, 2, **both)
    assert what in refusal_of(fits, replace(fits, decode_tp=decode_tp, **changes))


def refusal_of(fits: Case, misfit: Case) -> str:
    """Return why the decode server `misfit` refuses its request, and check that a fitting decode
    server is served afterwards. If the misfit had registered with prefill, SGLang's threads on
    prefill would have ended."""
    requests, ports = (Request(8), Request(23)), [free_port()]
    with ExitStack() as ends:

        def run_side(case: Case, side: str, *rounds: tuple[int, ...]) -> Servers:
            servers = start(replace(case, requests=requests, rounds=rounds), ports, [side])
            ends.callback(servers.end)
            servers.all_sent()
            return servers

        prefill = run_side(fits, "prefill", (0,), (1,))
        refused = Outcome.of(run_side(misfit, "decode", (0,)).reports())
        served = Outcome.of(run_side(fits, "decode", (1,)).reports())
        sent = Outcome.of(prefill.reports())
    assert refused.wrong == served.wrong == sent.wrong == []
    assert (refused.statuses, served.statuses) == ({"failed"}, {"success"})
    assert {tuple(report.status) for report in sent.prefill} == {("failed", "success")}
    assert served.total("rooms_total", "warm") == fits.decode_tp
    return refused.reasons
