"""One banner a server: of all ranks, one speaks."""

from __future__ import annotations

from typing import Any

import pytest
from rig.model import Case, Request
from rig.ring import run

from sglang_mixkv.engine.banner import banner, speaks


def tell(rank: Any) -> None:
    """Report the banner if this rank logs it."""
    if speaks(rank.manager):
        rank.report.reasons.append(banner(rank.manager))


@pytest.mark.parametrize(
    "sizes",
    [
        {"prefill_tp": 2, "decode_tp": 1},
        {"prefill_tp": 2, "decode_tp": 1, "decode_dp": 2},
        {"prefill_tp": 1, "decode_tp": 1, "prefill_pp": 2},
    ],
    ids=["tp", "dp-attention", "two-stages"],
)
def test_one_rank_of_each_server_speaks(sizes: dict[str, int]) -> None:
    ranks = {("prefill", i): tell for i in range(4)} | {("decode", i): tell for i in range(4)}
    case = Case(**sizes, requests=(Request(8), Request(8)), extra={"faults": ranks})
    outcome = run(case)
    assert outcome.wrong == []
    for reports in (outcome.prefill, outcome.decode):
        (banner,) = [reason for report in reports for reason in report.reasons]
        assert "drafter mha heads 0-" in banner
