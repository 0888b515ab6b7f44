"""A request with an invalid bootstrap room is rejected with HTTP 400 on every path into a server.

The tests find these paths in SGLang's source, so that a path added by a new release fails a test.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import zmq
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode
from sglang.srt.managers import data_parallel_controller, io_struct
from sglang.srt.managers.data_parallel_controller import DataParallelController
from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_mixkv.engine.seams import HOOKS
from sglang_mixkv.guards.room_reuse import around_dispatch, around_intake

HOME = Path(io_struct.__file__).parents[1]

# ---------------------------------------------------------------- paths in SGLang's source


@cache
def uses() -> dict[str, set[str]]:
    """Map each SGLang function that handles requests (`Class.method`) to the names of the functions
    that it calls and of the attributes that it reads (with a leading dot)."""
    found: dict[str, set[str]] = {}

    def walk(node: ast.AST, name: str) -> Iterator[None]:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                inner = f"{name}.{child.name}".lstrip(".")
            if isinstance(child, ast.Call):
                found.setdefault(name, set()).add(ast.unparse(child.func).rpartition(".")[2])
            if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
                found.setdefault(name, set()).add(f".{child.attr}")
            yield from walk(child, inner)

    for folder in "managers", "entrypoints", "session", "ray", "observability":
        for path in (HOME / folder).rglob("*.py"):
            if any(word in (text := path.read_text()) for word in ("bootstrap_room", "Req")):
                list(walk(ast.parse(text), ""))
    return found


def users_of(*names: str) -> set[str]:
    return {function for function, used in uses().items() if used & {*names}}


HOOKED = {".".join(target.split(".")[-2:]) for target in HOOKS}
BEHIND = {
    "GenerateReqInput._normalize_bootstrap_params", "TokenizerManager._init_req_state",
    "DataParallelController.follow_bootstrap_room_scheduler", "Scheduler.handle_generate_request",
    "Scheduler.handle_embedding_request",
}  # fmt: skip
"""The plugin wraps each of these, so the room is checked before they use it."""
READERS = {
    # run after _normalize_bootstrap_params and _init_req_state
    "GenerateReqInput.__getitem__", "TokenizerManager._create_tokenized_object",
    # run after handle_generate_request
    "Scheduler._handle_generate_request", "Session.create_req", "Req.build_rebootstrap_payload",
    "Req.log_time_stats",
    # pass the room unchanged to generate_request
    "OpenAIServingChat._convert_to_internal_request",
    "OpenAIServingCompletion._convert_to_internal_request",
    "OpenAIServingResponses.create_responses",
    # add the room to traces, which start in _init_req_state or later
    "TraceReqContext.__getstate__", "TraceReqContext.copy_for_thread",
    "TraceReqContext.trace_req_start",
}  # fmt: skip


def test_every_reader_of_a_room_number_comes_after_a_check() -> None:
    assert BEHIND <= HOOKED
    assert users_of(".bootstrap_room") - BEHIND - READERS == set()


def test_front_ends_reach_schedulers_only_through_the_tokenizer() -> None:
    """Only TokenizerManager makes and sends tokenized requests, and only after it has made the
    request's state. (smg's gRPC servers also make some, which the scheduler's hook checks.)"""
    kinds = {name for name in vars(io_struct) if "Tokenized" in name}
    assert kinds == {f"{batch}Tokenized{kind}ReqInput" for batch in ("", "Batch")
                     for kind in ("Generate", "Embedding")}  # fmt: skip
    made = users_of(*kinds, "tokenized_generate_req_type", "batch_tokenized_generate_req_type")
    sends = {"_send_one_request", "_send_batch_request"}
    assert made == {
        "TokenizerManager._create_tokenized_object", "TokenizerManager._send_batch_request"
    }  # fmt: skip
    begun = {"TokenizerManager.generate_request", "TokenizerManager._handle_batch_request"}
    assert users_of(*sends) == begun == users_of("_init_req_state")
    assert users_of("_handle_batch_request") == {"TokenizerManager.generate_request"}


def test_a_scheduler_accepts_requests_in_two_methods_only() -> None:
    takes = "handle_generate_request", "handle_embedding_request"
    assert users_of(*takes) == {
        "Scheduler.handle_batch_generate_request", "Scheduler.handle_batch_embedding_request",
        "Scheduler._dispatch_tokenized_mm_requests",
    }  # fmt: skip
    inner = {f"Scheduler._{name}" for name in takes} & set(uses())
    assert users_of(*(name.rpartition(".")[2] for name in inner)) <= BEHIND
    made = users_of("Req", "_create_generation_req", "req_factory", "create_req")
    own = {"DynamicChunkSizer._profile_prefill_latency"}  # SGLang's own request, without a transfer
    made -= {"Scheduler._create_generation_req", "Session.create_req"} | own
    assert made <= BEHIND | inner


# ---------------------------------------------------------------- requests

TOP = (1 << 63) - 1
ROOMS: tuple[Any, ...] = (None, -1, TOP + 1, "7", 7.0, True, [7])
HERE = {"bootstrap_room": 7, "bootstrap_host": "h", "bootstrap_port": 8998}
WRONG = [
    *({**HERE, "bootstrap_room": room} for room in ROOMS),
    *({"bootstrap_room": room, "bootstrap_host": FAKE_BOOTSTRAP_HOST} for room in ROOMS),
    {**HERE, "bootstrap_port": 0}, {**HERE, "bootstrap_host": ""},
]  # fmt: skip
RIGHT = [HERE, {"bootstrap_room": TOP, "bootstrap_host": FAKE_BOOTSTRAP_HOST}]


def tokenized(kind: str, **fields: Any) -> Any:
    given: dict[str, Any] = dict.fromkeys(
        ("input_text", "input_ids", "input_embeds", "mm_inputs", "token_type_ids"),
    )  # fmt: skip
    given |= {"sampling_params": SamplingParams(), "rid": "a", "http_worker_ipc": "ipc://worker"}
    if kind == "Generate":
        names = "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"
        given |= dict.fromkeys((*names, "stream")) | fields
    else:
        del given["input_embeds"]
    return getattr(io_struct, f"Tokenized{kind}ReqInput")(**given)


@pytest.fixture
def wire() -> Iterator[tuple[Any, Any]]:
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as to:
        to.linger = 0  # otherwise an unread answer blocks the end of the context
        to.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
        yield SenderWrapper(to), pull


def taken(request: Any, sender: Any, mode: str) -> bool:
    """Return True if a scheduler's rank accepts the request."""
    original = MagicMock()
    scheduler = SimpleNamespace(
        disaggregation_mode=DisaggregationMode(mode),
        ipc_channels=SimpleNamespace(send_to_tokenizer=sender),
    )
    around_intake(original, scheduler, request, mm_input_error=None)
    calls = [((scheduler, request), {"mm_input_error": None})]
    assert original.call_args_list in ([], calls)
    return bool(original.call_args_list)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_all_ranks_of_a_scheduler_reject_the_same_requests(
    wire: tuple[Any, Any], mode: str
) -> None:
    """SGLang's tokenizer turns a rejection into HTTP 400. Only a scheduler's first rank has a
    socket."""
    sender, pull = wire
    requests = [(tokenized("Generate", **one), False) for one in WRONG]
    requests += [(tokenized("Generate", **one), True) for one in RIGHT]
    for request, is_right in [*requests, (tokenized("Embedding"), False)]:
        for rank in sender, SenderWrapper(None):
            assert taken(request, rank, mode) == is_right
        if not is_right:
            assert pull.poll(20_000)
            answer = io_struct.sock_recv(pull)
            assert type(answer) is io_struct.AbortReq
            assert (answer.rid, answer.http_worker_ipc) == ("a", "ipc://worker")
            assert answer.finished_reason["type"] == "abort"
            assert answer.finished_reason["status_code"] == HTTPStatus.BAD_REQUEST
            text = answer.finished_reason["message"]
            assert text.startswith("[MIXKV-PAIR-09]")
            assert "to the router" in text
    assert not pull.poll(0)


def test_decode_rejects_a_request_without_a_host(wire: tuple[Any, Any]) -> None:
    for mode in "prefill", "decode":
        request = tokenized("Generate", **{**HERE, "bootstrap_host": None})
        assert taken(request, wire[0], mode) == (mode == "prefill")


def test_a_request_that_cannot_be_routed_goes_to_any_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that the guard refuses goes to a DP rank that is alive, where the scheduler rejects
    it. Rank 1 of 0 to 2 is down. SGLang routes requests with valid rooms."""
    sent: list[tuple[int, Any]] = []
    monkeypatch.setattr(data_parallel_controller, "sock_send", lambda *one: sent.append(one))
    controller = DataParallelController.__new__(DataParallelController)
    controller.workers = [0, 1, 2]
    controller.status, controller._active_workers = [True, False, True], [0, 1, 2]
    controller.round_robin_counter = 0
    follow = partial(
        around_dispatch, DataParallelController.follow_bootstrap_room_scheduler, controller
    )
    for room in -1, TOP + 1, -TOP:
        request = tokenized("Generate", **{**HERE, "bootstrap_room": room})
        follow(request)
        ((worker, got),) = sent
        assert worker in (0, 2)
        assert got is request
        sent.clear()
    for room in 7, 8, TOP:
        follow(tokenized("Generate", **{**HERE, "bootstrap_room": room}))
    assert [worker for worker, _ in sent] == [7 % 3, 8 % 3, TOP % 3]
