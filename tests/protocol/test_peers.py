"""Test pairs in which one side is stock SGLang, without a channel.

prefill    decode    result
stock      plugin    decode refuses the request with a reason, before SGLang sends any message
plugin     stock     the target is transferred; prefill counts an unopened room, and logs it once
"""

from __future__ import annotations

from typing import Any

import pytest
from rig.ring.logs import keep_lines
from rig.ring.model import Case, Request
from rig.ring.rank import Rank, stock_class
from rig.ring.run import Outcome, run
from rig.ring.special import Special

pytestmark = pytest.mark.transports(1)

PAIRS = [(1, 1), (2, 1), (1, 2), (2, 2)]
REQUESTS = (Request(23, chunk_pages=2), Request(8), Request(12, prefix_pages=2))


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "60")
    monkeypatch.setenv("SGLANG_MIXKV_PATIENCE", "1")


def is_silent(rank: Rank) -> None:
    """Make this decode rank record each message that SGLang would send as an error."""

    def send(_: Any, *, bootstrap_info: Any, message: Any, operation: str) -> bool:
        rank.report.wrong.append(f"decode sent {operation}")
        return True

    stock_class(rank, "receiver")._send_bootstrap_message = send


def refused_by_decode(
    words: str, prefill_tp: int, decode_tp: int, stock_ranks: Any = (), **case: Any
) -> Outcome:
    """Check that decode refuses every request with these words, and sends nothing.

    Decode refuses immediately, and repeats the ABORT to prefill for 8 s only. With `faults`, the
    ring starts requests only after all ranks are up, so every prefill rank receives the ABORT."""
    faults = {("decode", rank): is_silent for rank in range(decode_tp)}
    special = Special(faults=faults, failed_rooms_stay_clean=True, stock_ranks=stock_ranks)
    outcome = run(Case(prefill_tp, decode_tp, requests=REQUESTS, special=special, **case))
    assert outcome.wrong == []
    assert {status for r in outcome.decode for status in r.status} == {"failed"}
    reasons = [line for line in outcome.reasons.splitlines() if line.startswith("decode")]
    assert len(reasons) == decode_tp * len(REQUESTS)
    assert all(words in reason for reason in reasons)
    assert {status for r in outcome.prefill for status in r.status} == {"failed"}
    assert "Timed out" not in outcome.reasons, outcome.reasons
    return outcome


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), PAIRS)
def test_a_stock_prefill_is_refused(prefill_tp: int, decode_tp: int) -> None:
    """A stock prefill server would write the drafter's rows into the target's pages."""
    words = "it does not run sglang-mixkv"
    outcome = refused_by_decode(words, prefill_tp, decode_tp, prefill_mixkv=False)
    assert all(report.counted["peers_refused_total", "no_plugin"] for report in outcome.decode)


def test_a_prefill_with_one_stock_rank_is_refused() -> None:
    refused_by_decode("every node", 2, 1, stock_ranks=[("prefill", 1)])


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), PAIRS)
def test_a_stock_decode_gets_its_target_and_is_counted(prefill_tp: int, decode_tp: int) -> None:
    """Prefill cannot detect a stock decode server, and so cannot refuse it."""
    before = {("prefill", rank): keep_lines("did not open") for rank in range(prefill_tp)}
    special = Special(draft_stays=True, before=before)
    case = Case(prefill_tp, decode_tp, requests=REQUESTS, decode_mixkv=False, special=special)
    outcome = run(case)
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
    assert outcome.total("unopened_rooms_total") == prefill_tp * len(REQUESTS)
    assert [len(report.reasons) for report in outcome.prefill] == [1] * prefill_tp


def test_a_decode_with_one_stock_rank_is_counted() -> None:
    special = Special(stock_ranks=[("decode", 1)], draft_stays=True)
    outcome = run(Case(1, 2, requests=REQUESTS, special=special))
    assert outcome.statuses == {"success"}
    assert outcome.total("unopened_rooms_total") == len(REQUESTS)
