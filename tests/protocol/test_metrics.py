"""Test the channel's metrics after real transfers, and the hooks that count a request's drafts."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rig.ring.model import Case, Request
from rig.ring.run import Outcome, run
from rig.ring.special import Special

from sglang_mixkv import __version__
from sglang_mixkv.decode.cold import ColdReason
from sglang_mixkv.engine import pool_hooks
from sglang_mixkv.guards import retraction

REQUESTS = (Request(23, chunk_pages=2), Request(8, chunk_pages=1), Request(1))
CHUNKS = 3 + 2 + 1


def measured(case: Case, **special: Any) -> Outcome:
    outcome = run(replace(case, special=Special(**special)))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
    return outcome


def states(outcome: Outcome) -> dict[tuple[str, ...], float]:
    """Count rooms by state and reason over all decode ranks, and check that the series by prefill
    server has the same totals."""
    names = {at for r in outcome.decode for at in r.counted if at[0] == "rooms_total"}
    found = {at[1:]: count for at in names if (count := outcome.total(*at))}
    for at, count in found.items():
        assert outcome.total("prefill_rooms_total", *at) == count
    return found


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_warm_rooms_and_their_bytes(prefill_tp: int, decode_tp: int) -> None:
    outcome = measured(Case(prefill_tp, decode_tp, requests=REQUESTS))
    assert states(outcome) == {("warm",): decode_tp * len(REQUESTS)}
    needed = outcome.total("needed_bytes_total", "draft")
    assert needed == outcome.total("sent_bytes_total", "draft") > 0
    assert outcome.total("wait_seconds", "warm") == decode_tp * len(REQUESTS)
    assert outcome.total("ready_seconds") == CHUNKS * max(prefill_tp, decode_tp), "per reader"
    for report in outcome.prefill + outcome.decode:
        assert report.counted["copy_seconds_total",] > 0
        assert report.counted["slots", __version__] >= report.counted["slots_used",]
    for report in outcome.decode:
        assert report.counted["slots", __version__] > report.counted["slots_used",] == 0
        assert {("rooms_total", "cold", reason) for reason in ColdReason} <= set(report.counted)
        assert report.counted["breaker_open",] == 0


def test_no_metrics_are_made_without_enable_metrics() -> None:
    outcome = measured(Case(1, 1, requests=REQUESTS), metrics=False)
    assert not any(report.counted for report in outcome.prefill + outcome.decode)
    assert not any(report.cold for report in outcome.decode)


# ---------------------------------------------------------------- SGLang's queues


def test_sglang_counts_accepted_drafts_in_one_list() -> None:
    """SGLang extends `spec_correct_drafts_histogram` in place and does not reset it when it
    retracts the request."""
    from sglang.srt.managers.schedule_batch import Req

    request = Req.__new__(Req)
    request.spec_correct_drafts_histogram = kept = []
    for right in (2, 0, 2):
        request.update_spec_correct_drafts_histogram(right)
    assert kept == [1, 0, 2]
    assert "spec_correct_drafts_histogram" not in inspect.getsource(Req.reset_for_retract)


def test_a_rooms_handle_gets_its_request() -> None:
    handle, request = SimpleNamespace(), object()
    ours = SimpleNamespace(req=request, kv_receiver=SimpleNamespace(handle=handle))
    others = [SimpleNamespace(req=object(), kv_receiver=r) for r in (object(), None)]
    for first in (others[:0], others[:1], others):  # at each place in the list
        handle.request = None
        given = [*first, ours, *others]
        assert pool_hooks.around_extend(lambda *_: "SGLang's", None, given) == "SGLang's"
        assert handle.request is request


def draft_of(pages: int) -> Any:
    """Make a draft pool full of ones."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = MHATokenToKVPool(
        size=pages * 4, page_size=4, dtype=torch.bfloat16, head_num=2, head_dim=4, layer_num=1,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(1)
    return pool


@pytest.mark.parametrize("backup", ["cpu_tensor", "host_pool"])
def test_draft_rows_missing_from_a_backup_are_zeroed(
    backup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a retraction, a CPU-tensor backup restores no draft rows, so the plugin zeroes those of
    the resumed request. A host-pool backup includes draft rows."""
    monkeypatch.setattr(
        retraction, "get_disagg",
        lambda: SimpleNamespace(disaggregation_decode_retraction_backup=backup),
    )  # fmt: skip
    pool, marked = draft_of(4), []
    reporter = SimpleNamespace(retracted=marked.append)
    local = SimpleNamespace(pool_context=SimpleNamespace(pool=pool), reporter=reporter)
    rows = [5, 9, 4, 12, 7]
    table = torch.zeros((3, 8), dtype=torch.int32)
    table[1, : len(rows)] = torch.tensor(rows)
    request = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=1), seqlen=5)
    queue = SimpleNamespace(
        kv_manager=SimpleNamespace(local=local),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
    )
    assert pool_hooks.around_resume(lambda _: [request], queue) == [request]
    assert marked == [request]
    zeroed = set(rows[:4]) if backup == "cpu_tensor" else set()
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        sums = buffer.float().flatten(1).sum(1)
        assert set(torch.nonzero(sums == 0).flatten().tolist()) == zeroed


@pytest.mark.parametrize("bad", range(3))
@pytest.mark.parametrize("where", ["reporter", "rows"])
def test_an_error_in_one_resumed_request_affects_no_other(
    bad: int, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Draft rows that are not cleared may contain the KV of another request."""
    done: dict[str, list[int]] = {"reporter": [], "rows": []}

    def note(name: str, request: int) -> None:
        if (name, request) == (where, bad):
            raise ValueError
        done[name].append(request)

    monkeypatch.setattr(retraction, "clear_retracted", lambda *args: note("rows", args[-1]))
    reporter = SimpleNamespace(retracted=lambda request: note("reporter", request))
    local = SimpleNamespace(pool_context=SimpleNamespace(pool=object()), reporter=reporter)
    queue = SimpleNamespace(kv_manager=SimpleNamespace(local=local), req_to_token_pool=None)
    assert pool_hooks.around_resume(lambda _: [0, 1, 2], queue) == [0, 1, 2]
    assert done[where] == done["rows"] == [one for one in range(3) if one != bad]
    assert caplog.text.count("MIXKV-SELF-01") == 1


def test_an_error_in_a_resumed_request_never_reaches_sglang(
    caplog: pytest.LogCaptureFixture,
) -> None:
    resumed, queue = [object()], SimpleNamespace(kv_manager=SimpleNamespace(local=object()))
    assert pool_hooks.around_resume(lambda _: resumed, queue) is resumed
    assert caplog.text.count("MIXKV-SELF-01") == 1
