"""SGLang's early sends are off where SGLang does not wait for the forward, unless asked for."""

from __future__ import annotations

import os

import pytest
from rig.ring.logs import keep_lines
from rig.ring.model import Case, Request
from rig.ring.rank import Rank
from rig.ring.run import run
from rig.ring.special import Special

from sglang_mixkv.engine.releases import sglang_version
from sglang_mixkv.guards.early_sends import EARLY_SENDS, switch_off_early_sends


@pytest.mark.parametrize(
    ("backend", "release", "off"),
    [("nixl", "0.5.23", True), ("nixl", "0.6.0", True), ("mooncake", "0.5.21.post1", True),
     ("mooncake", "0.5.22", False), ("mooncake", "0.10.0", False)],
)  # fmt: skip
def test_where_sglang_does_not_wait_and_the_operator_has_not_set_it(
    backend: str, release: str, off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("0", "1"):
        monkeypatch.setenv(EARLY_SENDS, value)
        assert not switch_off_early_sends(backend, release)
        assert os.environ[EARLY_SENDS] == value
    del os.environ[EARLY_SENDS]
    assert bool(switch_off_early_sends(backend, release)) == off
    assert os.environ.get(EARLY_SENDS) == ("0" if off else None)


def says_what_is_set(rank: Rank) -> None:
    rank.report.reasons.append(f"{rank.side}: {os.environ.get(EARLY_SENDS)}")


SAYS_SO = ["prefill 0: INFO sglang-mixkv", "prefill: 0"]


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_a_prefill_rank_sets_it_and_says_so(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = backend == "mooncake" and sglang_version() != "0.5.21"
    expected = ["prefill: None"] if waits else SAYS_SO
    monkeypatch.delenv(EARLY_SENDS, raising=False)
    faults = {(side, 0): says_what_is_set for side in ("prefill", "decode")}
    special = Special(faults=faults, before={("prefill", 0): keep_lines(EARLY_SENDS)})
    outcome = run(Case(1, 1, backend=backend, requests=(Request(8),), special=special))
    assert outcome.wrong == []
    assert [line[:28] for line in outcome.prefill[0].reasons] == expected
    assert outcome.decode[0].reasons == ["decode: None"]
