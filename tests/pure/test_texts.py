"""The full text of each error message, checked once.

Other tests check codes and values, so that a reworded message changes only this file. Messages
that need SGLang are checked in tests/protocol: failed starts in test_hooks.py, refused requests in
test_rooms.py. The log texts of notes are in test_series.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from rig.process.answers import serving

pytest.importorskip("aiohttp")

from sglang_mixkv.channel import data_plane
from sglang_mixkv.channel.handshake import Row, Target
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.config import resolve
from sglang_mixkv.decode import plan
from sglang_mixkv.draft import layout
from sglang_mixkv.engine import prefill_http
from sglang_mixkv.engine.prefill_http import Names
from sglang_mixkv.errors import MixKVError


def ask(status: int, body: bytes) -> None:
    with serving(lambda _: (status, body)) as address:
        asyncio.run(prefill_http.fetch(address, Names()))


ROW = Row(
    PROTOCOL, "0.4.0", "0.5.23", b"prefill_", "10.0.0.1", 7, "", 1, 0, 0, (), "mooncake",
    Target(0, 4, layer_ids=False, even=True), 1, None, None,
)  # fmt: skip
TEXTS: dict[str, Callable[[], object]] = {
    "[MIXKV-PAIR-04] expected attention-TP sizes where one divides the other; got prefill 2, "
    "decode 3. As it is, some decode ranks would find no complete set of prefill ranks. Change "
    "--tp or --attn-dp-size on one side.":
        lambda: layout.readers_of(2, 3),
    "[MIXKV-PAIR-04] expected a number of KV heads that divides, or is divided by, the "
    "attention-TP size 4; got 3 heads. As it is, SGLang could not load the model, and no rank's "
    "heads would be known. Choose a different --tp or --dp size on this side.":
        lambda: layout.heads_on_rank(3, 4, 0),
    "[MIXKV-PAIR-04] expected prefill ranks that together hold the drafter's KV heads [0, 1]; got "
    "[[0]]. As it is, part of the drafter's cache would never be written. Use attention-TP sizes "
    "where one divides the other.":
        lambda: layout.routes([range(1)], range(2)),
    "[MIXKV-PAIR-04] expected an instance and an address of its own for each prefill rank; got one "
    "that two ranks share. As it is, heads of one of them would never be read. Restart the prefill "
    "server.":
        lambda: plan.judge([ROW, ROW], ROW, serve_mismatch=False),
    "[MIXKV-PAIR-01] expected sglang-mixkv in every process of the prefill server; got none in the "
    "rank at 10.0.0.1:7. As it is, its draft KV would be missing, or land in the target's pages. "
    "Start prefill with --enable-mixkv on every node.":
        lambda: plan.make_plan([{"rank_ip": "10.0.0.1", "rank_port": 7}], {}, ROW),
    "[MIXKV-PAIR-01] it does not run sglang-mixkv, but this server does: it would write the "
    "drafter's rows into the target's pages. Start both with --enable-mixkv, or both without.":
        lambda: ask(404, b""),
    "[MIXKV-PAIR-01] no row of h:1. Start every node of the prefill server with --enable-mixkv.":
        lambda: ask(409, b"no row of h:1"),
    "[MIXKV-PAIR-02] its facts cannot be read: Input data was truncated. Install releases of "
    "sglang-mixkv with a common protocol on both sides.":
        lambda: prefill_http.read_rows(b""),
    "[MIXKV-START-04] expected a variable that the plugin reads; got SGLANG_MIXKV_PATIENSE. "
    "As it is, it would have no effect. Unset it; the closest match is SGLANG_MIXKV_PATIENCE.":
        lambda: resolve(None, {"SGLANG_MIXKV_PATIENSE": "1"}),
    "[MIXKV-START-04] expected SGLANG_MIXKV_PATIENCE to be a number from 0.1 to 60; got 'nan'. "
    "As it is, the server would not run as configured. Correct it, or leave it out: "
    "the default is 1.0.":
        lambda: resolve(None, {"SGLANG_MIXKV_PATIENCE": "nan"}),
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_an_error(text: str) -> None:
    with pytest.raises(MixKVError) as refused:
        TEXTS[text]()
    assert str(refused.value) == text


def test_the_text_of_a_backend_that_cannot_start() -> None:
    assert str(data_plane.refused("an engine to start", "none")) == (
        "[MIXKV-START-06] expected an engine to start beside SGLang's; got none. As it is, "
        "draft KV cannot be read. See the transport's messages above."
    )
