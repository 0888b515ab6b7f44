"""A whole rank, without its sockets: the gate, then SGLang's own loop and parsers behind it.

One input is a few messages. They go through the receive that the plugin wraps into the body of
SGLang's control thread, taken out of its thread; what ends that body would have ended the
thread. Then, on the prefill side, every room that was let in is sent to by the real methods
with a transport that only notes where it was asked to write.

Findings: an exception in the loop; a write outside what the peer that owns the room registered;
anything changed of a bystander that no message named.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
from mutate import unpack

TESTS = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(TESTS))
conftest = importlib.import_module("protocol.conftest")  # sets what SGLang's import reads

HOST, PORT, SESSION, ROOM = "10.9.9.9", 17009, "10.9.9.9:17010", 7
MAX_PAGES = 512


def load() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for module in ("sglang.srt.disaggregation.mooncake", "sglang_mixkv.engine"):
        importlib.import_module(module)


def cases() -> dict[str, Any]:
    """Name -> case of the protocol ring."""
    from protocol.model import Case, Request

    def packed(config: dict | None = None, **changed: Any) -> Case:
        extra = {"config": {"draft_transfer": "packed", "staging_mb": 1, **(config or {})}}
        return Case(2, 1, requests=(Request(23), Request(8)), extra=extra, **changed)

    cold = packed({"on_draft_mismatch": "cold"})
    cold.extra.update(cold=True, facts={"decode": _another_drafter})
    return {
        "plain": packed({"verify": "checksum"}),
        "hybrid": packed(hybrid=True),
        "no-draft": packed(hybrid=True, draft=None),
        "cold": cold,
    }


def _another_drafter(manager: Any) -> None:
    draft = msgspec.structs.replace(manager.facts.draft, architecture="Another")
    manager.facts = msgspec.structs.replace(manager.facts, draft=draft, topk=4)


def rank_of(side: str, name: str) -> Any:
    """A rank of the ring in this process, its manager started."""
    from protocol.ring import Rank, free_port

    case = cases()[name]
    up = threading.Event()
    up.set()  # a decode rank would wait for the prefill's bootstrap server
    case.extra.update(bootstrap_up=[up], all_sent=threading.Event())
    case.extra["config"]["draft_transfer"] = "direct"
    rank = Rank(case, side, 0, [free_port()])
    rank.start_manager()
    return rank


class End(BaseException):
    """No more messages: ends the body of the thread. No error that anything would catch."""


def unexpected(*_: Any, **__: Any) -> None:
    """In the place of logger.exception: what the plugin only logs, and drops, is a finding."""
    error = sys.exc_info()[1]
    assert error is not None
    raise RuntimeError("unexpected") from error


class Feed:
    """A socket that delivers one input's messages."""

    def __init__(self) -> None:
        self.messages: Iterator[list[bytes]] = iter(())

    def recv_multipart(self) -> list[bytes]:
        for message in self.messages:
            return message
        raise End


def body_of(manager: Any, start: str, feed: Feed) -> Callable[[], None]:
    """The function that `manager.start()` hands to its control thread."""
    taken: list[Callable[[], None]] = []

    class Taken(threading.Thread):
        def start(self) -> None:
            taken.append(self._target)  # type: ignore[attr-defined]

    socket, threads = manager.server_socket, list(manager._worker_threads)
    manager.server_socket = feed
    with mock.patch.object(threading, "Thread", Taken):
        getattr(manager, start)()
    manager.server_socket, manager._worker_threads = socket, threads
    return taken[0]


class Inline:
    """An executor without threads."""

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        future.set_result(call(*args, **kwargs))
        return future


class Bench:
    """One rank; call it with inputs."""

    tables: tuple[str, ...] = ()

    def __init__(self, side: str, name: str) -> None:
        self.rank = rank_of(side, name)
        self.manager = self.rank.manager
        self.feed = Feed()
        self.body = body_of(self.manager, f"start_{side}_thread", self.feed)
        self.told: list[tuple[str, int]] = []
        self.manager._send_multipart_locked = self._note
        note = SimpleNamespace(send=lambda host, port, _: self._note(host, port))
        self.manager.replies = self.manager.notices = note
        for module in ("gate", "shared"):
            logger = importlib.import_module(f"sglang_mixkv.engine.{module}").logger
            logger.exception = unexpected

    def _note(self, endpoint: str, *_: Any, **__: Any) -> None:
        self.told.append(endpoint)

    def deliver(self, messages: list[list[bytes]]) -> None:
        self.feed.messages = iter(messages)
        try:
            self.body()
        except End:
            return
        raise AssertionError("the control thread has returned")

    def reset(self) -> None:
        for name in self.tables:
            getattr(self.manager, name).clear()
        self.told.clear()

    def __call__(self, data: bytes) -> None:
        messages = unpack(data)
        self.reset()
        self.deliver([list(message) for message in messages])
        self.check(messages)

    def check(self, messages: list[list[bytes]]) -> None:
        raise NotImplementedError


class PrefillBench(Bench):
    """The bystander: a decode rank at HOST whose room 7 is under way."""

    tables = (
        "transfer_infos", "decode_kv_args_table", "request_status", "peers", "grants",
        "open_rooms", "rooms_seen", "rejected_rooms", "failure_records", "session_failures",
        "req_to_decode_prefix_len", "state_layout_rejections", "state_strides_validated",
        "failed_sessions", "_deferred_ack_targets", "_deferred_ack_poisoned_rooms", "unreadable",
    )  # fmt: skip

    def __init__(self, name: str, registration: list[bytes], metadata: list[bytes]) -> None:
        super().__init__("prefill", name)
        self.registered: dict[str, Any] = {}  # session -> what it said when it was admitted last
        self._admit, self.manager._admit = self.manager._admit, self._note_admitted
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.transferring, self.failed = KVPoll.Transferring, KVPoll.Failed
        who = [HOST.encode(), str(PORT).encode(), SESSION.encode()]
        self.deliver([
            [registration[0], *who, *registration[4:]],
            [str(ROOM).encode(), *who, *metadata[4:10]],
        ])  # fmt: skip
        self.peer = self.manager.peers[SESSION]
        self.info = self.manager.decode_kv_args_table[SESSION]
        self.room = self.manager.transfer_infos[ROOM][SESSION]
        self.writes: list[tuple[int, int]] = []
        self.manager.engine = SimpleNamespace(batch_transfer_sync=self._write)

    def _note_admitted(self, info: Any) -> Any:
        frames = self.manager.last_registration
        peer = self._admit(info)
        wire = importlib.import_module("sglang_mixkv.protocol.extension")
        self.registered[info.mooncake_session_id] = wire.decode(frames)
        return peer

    def _write(self, _: str, __: Any, dst: Any, lengths: Any) -> int:
        self.writes += zip(map(int, dst), map(int, lengths), strict=True)
        return 0

    def reset(self) -> None:
        super().reset()
        self.registered.clear()
        manager = self.manager
        sent = importlib.import_module("sglang_mixkv.prefill.sent")
        manager.next_reap, manager.last_registration = 0.0, None
        manager.peers[SESSION] = self.peer
        manager.decode_kv_args_table[SESSION] = self.info
        manager.transfer_infos[ROOM] = {SESSION: self.room}
        manager.request_status[ROOM] = self.transferring
        manager.open_rooms[ROOM] = sent.Sent()

    def check(self, messages: list[list[bytes]]) -> None:
        manager = self.manager
        named = any(HOST.encode() in frame for message in messages for frame in message)
        if not named:
            assert manager.request_status[ROOM] == self.transferring, "a bystander's room"
            assert manager.transfer_infos[ROOM] == {SESSION: self.room}, "a bystander's room"
            assert manager.peers[SESSION] is self.peer, "a bystander's plan"
            assert manager.decode_kv_args_table[SESSION] is self.info, "a bystander's addresses"
            assert not any(HOST in str(one) for one in self.told), "a bystander was told"
        for room, infos in list(manager.transfer_infos.items()):
            for session, info in infos.items():
                if session in self.registered and not info.is_dummy:
                    self._send(room, session, info, self.registered[session])

    def _send(self, room: int, session: str, info: Any, extension: Any) -> None:
        """What a transfer thread does with the last chunk of this room."""
        manager, registered = self.manager, self.manager.decode_kv_args_table[session]
        if session in manager.state_layout_rejections:
            return
        pages = info.dst_kv_indices[:MAX_PAGES]
        src = np.zeros(len(pages), np.int32)
        self.writes.clear()
        manager.request_status[room] = self.transferring
        manager.current.chunk = SimpleNamespace(
            room=room, index_slice=slice(0, len(src)), prefill_kv_indices=src
        )
        manager.send_kvcache(
            session, src, registered.dst_kv_ptrs, pages, Inline(),
            dst_layer_ids=registered.dst_kv_layer_ids,
            dst_kv_item_len=registered.dst_kv_item_len,
            dst_attn_tp_size=registered.dst_attn_tp_size,
        )  # fmt: skip
        kinds = len(manager.kv_args.state_types)
        indices = [np.zeros(1, np.int32) for _ in range(kinds)]
        manager.maybe_send_extra(info, indices, Inline(), registered)
        manager.request_status[room] = self.transferring
        manager.send_aux(info, 0, registered.dst_aux_ptrs)
        self._check_writes(registered, extension)

    def _check_writes(self, registered: Any, extension: Any) -> None:
        aux = [n * extension.aux_rows for n in extension.facts.aux_item_lens]
        ranges = [
            *zip(registered.dst_kv_ptrs, extension.kv_data_lens, strict=True),
            *zip(registered.dst_aux_ptrs, aux, strict=True),
            extension.staging,
        ]
        for ptrs, lens in zip(registered.dst_state_data_ptrs, extension.state_lens, strict=True):
            ranges += zip(ptrs, lens, strict=True)
        for start, length in self.writes:
            inside = any(a <= start and start + length <= a + size for a, size in ranges)
            assert inside, f"{length} bytes at {start:#x} are outside what the peer registered"


class DecodeBench(Bench):
    """Rooms 7, of prefill ranks 0 and 1 with aux row 1, and 8, the bystander, of rank 5."""

    tables = ("request_status", "expected", "failure_records", "prefill_response_tracker")

    def __init__(self) -> None:
        super().__init__("decode", "plain")
        from sglang.srt.disaggregation.base.conn import KVPoll
        from sglang_mixkv.engine.shared import Expected

        self.waiting = KVPoll.WaitingForInput
        self.expected = {
            7: Expected(frozenset({0, 1}), frozenset({0, 1}), 1),
            8: Expected(frozenset({5}), frozenset({5}), 2),
        }
        self.aux = [row.copy() for row in self.rank.aux]

    def reset(self) -> None:
        super().reset()
        for room, expected in self.expected.items():
            self.manager.request_status[room] = self.waiting
            self.manager.expected[room] = dataclasses.replace(expected)
            self.manager.prefill_response_tracker[room] = set()
            self.manager.required_prefill_response_num_table[room] = len(expected.senders)
        for row, before in zip(self.rank.aux, self.aux, strict=True):
            row[:] = before

    def check(self, messages: list[list[bytes]]) -> None:
        manager = self.manager
        if not any(_number(m[0]) == 8 and _number(m[2]) == 5 for m in messages if len(m) > 2):
            assert manager.request_status[8] == self.waiting, "a bystander's room"
        assert set(manager.request_status) == set(self.expected), "a room that nobody opened"
        named = {_number(m[1]) for m in messages if m[0] == b"AUX_DATA" and len(m) > 1}
        for now, before in zip(self.rank.aux, self.aux, strict=True):
            changed = set(np.unique(np.nonzero(now != before)[0]).tolist())
            assert changed <= {self.expected[n].aux_row for n in named & {7, 8}}, "another aux row"


def _number(frame: bytes) -> int | None:
    try:
        return int(frame)
    except ValueError:
        return None


def bench(name: str) -> Bench:
    """The bench of a target, filled from the recorded messages of its case."""
    load()
    if name == "decode":
        return DecodeBench()
    seeds = Path(__file__).parent / "seeds" / "prefill"
    messages = [unpack(p.read_bytes())[0] for p in sorted(seeds.glob(f"{name}0-message-*"))]
    manager_rank = [m for m in messages if m[0] == b"None"]
    metadata = [m for m in messages if m[0].isdigit() and m[4]]
    return PrefillBench(name, manager_rank[0], metadata[0])
