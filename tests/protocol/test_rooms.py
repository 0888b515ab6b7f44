"""If two requests use a room number at once, only the second fails; the first is correct."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rig.ring.model import Cache, Case, Request, page_tables
from rig.ring.rank import Rank, reason_of, send
from rig.ring.run import run
from rig.ring.special import Special
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_mixkv.engine.receiver import DraftReceiver
from sglang_mixkv.engine.sender import DraftSender
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.guards.room_reuse import RoomUse, around_numbering, around_request

REQUESTS = Request(23, chunk_pages=1), Request(23), Request(11)


@pytest.mark.transports(1)
@pytest.mark.parametrize(
    ("prefill", "decode", "kind", "bad"),
    [(2, 1, "mla", 100), (1, 2, "mla", 100), (2, 1, "mha", 100), (2, 1, "mla", 1 << 64),
     (1, 2, "mha", -1)],
)  # fmt: skip
def test_a_request_with_an_unusable_room_number_fails_alone(
    prefill: int, decode: int, kind: str, bad: int
) -> None:
    target = Cache("mla", layers=2, k_bytes=24) if kind == "mla" else Cache("mha", 2, heads=2)
    special = Special(rooms=[100, bad, (1 << 63) - 1], failed_rooms_stay_clean=True)
    rounds = ((0, 1), (2,))
    outcome = run(Case(prefill, decode, target, requests=REQUESTS, rounds=rounds, special=special))
    assert outcome.wrong == []
    for report in outcome.prefill + outcome.decode:
        assert report.status == ["success", "failed", "success"]
        assert all("[MIXKV-PAIR-09] expected a bootstrap_room" in one for one in report.reasons)
    assert outcome.total("rooms_total", "failed", "reused") == decode
    assert outcome.total("rooms_total", "warm") == 2 * decode
    assert outcome.total("rooms_total", "cold") == outcome.total("fails_sent_total") == 0


TOP = (1 << 63) - 1


@pytest.mark.parametrize(
    ("rooms", "is_taken"),
    [(0, True), (TOP, True), ([0, TOP], True), ([7, None], False), (-1, False), (TOP + 1, False),
     (None, False), ([None], False), ({}, False),
     (1 << 64, False), pytest.param(10**5000, False, id="huge"), (True, False), (1.0, False),
     ("1", False), ([[1]], False), ([7, TOP + 1], False), ([-1, 7], False), ([7, "8"], False)],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_an_invalid_room_number_is_refused_on_arrival(
    rooms: Any, is_taken: bool, mode: str
) -> None:
    """A health check with an invalid room is refused as well. So is a batch, if the last of its
    rooms, which SGLang numbers upward from the first one, is out of bounds."""
    for host in "h", FAKE_BOOTSTRAP_HOST:
        many = isinstance(rooms, list)
        check_taken(mode, is_taken, [[1]] * len(rooms) if many else [1], rooms, host)
        if not many:
            check_taken(mode, is_taken and rooms < TOP, [[1], [2]], rooms, host)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_batch_shares_a_number_only_in_health_checks(mode: str) -> None:
    for host in "h", FAKE_BOOTSTRAP_HOST:
        check_taken(mode, host != "h", [[1], [1]], [7, 7], host)


@pytest.mark.parametrize(
    ("host", "port", "on_prefill", "on_decode"),
    [("prefill-0.example", None, True, True), ("10.0.0.1", 1, True, True),
     ("[::1]", 65535, True, True), (None, 8998, True, False),
     ("", 8998, False, False), ("a\n", 8998, False, False),
     ("h" * 256, 8998, False, False), (7, 8998, False, False),
     (["h"], 8998, False, False), ("h", 0, False, False), ("h", 65536, False, False),
     ("h", -1, False, False), ("h", "8998", False, False), ("h", True, False, False),
     ("h", 8998.0, False, False)],
)  # fmt: skip
@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_an_unusable_prefill_address_is_refused_on_arrival(
    host: Any, port: Any, on_prefill: bool, on_decode: bool, batch: int, mode: str
) -> None:
    """One such address in a batch is enough to refuse the whole batch."""
    prompts: Any = [[1]] * batch if batch else [1]
    rooms, hosts, ports = list(range(batch)), ["h"] * batch, [8998] * batch
    given: tuple[Any, ...] = (
        (rooms, [*hosts[1:], host], [*ports[1:], port]) if batch else (7, host, port)
    )
    check_taken(mode, on_prefill if mode == "prefill" else on_decode, prompts, *given)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("wrong", range(3))
@pytest.mark.parametrize("count", [0, 1, 3])
def test_lists_not_as_long_as_the_batch_are_refused(wrong: int, count: int, mode: str) -> None:
    given: list[list[Any]] = [[7, 8], ["h", "h"], [1, 1]]
    given[wrong] = (given[wrong] * 2)[:count]
    check_taken(mode, False, [[1], [2]], *given)


def check_taken(
    mode: str, is_taken: bool, prompts: Any, room: Any, host: Any, port: Any = None
) -> None:
    """Check whether a request is accepted. A refusal is a ValueError, which SGLang turns into HTTP
    400, and leaves no request state."""
    request = GenerateReqInput(
        input_ids=prompts, bootstrap_room=room, bootstrap_host=host, bootstrap_port=port
    )
    numbering: Any = partial(
        around_numbering, GenerateReqInput._normalize_bootstrap_params, request
    )
    request._normalize_bootstrap_params = numbering  # type: ignore[method-assign]
    manager = TokenizerManager.__new__(TokenizerManager)
    manager.rid_to_state, manager.enable_trace = {}, False
    manager.disaggregation_mode = DisaggregationMode(mode)
    with nullcontext() if is_taken else pytest.raises(MixKVError, match="MIXKV-PAIR-09"):
        request.normalize_batch_and_arguments()
        around_request(TokenizerManager._init_req_state, manager, request)
    assert bool(manager.rid_to_state) == is_taken


def taking(mode: str) -> tuple[Any, Any]:
    """Make the tokenizer manager of a prefill or decode server, and a function that sends it a
    request or a batch with these room numbers."""
    manager = TokenizerManager.__new__(TokenizerManager)
    manager.rid_to_state, manager.enable_trace = {}, False
    manager.disaggregation_mode = DisaggregationMode(mode)

    def take(room: Any, host: str = "h", **given: Any) -> Any:
        prompts = [[1]] * len(room) if isinstance(room, list) else [1]
        request = GenerateReqInput(
            input_ids=prompts, bootstrap_room=room, bootstrap_host=host, **given
        )
        request.normalize_batch_and_arguments()
        return around_request(TokenizerManager._init_req_state, manager, request)

    return manager, take


@pytest.mark.parametrize("again", [7, [7, 8], [8, 7]])
@pytest.mark.parametrize("first", [7, [7, 9], [9, 7]])
def test_decode_refuses_a_number_that_is_in_use(first: Any, again: Any) -> None:
    """Only decode checks this. A number is free once SGLang has removed its request, even if the
    request's state still exists, or a later request has the same rid."""
    manager, take = taking("prefill")
    take(first)
    take(again)
    manager, take = taking("decode")
    take(first)
    held = dict(manager.rid_to_state)
    with pytest.raises(MixKVError, match=r"MIXKV-PAIR-09.*got 7, which is in use\. "):
        take(again)
    assert manager.rid_to_state == held, "a refused request left state behind"
    take(10)
    manager.rid_to_state = dict.fromkeys(held)
    take(again)


def test_a_request_that_sglang_rejects_reserves_no_number() -> None:
    manager, take = taking("decode")
    manager.rid_to_state["a"] = "another's"
    with pytest.raises(ValueError, match=r"(?i)duplicate"):
        take(11, rid="a")
    del manager.rid_to_state["a"]
    take(11, rid="a")
    with pytest.raises(MixKVError, match=r"MIXKV-PAIR-09.*got 11"):
        take(11, rid="b")


def test_the_hook_passes_sglangs_arguments_and_result_through() -> None:
    manager, _ = taking("prefill")
    original = MagicMock(return_value="SGLang's")
    request = SimpleNamespace(rid="a", bootstrap_room=7)
    assert around_request(original, manager, request, 1, created=2) == "SGLang's"
    original.assert_called_once_with(manager, request, 1, created=2)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_parallel_samples_are_refused_and_warm_ups_are_not(mode: str) -> None:
    _, take = taking(mode)
    many = {"sampling_params": {"n": 2}}
    for host in "h", FAKE_BOOTSTRAP_HOST:
        with pytest.raises(MixKVError, match=r"MIXKV-PAIR-09.*n = 2"):
            take(12, host, **many)
    for _ in range(2):
        take(13, FAKE_BOOTSTRAP_HOST)


def test_a_batch_numbered_beyond_the_bounds_is_refused() -> None:
    for first, is_taken in ((TOP - 1, True), (TOP, False)):
        request = GenerateReqInput(input_ids=[[1], [2]], bootstrap_room=first, bootstrap_host="h")
        request.normalize_batch_and_arguments()
        manager = SimpleNamespace(rid_to_state={}, disaggregation_mode=DisaggregationMode.PREFILL)
        with nullcontext() if is_taken else pytest.raises(MixKVError, match="outside"):
            around_request(lambda *_: None, manager, request)


def test_a_second_clear_does_not_affect_a_numbers_next_use() -> None:
    """SGLang clears a failed receiver twice: when it fails, and when its pages are released. At the
    second call, the number may belong to the next request."""
    kind = type("Receiver", (DraftReceiver, CommonKVReceiver), {})
    manager = CommonKVManager.__new__(CommonKVManager)
    empty = (
        "request_status", "required_prefill_response_num_table", "failure_records",
        "_deferred_ack_targets", "_staging_outstanding",
    )  # fmt: skip
    manager.__dict__.update({name: {} for name in empty})
    manager.addr_to_rooms_tracker = defaultdict(set)
    manager.prefill_response_tracker = defaultdict(set)
    manager.failure_lock, manager._deferred_ack_poisoned_rooms = threading.Lock(), set()
    manager.defer_decode_allocation, manager.deferred_bootstrap = False, None
    manager.get_session_id, manager.local = lambda: "", SimpleNamespace(mode="decode")
    first = kind(manager, "h:1", 7)
    manager.request_status[7] = first.conclude_state = KVPoll.Failed
    first.clear()
    second = kind(manager, "h:1", 7)
    before = second.poll()
    first.clear()
    assert second.poll() == before


class Stock:
    """A stand-in for SGLang's sender or receiver that can only be cleared."""

    def clear(self) -> None: ...


@pytest.mark.parametrize("record", [None, "of another number", "its own"])
@pytest.mark.parametrize("state", [None, KVPoll.Success, KVPoll.Failed])
@pytest.mark.parametrize("mixin", [DraftReceiver, DraftSender])
def test_a_failed_request_never_ends_like_a_successful_one(
    mixin: type, state: Any, record: Any
) -> None:
    """A failed request is closed with a reason even if none was recorded. Without a reason, decode
    would count the request as warm, and neither side would notify the other side's channel."""
    use: Any = object.__new__(type("Use", (mixin, Stock), {}))
    ended = MagicMock()
    use.kv_mgr = SimpleNamespace(
        failure_records={7 if record == "its own" else 8: record} if record else {},
    )  # fmt: skip
    use.bootstrap_room, use.conclude_state, use.handle = 7, state, object()
    use.channel = SimpleNamespace(close=ended, end=ended)
    use.clear()
    ((handle, reason),) = [call.args for call in ended.call_args_list]
    assert handle is use.handle
    assert bool(reason) == (state == KVPoll.Failed)
    assert record != "of another number" or record not in reason
    if reason and record == "its own" and mixin is DraftReceiver:
        assert reason == record


def again(rank: Rank, sender: Any, chunk: Any, state: Any) -> None:
    """Send the request again, as after a retraction on decode, before prefill's scheduler has seen
    the first one's Success."""
    send(rank, sender, chunk, state)
    tables = rank.manager.transfer_infos  # SGLang's worker removes the first request's entry
    if sender.curr_idx == sender.num_kv_indices:
        while sender.poll() != KVPoll.Success or sender.bootstrap_room in tables:
            time.sleep(0.001)
        second = rank._sender(sender.ring_number, page_tables(rank.case, "prefill"))
        assert second.poll() == KVPoll.Bootstrapping
        second.abort()
        assert "Aborted" in reason_of(second)


@pytest.mark.transports(1)
def test_a_number_is_free_once_its_use_has_succeeded() -> None:
    outcome = run(Case(2, 1, requests=REQUESTS, special=Special(send=again)))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}


@pytest.mark.parametrize("come", [(), ("transfer_infos",), ("transfer_infos", "prefix")])
def test_the_next_use_begins_once_all_its_metadata_arrived(come: tuple[str, ...]) -> None:
    """With true retraction, a number may be reused before prefill has seen the end of its previous
    use. The new use may send only after all decode ranks' metadata have arrived."""
    tables = SimpleNamespace(
        request_status={7: KVPoll.Success},
        failure_records={},
        transfer_infos={7: {}} if come else {},
        req_to_decode_prefix_len={7: 0} if "prefix" in come else {},
    )
    use = object.__new__(RoomUse)
    use.kv_mgr, use.bootstrap_room = tables, 7
    use._move()
    status = {7: KVPoll.WaitingForInput} if "prefix" in come else {}
    assert tables.request_status == {**status, use.bootstrap_room: KVPoll.Success}
    assert use.bootstrap_room < 0
