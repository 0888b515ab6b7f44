"""`--mixkv-on-draft-mismatch`: a drafter that does not fit is refused, or its KV stays away."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rig.model import Cache, Case, Request
from rig.ring import Outcome, run

pytestmark = pytest.mark.transports(every=4)

REQUESTS = (Request(23), Request(8, chunk_pages=1), Request(9, prefix_pages=1))
COLD = {"on_draft_mismatch": "cold"}


def other_drafter(holder: Any) -> None:
    draft = msgspec.structs.replace(holder.facts.draft, architecture="Another")
    holder.facts = msgspec.structs.replace(holder.facts, draft=draft, topk=4)


MISMATCHES = {
    "another drafter": {"facts": {"decode": other_drafter}},
    "no drafter on prefill": {"draft_on": {"prefill": False}},
    "no drafter on decode": {"draft_on": {"decode": False}},
}


def case(prefill_tp: int, decode_tp: int, mismatch: str, **extra: Any) -> Case:
    extra = {**MISMATCHES[mismatch], **extra}
    return Case(prefill_tp, decode_tp, requests=REQUESTS, extra=extra)


def served_cold(outcome: Outcome, decode_ranks: int) -> None:
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
    assert outcome.total("cold_requests") == decode_ranks * len(REQUESTS)
    assert outcome.total("draft_bytes_sent") == outcome.total("draft_bytes_needed") == 0


@pytest.mark.parametrize("mismatch", MISMATCHES)
@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_cold_serves_the_target_alone(mismatch: str, tp: tuple[int, int]) -> None:
    """Target and aux rows right, draft pages and rows of the requests zero, others untouched."""
    served_cold(run(case(*tp, mismatch, config=COLD, cold=True)), tp[1])


def test_cold_with_layer_ids() -> None:
    """Hybrid targets pair entries by layer id, with the drafter's at the end."""
    hybrid = Case(
        2, 1, hybrid=True, requests=REQUESTS,
        extra={**MISMATCHES["no drafter on prefill"], "config": COLD, "cold": True},
    )  # fmt: skip
    served_cold(run(hybrid), 1)


def test_cold_with_a_gqa_target() -> None:
    gqa = Case(
        2, 1, target=Cache("mha", layers=2, heads=4), requests=REQUESTS,
        extra={**MISMATCHES["another drafter"], "config": COLD, "cold": True},
    )  # fmt: skip
    served_cold(run(gqa), 1)


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_refuse_is_the_default(mismatch: str) -> None:
    outcome = run(case(2, 1, mismatch))
    assert outcome.wrong == []
    assert outcome.statuses == {"failed"}
    assert outcome.total("target_bytes_sent") == 0


def test_cold_on_decode_alone_is_refused_by_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_mixkv.decode.rank import DecodeRank

    monkeypatch.setattr(DecodeRank, "is_cold", lambda *_: True)
    outcome = run(case(2, 1, "another drafter", cold=True))
    assert outcome.wrong == []
    assert outcome.statuses == {"failed"}
    assert "both --mixkv-on-draft-mismatch cold" in outcome.reasons


def test_cold_does_not_hide_other_differences() -> None:
    def other_page(holder: Any) -> None:
        other_drafter(holder)
        holder.facts = msgspec.structs.replace(holder.facts, kv_cache_dtype="fp8")

    outcome = run(case(2, 1, "another drafter", facts={"decode": other_page}, config=COLD))
    assert outcome.statuses == {"failed"}
    assert "KV cache dtype" in outcome.reasons


@pytest.mark.mooncake_only
@pytest.mark.parametrize("guard", ["clear", "clear_aux", "_send_cold_aux"])
def test_without_its_guard_cold_is_wrong(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of serving cold can be switched off, and is then missed."""
    from sglang_mixkv.decode import cold, rank
    from sglang_mixkv.engine import mooncake

    mismatch = "another drafter"
    if guard == "clear":
        monkeypatch.setattr(cold.Clearer, "clear", lambda *_: None)
    elif guard == "clear_aux":
        monkeypatch.setattr(rank, "clear_aux", lambda *_: None)
    else:
        mismatch = "no drafter on decode"
        stock = mooncake.MooncakeKVManager.send_aux
        monkeypatch.setattr(mooncake.MixKVManager, guard, lambda *args: stock(*args))
    assert run(case(2, 1, mismatch, config=COLD, cold=True)).wrong != []


def test_a_row_of_zeros_that_found_no_memory_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One request fails; clearing for the next from what was never allocated would end the rank."""
    from sglang_mixkv.rows.host import HostRows

    real, asked = HostRows.allocate, []

    def allocate(self: HostRows, size: int) -> Any:
        asked.append(size)
        if len(asked) == 1:
            raise MemoryError("no room for a row of zeros")
        return real(self, size)

    monkeypatch.setattr(HostRows, "allocate", allocate)
    outcome = run(case(2, 1, "no drafter on prefill", config=COLD, cold=True))
    assert outcome.wrong == []
    assert outcome.decode[0].status == ["failed", "success", "success"]
    assert "no room for a row of zeros" in outcome.reasons


def test_draft_rows_of_the_metadata_are_where_sglang_has_them() -> None:
    import torch
    from sglang.srt.disaggregation.utils import MetadataBuffers

    from sglang_mixkv.engine.handshake import draft_aux

    buffers = MetadataBuffers(2, 24, torch.float32, max_sampling_mask_tokens=8)
    pointers, _, _ = buffers.get_buf_infos()
    drafter = (buffers.output_topk_p, buffers.output_topk_index, buffers.output_hidden_states)
    assert [pointers.index(rows.data_ptr()) for rows in drafter] == list(draft_aux())
