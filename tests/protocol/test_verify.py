"""`--mixkv-verify checksum`: one wrong byte anywhere fails the request, with both values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rig.model import Cache, Case, Request
from rig.rank import Rank
from rig.ring import run

from sglang_mixkv.config import Config
from sglang_mixkv.decode.source import Sizes
from sglang_mixkv.errors import MixKVError

pytestmark = pytest.mark.transports(every=6)

REQUESTS = (Request(23), Request(8, chunk_pages=1), Request(9, prefix_pages=1, chunk_pages=2))
VERIFY = {"verify": "checksum"}
LAYERS = Cache("mha", layers=3, heads=4)
SHAPES = {
    "P2-D1": Case(2, 1, requests=REQUESTS),
    "P1-D2": Case(1, 2, requests=REQUESTS),
    "P4-D1": Case(4, 1, requests=REQUESTS),
    "P2-D2": Case(2, 2, requests=REQUESTS),
    "no drafter": Case(2, 1, draft=None, requests=REQUESTS),
    "gqa": Case(2, 1, target=Cache("mha", layers=2, heads=4), requests=REQUESTS),
    "pp": Case(1, 1, prefill_pp=2, requests=REQUESTS),
    "window": Case(2, 1, draft_window=6, requests=REQUESTS),
    "windows": Case(2, 1, draft=LAYERS, draft_window=6, draft_full=1, requests=REQUESTS),
    "replicas": Case(4, 2, draft=Cache("mha", heads=2), requests=REQUESTS),
}


def verified(name: str, **extra: Any) -> Case:
    config = {**VERIFY, **extra.pop("config", {})}
    return replace(SHAPES[name], extra={"config": config, **extra})


@pytest.mark.parametrize("mode", ["direct", "packed"])
@pytest.mark.parametrize("name", SHAPES)
def test_right_bytes_pass(name: str, mode: str) -> None:
    outcome = run(verified(name, config={"draft_transfer": mode}))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
    assert outcome.total("rooms_verified") == SHAPES[name].decode_tp * len(REQUESTS)


def test_stock_s_flag_is_ours_where_layouts_differ() -> None:
    """--disaggregation-enable-kv-checksum: stock compares equal layouts, ours the others."""
    from sglang.srt.runtime_context import get_disagg

    def stock_flag(rank: Rank) -> None:
        assert not get_disagg().disaggregation_enable_kv_checksum
        rank.plugin._compares = True

    for name, rooms in (("P2-D1", 3), ("P1-D2", 6), ("P2-D2", 0)):
        case = verified(name, config={"verify": "off"})
        case.extra["faults"] = {("decode", r): stock_flag for r in range(case.decode_tp)}
        outcome = run(case)
        assert outcome.wrong == []
        assert outcome.total("rooms_verified") == rooms


def flip(component: str) -> Callable[[Rank], None]:
    """Change one bit of a request's page just before the decode rank completes it."""

    def inject(rank: Rank) -> None:
        from rig import model

        page = int(model.page_tables(rank.case, "decode")[0][-1])
        real, seen = rank.plugin.verifier.problem, []

        def problem(asked: Any) -> str | None:
            seen.append(1)
            if len(seen) == 1:
                row = rank.pools[component][0][page]
                byte = ctypes.c_uint8.from_address(row.ctypes.data + row.nbytes - 1)
                byte.value ^= 1
            return real(asked)

        rank.plugin.verifier.problem = problem

    return inject


@pytest.mark.parametrize("component", ["target", "draft"])
@pytest.mark.parametrize("name", ["P2-D1", "P1-D2", "P2-D2"])
def test_one_wrong_bit_fails_the_request(name: str, component: str) -> None:
    outcome = run(verified(name, faults={("decode", 0): flip(component)}))
    first = outcome.decode[0]
    assert first.status == ["failed", "success", "success"]
    assert f"KV checksum mismatch: {component} entry 0" in outcome.reasons
    assert "sent 0x" in outcome.reasons
    assert "decode holds 0x" in outcome.reasons
    assert [line for line in outcome.wrong if "decode rank 0" not in line] == []


def test_a_room_is_any_uint64() -> None:
    """On both sides, and in the checksums' own message."""
    outcome = run(verified("P2-D1", rooms=[(1 << 64) - 1, 1 << 63, (1 << 63) + 1]))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
    assert outcome.total("rooms_verified") == 3
    assert outcome.total("messages_dropped") == 0


def test_a_prefill_with_attention_cp_is_not_compared() -> None:
    """Asked for by our flag it is refused by name; by SGLang's, as there, nothing is compared."""

    def inject(rank: Rank) -> None:
        side, facts = rank.plugin, rank.plugin.local.facts
        sizes = Sizes(attn_tp=2, attn_cp=2, dp=1, pp=1)
        with pytest.raises(MixKVError, match="does not know attention CP"):
            side.learn("host:1", sizes, facts, cold=False)
        side.config, side._compares = Config(), True
        assert side.learn("host:1", replace(sizes, attn_cp=1), facts, cold=False).verify
        assert not side.learn("host:1", sizes, facts, cold=False).verify

    outcome = run(verified("no drafter", faults={("decode", 0): inject}))
    assert outcome.wrong == []


def test_without_digests_nothing_starts() -> None:
    """A digest that is lost fails the request: nothing is taken for verified."""

    def lose(rank: Rank) -> None:
        rank.manager.send_digest = lambda *_: None

    outcome = run(verified("P2-D1", faults={("prefill", 1): lose}))
    assert outcome.decode[0].status == ["failed"] * 3
    assert "prefill rank 1 sent no checksums" in outcome.reasons


def test_a_stranger_s_digest_is_dropped() -> None:
    from sglang_mixkv.protocol.extension import Digest, encode

    def send(rank: Rank) -> None:
        message = [encode(Digest(100, 7, (), ()))]
        assert rank.manager.may_pass(message) is False

    outcome = run(verified("P2-D1", faults={("decode", 0): send}))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
    assert outcome.total("messages_dropped") == 1
