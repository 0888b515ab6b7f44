"""Every attention-TP pair and head count: every byte of every decode buffer."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from rig.model import Cache, Case, Request, draft_bytes
from rig.ring import Outcome, run
from rig.special import Special

pytestmark = pytest.mark.transports(every=12, tcp=True)

SIZES = (1, 2, 4, 8)
DRAFTS = {
    "gqa1": Cache("mha", heads=1, k_bytes=6, v_bytes=10),
    "gqa2": Cache("mha", heads=2),
    "gqa4": Cache("mha", heads=4, layers=2, k_bytes=4, v_bytes=4),
    "gqa8": Cache("mha", heads=8, k_bytes=4, v_bytes=2),
    "mla": Cache("mla", k_bytes=12),
}
BLOCK_DRAFTERS = {
    "DSPARK": Cache("mha", layers=5, heads=16, k_bytes=4, v_bytes=4),  # Kimi-K3's
    "DFLASH": Cache("mha", layers=6, heads=8, k_bytes=4, v_bytes=4),  # Kimi-K2's
}
REQUESTS = (Request(23, chunk_pages=2), Request(8, chunk_pages=1), Request(1), Request(12))


def right(case: Case) -> Outcome:
    """Run a case that must be right to the last byte, and with no byte sent for nothing."""
    outcome = run(case)
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
    assert outcome.total("sent_bytes_total") == outcome.total("needed_bytes_total")
    assert outcome.total("sent_bytes_total") == draft_bytes(case)
    assert outcome.total("rooms_total", "warm") == case.decode_tp * len(case.requests)
    return outcome


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), itertools.product(SIZES, SIZES))
def test_every_byte(prefill_tp: int, decode_tp: int, draft: str) -> None:
    seed = prefill_tp * 100 + decode_tp
    outcome = right(Case(prefill_tp, decode_tp, draft=DRAFTS[draft], requests=REQUESTS, seed=seed))
    assert (outcome.total("sent_bytes_total") > 0) == (draft != "mla")  # SGLang moves that itself


@pytest.mark.sampled(3)
@pytest.mark.parametrize("algorithm", BLOCK_DRAFTERS)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), itertools.product(SIZES, SIZES))
def test_every_byte_of_block_drafters(prefill_tp: int, decode_tp: int, algorithm: str) -> None:
    """Several layers, and as many heads as production drafters have."""
    right(
        Case(
            prefill_tp, decode_tp, draft=BLOCK_DRAFTERS[algorithm], algorithm=algorithm,
            requests=REQUESTS, seed=prefill_tp * 100 + decode_tp,
        )
    )  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("algorithm", BLOCK_DRAFTERS)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 2), (2, 1), (1, 2), (8, 1), (1, 8)])
@pytest.mark.parametrize(
    ("target", "hybrid"),
    [(Cache("mla", layers=4), True), (Cache("mha", layers=4, heads=4), False)],
    ids=["hybrid mla", "gqa"],
)
def test_targets_of_block_drafters(
    prefill_tp: int, decode_tp: int, target: Cache, hybrid: bool, algorithm: str
) -> None:
    right(
        Case(
            prefill_tp, decode_tp, target=target, hybrid=hybrid, algorithm=algorithm,
            draft=BLOCK_DRAFTERS[algorithm], requests=REQUESTS,
        )
    )  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("stages", "prefill_tp", "decode_tp"),
    [(2, 1, 2), (2, 2, 1), (2, 2, 2), (2, 1, 8), (4, 1, 2), (4, 2, 1), (4, 1, 8)],
)
@pytest.mark.parametrize("hybrid", [False, True])
def test_pipeline_stages_of_dspark(
    stages: int, prefill_tp: int, decode_tp: int, hybrid: bool
) -> None:
    """Kimi-K3's shape: stages of few ranks to one wide decode. SGLang lets DSPARK alone do so
    with a drafter of heads."""
    target = Cache("mla", layers=2 * stages)
    right(
        Case(
            prefill_tp, decode_tp, target=target, hybrid=hybrid, algorithm="DSPARK",
            draft=BLOCK_DRAFTERS["DSPARK"], prefill_pp=stages, requests=REQUESTS,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("target", [Cache("mla", layers=2), Cache("mha", layers=2, heads=4)])
def test_without_drafter(prefill_tp: int, decode_tp: int, target: Cache) -> None:
    right(Case(prefill_tp, decode_tp, target=target, draft=None, requests=REQUESTS))


@pytest.mark.parametrize("pool", ["NVLINK", "INTRA_NODE_NVLINK"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
@pytest.mark.mooncake_only
def test_a_custom_memory_pool_without_drafter(
    monkeypatch: pytest.MonkeyPatch, prefill_tp: int, decode_tp: int, pool: str
) -> None:
    """Metadata go over ZMQ then, or each layer as a call of its own."""
    monkeypatch.setenv("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", pool)
    right(Case(prefill_tp, decode_tp, draft=None, requests=REQUESTS))


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (4, 2), (2, 4)])
def test_drafter_without_kv_entries(prefill_tp: int, decode_tp: int) -> None:
    """DeepSeek-V4's DSPARK: its KV is state without heads. Both sides speculate, and SGLang's
    own transfer sends it all."""
    special = Special(draft_is_state=True)
    case = Case(prefill_tp, decode_tp, draft=None, algorithm="DSPARK", special=special)
    outcome = right(replace(case, requests=REQUESTS))
    assert outcome.total("needed_bytes_total") == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "prefill_dp", "decode_dp"),
    [(2, 1, 1, 2), (2, 2, 1, 2), (1, 2, 2, 1), (2, 1, 2, 2), (4, 2, 1, 2)],
)
@pytest.mark.parametrize(
    ("algorithm", "draft"), [("EAGLE3", DRAFTS["gqa4"]), *BLOCK_DRAFTERS.items()]
)
def test_dp_attention(
    prefill_tp: int, decode_tp: int, prefill_dp: int, decode_dp: int, algorithm: str, draft: Cache
) -> None:
    """Routes depend on the attention-TP sizes inside a DP rank; each DP rank is a peer."""
    right(
        Case(
            prefill_tp, decode_tp, draft=draft, algorithm=algorithm, requests=REQUESTS,
            prefill_dp=prefill_dp, decode_dp=decode_dp,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("dp", [1, 2])
def test_several_prefill_servers(prefill_tp: int, decode_tp: int, dp: int) -> None:
    """One decode server takes requests of two prefill servers in turns."""
    requests = (*REQUESTS, Request(17, chunk_pages=1), Request(5), Request(9), Request(30))
    right(Case(prefill_tp, decode_tp, prefills=2, decode_dp=dp, requests=requests))


GQA = Cache("mha", layers=2, heads=4, k_bytes=4, v_bytes=4)
SHAPES = [(1, 1), (2, 1), (4, 2), (1, 2), (2, 4)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SHAPES)
@pytest.mark.parametrize("draft_heads", [1, 2, 8])
def test_gqa_target(prefill_tp: int, decode_tp: int, draft_heads: int) -> None:
    """A GQA target with a drafter of another head count and size, on plain pools."""
    draft = Cache("mha", heads=draft_heads, k_bytes=6, v_bytes=2)
    right(Case(prefill_tp, decode_tp, target=GQA, draft=draft, requests=REQUESTS))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SHAPES)
@pytest.mark.parametrize("target", [Cache("mla", layers=2), GQA], ids=["mla", "gqa"])
@pytest.mark.parametrize("stages", [1, 2])
def test_hybrid_target(prefill_tp: int, decode_tp: int, target: Cache, stages: int) -> None:
    """Pools that publish layer ids, with linear-attention state cut by TP rank."""
    right(
        Case(
            prefill_tp, decode_tp, target=target, draft=Cache("mha", heads=2), hybrid=True,
            prefill_pp=stages, requests=REQUESTS,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SHAPES)
@pytest.mark.parametrize("draft_heads", [2, 8])
def test_target_with_a_sliding_window_group(
    prefill_tp: int, decode_tp: int, draft_heads: int
) -> None:
    """Layers with a window have pages of their own, sent as state; the drafter's pages are those
    of the full layers, all of them."""
    draft = Cache("mha", heads=draft_heads, k_bytes=6, v_bytes=2)
    right(
        Case(
            prefill_tp, decode_tp, target=GQA, draft=draft, target_window=9, requests=REQUESTS
        )
    )  # fmt: skip


DSA_SHAPES = [(1, 1), (2, 2), (2, 1), (1, 2), (4, 2)]
DSA_REQUESTS = (Request(150, chunk_pages=2), Request(64, chunk_pages=1), Request(1), Request(130))
INDEX_K = {
    "all": (True, True, True, True),
    "shared": (True, False, True, False),  # item lengths [8448, 0, 8448, 0]
    "stage without": (True, True, False, False),
}


def dsa(prefill_tp: int, decode_tp: int, index_k: str, **kwargs: object) -> Case:
    """DeepSeek-V3.2, GLM-5, LongCat: index keys in pages of their own, sent as state."""
    target = Cache("mla", layers=4, k_bytes=24, index_k=INDEX_K[index_k])
    return Case(prefill_tp, decode_tp, target=target, page_size=64, requests=DSA_REQUESTS, **kwargs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), DSA_SHAPES)
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("index_k", INDEX_K)
def test_dsa_target(prefill_tp: int, decode_tp: int, stages: int, index_k: str) -> None:
    """Every byte of KV and of index keys, which some layers have and some do not."""
    right(dsa(prefill_tp, decode_tp, index_k, prefill_pp=stages))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), DSA_SHAPES)
@pytest.mark.parametrize("stages", [1, 2])
def test_dsa_target_and_dsa_drafter(prefill_tp: int, decode_tp: int, stages: int) -> None:
    """DeepSeek's own MTP layer: its index keys follow the target's in one list of entries."""
    draft = Cache("mla", k_bytes=24, index_k=(True,))
    right(dsa(prefill_tp, decode_tp, "shared", draft=draft, prefill_pp=stages))


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), DSA_SHAPES)
def test_dsa_target_with_linear_attention(prefill_tp: int, decode_tp: int) -> None:
    """Two kinds of state: one cut by TP rank, one the same on every rank."""
    right(dsa(prefill_tp, decode_tp, "shared", hybrid=True, draft=Cache("mha", heads=2)))


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), DSA_SHAPES)
def test_dsa_target_without_drafter(prefill_tp: int, decode_tp: int) -> None:
    right(dsa(prefill_tp, decode_tp, "shared", draft=None))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SHAPES)
@pytest.mark.parametrize("target", [Cache("mla", layers=4), Cache("mha", layers=4, heads=4)])
def test_two_prefill_stages(prefill_tp: int, decode_tp: int, target: Cache) -> None:
    """Each stage sends its layers, the last one the drafter and the aux row."""
    right(Case(prefill_tp, decode_tp, target=target, prefill_pp=2, requests=REQUESTS))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(4, 2), (2, 4), (2, 1)])
def test_page_sizes_and_page_edges(prefill_tp: int, decode_tp: int, page_size: int) -> None:
    """Prompts of page_size x k - 1, x k and x k + 1 tokens, in one chunk and in several, with
    and without a prefix that the decode side has cached."""
    requests = tuple(
        Request(max(1, page_size * 2 + edge), prefix, chunk)
        for edge in (-1, 0, 1)
        for prefix in (0, 2)
        for chunk in (0, 1)
    )
    right(Case(prefill_tp, decode_tp, page_size=page_size, requests=requests))


@pytest.mark.parametrize(("target", "draft"), [("fp8", "bf16"), ("bf16", "fp8"), ("fp8", "fp8")])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(4, 2), (2, 4)])
def test_dtypes(prefill_tp: int, decode_tp: int, target: str, draft: str) -> None:
    right(
        Case(
            prefill_tp, decode_tp, target=Cache("mla", layers=2, k_bytes=24, dtype=target),
            draft=Cache("mha", heads=4, dtype=draft), requests=REQUESTS,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "heads"),
    [(3, 1, 3), (1, 3, 3), (6, 3, 6), (3, 6, 6), (6, 2, 6), (6, 3, 3), (2, 6, 6)],
)
def test_sizes_that_are_no_powers_of_two(prefill_tp: int, decode_tp: int, heads: int) -> None:
    """Where SGLang allows them: heads and ranks divide each other, one TP size the other."""
    draft = Cache("mha", heads=heads, layers=3)
    right(Case(prefill_tp, decode_tp, draft=draft, requests=REQUESTS))
