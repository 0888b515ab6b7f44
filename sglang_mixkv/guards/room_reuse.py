"""Refuses a request whose room number is missing or in use (as when `n` > 1 samples share one), and
a request without a prefill server.

fault   SGLang's tables (CommonKVManager, in common/conn.py under disaggregation/) cannot tell such
        requests apart
patch   none yet
until   SGLang refuses such requests itself, or its tables tell requests with one number apart

A server refuses such a request on receipt: in its tokenizer, or, if the request bypassed the
tokenizer, in its scheduler. If a number in use still gets through, for example from a client that
calls both servers directly, the request fails without affecting any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any
from weakref import WeakValueDictionary

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.io_struct import AbortReq

from sglang_mixkv.channel.actions import Note
from sglang_mixkv.errors import MixKVError, refuse

_requests: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Maps a room number to SGLang's state of the request that a decode server has accepted."""
newest: WeakValueDictionary[int, RoomUse] = WeakValueDictionary()
"""The newest sender or receiver of each number on this rank, until it is cleared."""
_own = itertools.count(-1, -1)  # SGLang's numbers are never negative


def around_numbering(original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap GenerateReqInput._normalize_bootstrap_params, which numbers a batch's rooms."""
    room = request.bootstrap_room
    if not (isinstance(room, list) or _is_number(room)):
        raise _no_number(room)
    return original(request, *args, **kwargs)


def around_request(
    original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrap TokenizerManager._init_req_state, which SGLang calls for each request; a ValueError
    becomes HTTP 400. Only decode looks for earlier requests with the number: in true retraction,
    prefill may receive a request again, with the same number, before it has answered the first."""
    rooms, is_decode = list(_rooms(request)), manager.disaggregation_mode.value == "decode"
    if getattr(request, "parallel_sample_num", 1) > 1:
        raise _refusal(f"n = {request.parallel_sample_num}, whose samples would share one")
    states, used = manager.rid_to_state, dict[int, str]()
    for rid, *where in rooms:
        if problem := _problem(is_decode, *where):
            raise problem
        room, host, _ = where
        if host == FAKE_BOOTSTRAP_HOST:
            continue
        first = _requests.get(room)
        if room in used or (first is not None and states.get(first.obj.rid) is first):
            raise _refusal(f"{room}, which is in use")
        used[room] = rid
    made = original(manager, request, *args, **kwargs)
    if is_decode:
        _requests.update({room: states[rid] for room, rid in used.items()})
    return made


def around_dispatch(
    original: Callable[..., Any], controller: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrap DataParallelController.follow_bootstrap_room_scheduler. A request without a number is
    sent to any scheduler, which refuses it."""
    follows = _is_number(getattr(request, "bootstrap_room", None))
    send = original if follows else type(controller).round_robin_scheduler
    return send(controller, request, *args, **kwargs)


def around_intake(
    original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrap Scheduler.handle_generate_request and handle_embedding_request, which also receive
    requests that bypassed SGLang's tokenizer. Each rank refuses them; the first one answers."""
    where = (getattr(request, name, None) for name in _FIELDS)
    problem = _problem(scheduler.disaggregation_mode.value == "decode", *where)
    if problem is None:
        return original(scheduler, request, *args, **kwargs)
    status = HTTPStatus.BAD_REQUEST
    reason = {"type": "abort", "status_code": status, "message": str(problem)}
    answer = AbortReq(rid=request.rid, finished_reason=reason)
    return scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)


_FIELDS = "bootstrap_room", "bootstrap_host", "bootstrap_port"


def _rooms(request: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield rid, room, host and port of each request in a batch."""
    values = [getattr(request, name, None) for name in ("rid", *_FIELDS)]
    count = len(values[0]) if isinstance(values[0], list) else 0
    lists = [one if count and isinstance(one, list) else [one] * max(1, count) for one in values]
    if any(len(one) != len(lists[0]) for one in lists):
        raise _refusal("lists that are not as long as the batch")
    yield from zip(*lists, strict=True)


def _problem(is_decode: bool, room: Any, host: Any, port: Any) -> MixKVError | None:
    """Return why the request is refused, or None. SGLang's own warm-up and health checks transfer
    nothing: they have a fake host, and may share numbers."""
    if not _is_number(room):
        return _no_number(room)
    if host == FAKE_BOOTSTRAP_HOST or _is_address(host, port, is_decode):
        return None
    expected = "a bootstrap_host, and a bootstrap_port from 1 to 65535 or none"
    return _refusal(f"{host!r:.99} and {port!r:.99}", expected)


def _no_number(room: Any) -> MixKVError:
    return _refusal("none" if room is None else f"{type(room).__name__} outside that range")


def _is_number(room: Any) -> bool:
    """Return whether the room number fits every message and table, including SGLang's."""
    return type(room) is int and 0 <= room < 1 << 63


def _is_address(host: Any, port: Any, is_decode: bool) -> bool:
    """Return whether the address is usable. Prefill needs no host, and may use its own port."""
    is_host = type(host) is str and 0 < len(host) < 256 and host.isprintable()
    is_port = type(port) is int and 0 < port < 1 << 16
    return (is_host or (host is None and not is_decode)) and (is_port or port is None)


def _refusal(got: str, expected: str = "") -> MixKVError:
    expected = expected or "a bootstrap_room from 0 to 2^63 - 1 that no other request uses"
    consequence = "it would get another request's KV, or none"
    remedy = "Send each sample as its own request, with n = 1, to the router"
    return refuse("MIXKV-PAIR-09", expected, got, consequence, remedy)


class RoomUse:
    """Mixed into senders and receivers, each of which uses a room number. A second user of a number
    fails, and so does the user of an invalid number. A failed user gets a number that no request
    has, so that SGLang's handling of its failure affects no other request."""

    leaves = False  # whether it may release its number after Success
    kv_mgr: Any  # a DraftManager, whose module imports this one
    bootstrap_room: int
    conclude_state: Any

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *args: Any, **kwargs: Any
    ) -> None:
        is_free = is_number = _is_number(bootstrap_room)
        if is_number and (first := newest.get(bootstrap_room)) is not None:
            is_free = first.kv_mgr is not mgr or first._leave()
        number = bootstrap_room if is_free else next(_own)
        super().__init__(mgr, bootstrap_addr, number, *args, **kwargs)  # type: ignore[call-arg]
        newest[number] = self
        if not is_free:
            in_use = f"{bootstrap_room}, which is in use" if is_number else ""
            problem = _refusal(in_use) if in_use else _no_number(bootstrap_room)
            mgr.record_failure(number, str(problem))
            mgr.request_status[number] = self.conclude_state = KVPoll.Failed
            if mgr.local.mode == "decode":  # prefill's requests are not counted
                mgr.local.reporter(Note("reused"))

    def _leave(self) -> bool:
        """Release the number before this use is cleared, if possible; return whether it was
        released. A sender can do so after Success: in true retraction, the next request with the
        number may start before the scheduler has polled the Success of this one."""
        if not self.leaves or super().poll() != KVPoll.Success:  # type: ignore[misc]
            return False
        self._move()
        return True

    def clear(self) -> None:
        """Clear this use, unless another use has the number now: SGLang clears a receiver when it
        fails, and again when its pages are released (_do_release)."""
        if newest.get(self.bootstrap_room) in (None, self):
            super().clear()  # type: ignore[misc]
            newest.pop(self.bootstrap_room, None)

    def _move(self) -> None:
        """Move this use to a number that no request has. If metadata of the next request has
        arrived, the old number gets the status that SGLang would have set for that request."""
        tables, room = self.kv_mgr, self.bootstrap_room
        status = tables.request_status.pop(room)
        if room in tables.transfer_infos and room in tables.req_to_decode_prefix_len:
            tables.request_status[room] = KVPoll.WaitingForInput
        self.bootstrap_room = next(_own)
        tables.request_status[self.bootstrap_room] = status
