"""Not opted in, SGLang is as it was: its own classes, its own right and wrong bytes."""

from __future__ import annotations

import pytest
from protocol.model import Cache, Case, Request
from protocol.ring import run


def stock(prefill_tp: int, decode_tp: int, **kwargs: object) -> Case:
    return Case(prefill_tp, decode_tp, prefill_mixkv=False, decode_mixkv=False, **kwargs)


def test_classes_are_sglangs_own() -> None:
    from sglang.srt.disaggregation.mooncake import conn
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path="dummy", disaggregation_mode="decode"), role="tokenizer")
    found = {k: get_kv_class(TransferBackend.MOONCAKE, k) for k in KVClassType}
    assert found[KVClassType.MANAGER] is conn.MooncakeKVManager
    assert found[KVClassType.SENDER] is conn.MooncakeKVSender
    assert found[KVClassType.RECEIVER] is conn.MooncakeKVReceiver
    assert found[KVClassType.BOOTSTRAP_SERVER] is conn.MooncakeKVBootstrapServer


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equal_tp_is_right(tp: int) -> None:
    outcome = run(stock(tp, tp))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (4, 2)])
def test_gather_is_wrong_without_an_error(prefill_tp: int, decode_tp: int) -> None:
    """The fault this project exists for, and proof that the comparison sees it."""
    outcome = run(stock(prefill_tp, decode_tp))
    assert outcome.statuses == {"success"}
    assert outcome.wrong
    assert all("draft entry" in wrong for wrong in outcome.wrong)


def test_scatter_is_wrong_at_low_page_numbers() -> None:
    """At low page numbers the stray bytes stay inside the pool; elsewhere the session dies."""
    requests = (Request(8), Request(4))
    outcome = run(stock(1, 2, requests=requests, shuffled=False))
    assert outcome.statuses == {"success"}
    assert any("draft entry" in wrong for wrong in outcome.wrong)


@pytest.mark.parametrize("heads", [1, 2])
def test_heads_replicated_on_both_sides_are_right(heads: int) -> None:
    assert run(stock(4, 2, draft=Cache("mha", heads=heads))).wrong == []
