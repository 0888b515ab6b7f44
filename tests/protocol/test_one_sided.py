"""Opted in on one side: an error that names the other side's lack, and no KV byte written."""

from __future__ import annotations

import time
from typing import Any

import pytest
from rig.model import Case
from rig.rank import LIMIT_S, Rank
from rig.ring import Outcome, run

pytestmark = pytest.mark.transports(every=3)

PAIRS = [(1, 1), (2, 1), (1, 2), (2, 2)]


def refused(outcome: Outcome, side: str) -> list[str]:
    """The reasons that one side gave; nothing was written, no thread ended."""
    assert outcome.wrong == []
    return [line for line in outcome.reasons.splitlines() if line.startswith(side)]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), PAIRS)
def test_decode_lacks_the_plugin(prefill_tp: int, decode_tp: int) -> None:
    """Both sides know: the prefill's reason travels in the status message."""
    outcome = run(Case(prefill_tp, decode_tp, decode_mixkv=False))
    for side in ("prefill 0", "decode 0"):
        reasons = refused(outcome, side)
        assert reasons
        assert all("the decode side does not run sglang-mixkv" in r for r in reasons)
    assert {s for r in outcome.decode for s in r.status} == {"failed"}
    assert all(r.stats["refused_no_plugin"] for r in outcome.prefill), "operators are warned by it"


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), PAIRS)
def test_prefill_lacks_the_plugin(prefill_tp: int, decode_tp: int) -> None:
    """Decode knows why; a stock prefill can only learn that decode gave up."""
    outcome = run(Case(prefill_tp, decode_tp, prefill_mixkv=False))
    reasons = refused(outcome, "decode 0")
    assert reasons
    assert all("does not run sglang-mixkv" in r for r in reasons)
    assert {s for r in outcome.prefill + outcome.decode for s in r.status} == {"failed"}


def test_one_prefill_rank_lacks_the_plugin() -> None:
    """A node without the variable: no decode rank takes a request, not even from the others."""
    outcome = run(Case(2, 1, extra={"stock_ranks": [("prefill", 1)]}))
    reasons = refused(outcome, "decode 0")
    assert reasons
    assert all("1 of 2 prefill ranks do not run sglang-mixkv" in r for r in reasons)
    assert {s for r in outcome.decode for s in r.status} == {"failed"}


def after_its_metadata(rank: Rank) -> None:
    """The prefill server gets each request once a decode rank with the plugin has asked for it."""
    make = rank._sender

    def sender(number: int, tables: Any) -> Any:
        deadline = time.monotonic() + LIMIT_S / 2
        while not getattr(rank.plugin.rooms.get(rank.rooms()[number]), "members", None):
            assert time.monotonic() < deadline, "no metadata"
            time.sleep(0.001)
        return make(number, tables)

    rank._sender = sender  # type: ignore[method-assign]


def test_one_decode_rank_lacks_the_plugin() -> None:
    """Its requests fail, and so do the server's, whose ranks agree on each. Here they do not: the
    other rank hears of it as long as the prefill has the request."""
    faults = {("prefill", 0): after_its_metadata}
    outcome = run(Case(1, 2, extra={"stock_ranks": [("decode", 1)], "faults": faults}))
    reasons = refused(outcome, "prefill 0")
    assert reasons
    assert all("the decode side does not run sglang-mixkv" in r for r in reasons)
    assert {status for rank in outcome.decode for status in rank.status} == {"failed"}
