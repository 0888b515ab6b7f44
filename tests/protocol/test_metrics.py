"""The series tell what went over the wire: counted again at the engine, rank by rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rig.memory import RankReport
from rig.model import Cache, Case, Request
from rig.rank import Rank, stock_class
from rig.ring import Outcome, run

REQUESTS = (Request(23, chunk_pages=2), Request(8, chunk_pages=1), Request(12))
PREFIX = "sglang:mixkv_"


def watch(rank: Rank) -> None:
    """Count what the transport is given, keep stock's metric of each request, and read the
    series of this process at the end."""
    stats, transport = rank.plugin.stats, rank.plugin.transport
    transfer, begin = transport.transfer, transport._begin
    snapshot, conclude = stats.snapshot, rank.conclude

    def count(src: list[int], lengths: list[int]) -> None:
        kv = [n for address, n in zip(src, lengths, strict=True) if not is_aux(rank, address)]
        stats.add(seen_bytes=sum(kv), seen_ranges=len(kv))

    def counting(session: str, src: list[int], dst: list[int], lengths: list[int]) -> int:
        count(src, lengths)
        return int(transfer(session, src, dst, lengths))

    def counting_begun(session: str, blocks: Any) -> Any:
        begun = begin(session, blocks)
        if begun is not None:
            count(blocks.src.tolist(), blocks.length.tolist())
        return begun

    def concluding(number: int, handle: Any, began: float) -> None:
        conclude(number, handle, began)
        if rank.side == "prefill":
            stock = stock_class(rank, "sender").get_transfer_metric(handle).transfer_total_bytes
            stats.add(stock_says=stock)
            stats.add(transfer_metric=handle.get_transfer_metric().transfer_total_bytes)

    transport.transfer, transport._begin = counting, counting_begun
    rank.conclude = concluding
    stats.snapshot = lambda: {**snapshot(), **series()}


def is_aux(rank: Rank, address: int) -> bool:
    return any(a.ctypes.data <= address < a.ctypes.data + a.nbytes for a in rank.aux)


def series() -> dict[str, float]:
    """Name{label of its own} -> value, of the series in this process."""
    from prometheus_client import REGISTRY

    own = ("component", "path", "reason")
    return {
        sample.name + "".join(f"{{{sample.labels[k]}}}" for k in own if k in sample.labels):
            sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith(PREFIX) and not sample.name.endswith("_created")
    }  # fmt: skip


def measured(case: Case, fault: Callable[[Rank], None] = watch) -> Outcome:
    """Run a case with metrics on; every rank is watched."""
    sides = {"prefill": case.prefill_tp, "decode": case.decode_tp}
    case.extra["metrics"] = True
    case.extra["faults"] = {(side, r): fault for side, tp in sides.items() for r in range(tp)}
    outcome = run(case)
    assert outcome.wrong == []
    return outcome


def assert_true(report: RankReport) -> None:
    """A prefill rank's series, and what it tells SGLang, are what its transport was given."""
    found = {name.removeprefix(PREFIX): value for name, value in report.stats.items()}
    sent = found["sent_bytes_total{target}"] + found["sent_bytes_total{draft}"]
    assert sent == found["path_bytes_total{packed}"] + found["path_bytes_total{direct}"]
    assert sent == found.get("seen_bytes", 0) == found["transfer_metric"]
    assert found["descriptors_total"] == found.get("seen_ranges", 0)
    for component in ("target", "draft"):
        took = found[f"send_seconds_total{{{component}}}"]
        assert bool(took) == bool(found[f"sent_bytes_total{{{component}}}"])


@pytest.mark.parametrize("mode", ["packed", "direct", "rounds"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)])
def test_series_are_what_the_transport_saw(prefill_tp: int, decode_tp: int, mode: str) -> None:
    draft = Cache("mha", heads=4)
    packs = mode != "direct"
    extra = {
        "config": {"draft_transfer": "packed" if packs else "direct"},
        "small_rounds": mode == "rounds",
    }
    case = Case(prefill_tp, decode_tp, draft=draft, requests=REQUESTS, extra=extra)
    outcome = measured(case)
    for report in outcome.prefill:
        assert_true(report)
    for component in ("target", "draft"):
        key = f"bytes_total{{{component}}}"
        assert outcome.total(f"{PREFIX}sent_{key}") == outcome.total(f"{PREFIX}needed_{key}") > 0
    assert outcome.total("stock_says") > outcome.total("transfer_metric"), "stock is wrong here"
    packed = outcome.total(f"{PREFIX}path_bytes_total{{packed}}")
    assert (packed > 0) == packs
    assert (outcome.total(f"{PREFIX}copy_seconds_total") > 0) == packs
    assert (outcome.total(f"{PREFIX}staging_size_bytes") > 0) == packs
    assert outcome.total(f"{PREFIX}staging_used_bytes") == 0, "all requests have ended"


def test_a_rank_that_sends_nothing_says_so() -> None:
    """P 4 -> D 1 with one head: three ranks are dummies, which stock would count in full."""
    outcome = measured(Case(4, 1, draft=Cache("mha", heads=1), requests=REQUESTS))
    for report in outcome.prefill:
        assert_true(report)
    assert [r.stats["transfer_metric"] > 0 for r in outcome.prefill] == [True] + [False] * 3


@pytest.mark.parametrize("target", [Cache("mla", layers=2), Cache("mha", layers=2, heads=4)])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)])
def test_model_state_is_in_the_stock_series(prefill_tp: int, decode_tp: int, target: Cache) -> None:
    """State is cut by TP rank: together the ranks send every request's once."""
    case = Case(
        prefill_tp, decode_tp, target=target, draft=Cache("mha", heads=2), hybrid=True,
        requests=REQUESTS,
    )  # fmt: skip
    outcome = measured(case)
    assert outcome.total("transfer_metric") == outcome.total("seen_bytes")


def test_a_refusal_is_counted_under_its_reason() -> None:
    def larger_pages(holder: Any) -> None:
        import msgspec

        holder.facts = msgspec.structs.replace(holder.facts, page_size=128)

    case = Case(2, 1, requests=(Request(8),), extra={"facts": {"decode": larger_pages}})
    outcome = measured(case)
    assert outcome.statuses == {"failed"}
    refused = {k: outcome.total(k) for r in outcome.decode for k in r.stats if "refused" in k}
    assert refused[f"{PREFIX}peers_refused_total{{facts}}"] >= 1
    assert refused[f"{PREFIX}peers_refused_total{{other}}"] == 0


def test_a_full_buffer_is_counted() -> None:
    def small_buffer(rank: Rank) -> None:
        watch(rank)
        from sglang_mixkv.decode.regions import RegionAllocator

        RegionAllocator.allocate = lambda *_: None

    case = Case(2, 1, requests=REQUESTS, extra={"config": {"draft_transfer": "packed"}})
    outcome = measured(case, small_buffer)
    assert outcome.statuses == {"success"}
    assert outcome.total(f"{PREFIX}staging_full_total") == len(REQUESTS)


def test_without_enable_metrics_no_series_is_made() -> None:
    case = Case(2, 1, requests=(Request(8),))
    case.extra["faults"] = {("prefill", 0): watch, ("decode", 0): watch}
    outcome = run(case)
    assert outcome.wrong == []
    assert not [name for r in outcome.prefill for name in r.stats if name.startswith(PREFIX)]
    assert outcome.total("draft_bytes_sent") > 0, "the JSON counts stay"


def test_series_that_fail_cost_no_request() -> None:
    def broken(rank: Rank) -> None:
        for child in rank.plugin.stats._metrics._series.values():
            child.inc = child.set = raising

    def raising(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    outcome = measured(Case(2, 1, requests=REQUESTS), broken)
    assert outcome.statuses == {"success"}
