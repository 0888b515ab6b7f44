"""What arrives at the control ports is not trusted: whoever sends it, it stays the sender's.

Each message below was read by SGLang's own threads, or changed another peer's room, before the
guard that its test names.
"""

from __future__ import annotations

import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import zmq
from rig import faults as faults_of_ring
from rig import wire as frames_of
from rig.faults import TWO_ROUNDS, case
from rig.model import Case, Request
from rig.rank import Rank
from rig.ring import Outcome, run

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.protocol import extension as wire

Change = Callable[[list[bytes]], list[bytes]]


pytestmark = pytest.mark.transports(every=5)


@pytest.fixture(autouse=True)
def short_timeouts() -> Iterator[None]:
    with faults_of_ring.short_timeouts():
        yield


def meddle(operation: str, change: Change) -> Callable[[Rank], None]:
    return faults_of_ring.meddle(operation, lambda message: [change(message)])


def replaced(name: str, frame: bytes) -> Change:
    return lambda message: frames_of.replaced(message, name, frame)


def recovered(outcome: Outcome, *words: str) -> None:
    """Round one failed on both sides with these words as the reason, round two was right."""
    assert outcome.wrong == []
    for report in outcome.decode:
        assert report.status == ["failed", "success"]
    for report in outcome.prefill:
        assert report.status[-1] == "success"
    for word in words:
        assert word in outcome.reasons


STRANGER = {"endpoint": b"127.0.0.9", "port": b"17009", "session": b"127.0.0.9:17010"}


def int_lists(*lists: list[int]) -> bytes:
    parts = [np.array(numbers, np.int32).tobytes() for numbers in lists]
    return struct.pack(f"<{1 + len(parts)}I", len(parts), *map(len, parts)) + b"".join(parts)


def interrupt(messages: list[list[bytes]]) -> Callable[[Rank], None]:
    """Messages to this rank's own port, sent once it has the first room's metadata."""

    def inject(rank: Rank) -> None:
        real, sent = rank.manager.may_pass, []

        def passing(frames: list[bytes]) -> bool:
            passed = real(frames)
            if frames_of.unguarded(frames)[0] == b"100" and not sent:
                sent.append(1)
                _shout(rank.manager.rank_port, messages)
            return passed

        rank.manager.may_pass = passing

    return inject


def of_a_stranger(pages: bytes) -> list[bytes]:
    """Metadata for room 100."""
    return frames_of.metadata(
        room=b"100", **STRANGER, pages=pages, aux_index=b"1", required=b"1", prefix=b"0",
        is_dummy=b"0",
    )  # fmt: skip


def _shout(port: int, messages: list[list[bytes]]) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"tcp://127.0.0.1:{port}")
        for message in messages:
            socket.send_multipart(message)


def send_late(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
    """After all that was shouted has been read."""
    time.sleep(0.3)
    sender.send(chunk, state)


# ---------------------------------------------------------------- rooms of others


FORGED: dict[str, Callable[[], list[bytes]]] = {
    "abort without an address": lambda: [b"ABORT", b"100"],
    "abort from elsewhere": lambda: [b"ABORT", b"100", b"127.0.0.9", b"17009", b"1"],
    "metadata of a stranger": lambda: of_a_stranger(b"\0" * 4),
    "metadata that cannot be read": lambda: of_a_stranger(b"\0" * 3),
    "metadata cut short": lambda: of_a_stranger(b"")[:5],
}


@pytest.mark.parametrize("what", FORGED)
def test_a_room_is_ended_by_its_own_decode_ranks_alone(what: str) -> None:
    faults = {("prefill", 0): interrupt([FORGED[what]()])}
    outcome = run(case(2, 1, faults=faults, send=send_late))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}


@pytest.mark.parametrize(
    "message",
    [
        [b"status", b"100", b"0", b"9", b"a rank that was never asked"],
        [b"AUX_DATA", b"100", b"0", b"2", b"\0\0\0\4", b"1234"],
        [b"AUX_DATA", b"55", b"0", b"2", b"\0\0\0\4", b"1234"],
    ],
    ids=["failure", "another room's aux row", "aux row of no room"],
)
def test_a_decode_rank_hears_only_who_was_asked(message: list[bytes]) -> None:
    told_as = frames_of.status(*message[1:]) if message[0] == b"status" else message

    def inject(rank: Rank) -> None:
        cls = rank.kv_class["receiver"]
        real = cls.send_metadata

        def told(self: Any, *args: Any, **kwargs: Any) -> None:
            real(self, *args, **kwargs)
            _shout(rank.manager.rank_port, [told_as])

        cls.send_metadata = told

    outcome = run(case(2, 1, faults={("decode", 0): inject}, send=send_late))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
    assert outcome.total("messages_dropped") > 0


# ---------------------------------------------------------------- what would be written, or raise


def hybrid(change: Callable[[list[bytes]], list[bytes]]) -> Case:
    faults = {("decode", 0): meddle("send_metadata", change)}
    return Case(2, 1, hybrid=True, extra={"faults": faults}, **TWO_ROUNDS)


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        (int_lists([1 << 20]), "mamba rows"),
        (int_lists([-1]), "mamba rows"),
        (int_lists([1], [1]), "kinds of state"),
        (int_lists([]), "could not send"),
        (b"", "could not send"),
    ],
    ids=["outside", "negative", "a kind too many", "none of the kind", "none"],
)
def test_state_goes_into_rows_of_the_peers_pool(indices: bytes, words: str) -> None:
    """Stock writes wherever the index points, and its transfer thread dies of a missing one."""
    outcome = run(hybrid(replaced("states", indices)))
    # The row of the failed request itself: the other prefill rank has sent its half of it.
    outcome.decode[0].wrong = [w for w in outcome.decode[0].wrong if not w.endswith("pages [1]")]
    recovered(outcome, words)


def smaller_grant(message: list[bytes]) -> list[bytes]:
    """A region for one token: the rows of the others would lie behind it."""
    grant = wire.decode_grant(message[-1])
    assert grant is not None
    return [*message[:-1], wire.encode(msgspec.structs.replace(grant, tokens=1))]


def test_a_region_is_as_large_as_the_request() -> None:
    faults = {("decode", 0): meddle("send_metadata", smaller_grant)}
    outcome = run(case(2, 1, faults=faults, config={"draft_transfer": "packed"}))
    recovered(outcome, "a region of 1 tokens")


def earlier_grant(message: list[bytes]) -> list[bytes]:
    """Draft KV from a page on that is before the drafter's window."""
    grant = wire.decode_grant(message[-1])
    assert grant is not None
    more = {"first_page": grant.first_page - 1, "tokens": grant.tokens + 4}
    return [*message[:-1], wire.encode(msgspec.structs.replace(grant, **more))]


def test_a_region_begins_where_the_window_does() -> None:
    """Both sides know from it where in the region each entry lies."""
    faults = {("decode", 0): meddle("send_metadata", earlier_grant)}
    broken = case(2, 1, faults=faults, config={"draft_transfer": "packed"})
    recovered(run(replace(broken, draft_window=3)), "begin at 1")


METADATA = {
    "prefix inside a page": (replaced("prefix", b"1"), "ends inside a page"),
    "another address": (replaced("port", b"17009"), "it registered from"),
    "device pages": (replaced("device_pages", b"\0" * 4), "device pages"),
}


@pytest.mark.parametrize("what", METADATA)
def test_metadata_that_stock_would_have_used(what: str, backend: str) -> None:
    if what == "device pages" and backend != "mooncake":
        pytest.skip("has no such frame")
    change, words = METADATA[what]
    faults = {("decode", 0): meddle("send_metadata", change)}
    outcome = run(case(2, 1, faults=faults))
    assert outcome.wrong == []
    assert outcome.prefill[0].status == outcome.decode[0].status == ["failed", "success"]
    assert words in outcome.reasons


def test_a_prefix_longer_than_the_prompt_fails_at_once() -> None:
    """Stock never sends a chunk, and waits."""

    def send(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
        if sender.bootstrap_room == 100:
            sender.init(-1, sender.aux_index)
        else:
            sender.send(chunk, state)

    recovered(run(case(2, 1, send=send)), "longer than the prompt")


REGISTRATIONS = {
    "session without a port": replaced("session", b"9100\x7f"),
    "another DCP geometry": lambda m: replaced("dcp_size", b"2")(replaced("kv_item_len", b"7")(m)),
    "an aux buffer less": lambda m: replaced("aux_ptrs", frames_of.named(m, "aux_ptrs")[8:])(m),
    "addresses beyond memory": lambda m: replaced(
        "kv_ptrs", b"\xff" * len(frames_of.named(m, "kv_ptrs"))
    )(m),
}


@pytest.mark.parametrize("what", REGISTRATIONS)
def test_registrations_that_would_end_a_thread(what: str) -> None:
    change = REGISTRATIONS[what]
    faults = {("decode", 0): meddle("_register_kv_args", change)}
    extra = {"faults": faults}
    recovered(run(Case(1, 1, hybrid=True, draft=None, extra=extra, **TWO_ROUNDS)))


def only_one_request(
    fault: Callable[[Rank], None], side: str, when: str = "faults", **kwargs: Any
) -> Outcome:
    """A request whose peer's last registration is wrong: it fails, and only its own rows were
    written (of its state by the other prefill rank)."""
    extra = {when: {(side, 0): fault}, "send": send_late}
    config = {"config": {"draft_transfer": "packed"}}
    outcome = run(Case(2, 1, requests=(Request(8),), extra=extra | config, **kwargs))
    assert [w for w in outcome.wrong if not ("state" in w and w.endswith("pages [1]"))] == []
    assert outcome.decode[0].status == outcome.prefill[0].status == ["failed"]
    return outcome


def test_after_a_registration_that_cannot_be_read_the_one_before_does_not_count() -> None:
    """Its memory may be another process's by now."""
    fault = faults_of_ring.meddle(
        "_register_kv_args", lambda m: [m, replaced("dcp_size", b"+1")(m)]
    )
    outcome = only_one_request(fault, "decode")
    assert "DCP size is not a number" in outcome.reasons


REGISTERED_ANEW = {
    "pages": ({"kv_data_lens": (96, 96, 128, 128)}, {}, "of a pool of 1"),
    "stock's pages": ({"kv_data_lens": (96, 96)}, {"draft": None}, "of a pool of 1"),
    "aux rows": ({"aux_rows": 1}, {}, "aux row 1 of 1"),
    "stock's aux rows": ({"aux_rows": 1}, {"draft": None}, "aux row 1 of 1"),
    "state": ({"state_lens": ((48, 48, 128, 128),)}, {"hybrid": True}, "mamba rows"),
    "staging": ({"staging": (1 << 40, 8)}, {}, "a region inside the 8 bytes"),
}


@pytest.mark.parametrize("what", REGISTERED_ANEW)
def test_a_room_stays_inside_what_its_peer_registered_last(what: str) -> None:
    """The room was let in, and lay inside, when its peer registered less."""
    changed, kwargs, words = REGISTERED_ANEW[what]

    def inject(rank: Rank) -> None:
        manager, kept = rank.kv_class["manager"], []
        real = manager.may_pass

        def passing(self: Any, frames: list[bytes]) -> bool:
            passed = real(self, frames)
            first = frames_of.unguarded(frames)[0]
            if first == b"None" and not kept:
                kept.append(frames)
            elif first == b"100":
                said = msgspec.structs.replace(wire.decode_extension(kept[0][-1]), **changed)
                _shout(self.rank_port, [[*kept[0][:-1], wire.encode(said)]])
            return passed

        manager.may_pass = passing

    assert words in only_one_request(inject, "prefill", "before", **kwargs).reasons


def test_a_prefill_server_has_no_billion_ranks() -> None:
    """Stock, and the routes, make lists of them, in the scheduler's loop."""

    def inject(rank: Rank) -> None:
        from sglang.srt.disaggregation.common.conn import PrefillServerInfo

        for sizes in ((1 << 60, 1, 1, 1), (2, 1, 1, 1 << 60), (0, 1, 1, 1), (2, 1, 1, -1)):
            with pytest.raises(MixKVError, match="has sizes"):
                rank.manager._resolve_rank_mapping(PrefillServerInfo(*sizes, None, None, True))

    outcome = run(case(2, 1, faults={("decode", 0): inject}))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}


def test_an_unlimited_number_of_strangers_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refused stranger is answered; no address is kept, and of the rooms a bounded number."""
    from sglang_mixkv.prefill import rooms

    monkeypatch.setattr(rooms, "MAX_WAITING", 100)
    stranger = {"endpoint": b"127.0.0.9", "session": b"127.0.0.9:5", "required": b"1"}
    messages = [
        frames_of.metadata(
            room=b"%d" % (1000 + n), port=b"%d" % (20000 + n), prefix=b"0", **stranger
        ) for n in range(300)
    ]  # fmt: skip

    def inject(rank: Rank) -> None:
        interrupt(messages)(rank)
        real = rank.manager.check_integrity

        def check() -> list[str]:
            kept = [a for a in rank.manager._socket_cache if "127.0.0.9" in a]
            too_many = [f"{n} rooms" for n in [len(rank.plugin.rooms._rooms)] if n > 101]
            return [*real(), *kept, *too_many]

        rank.manager.check_integrity = check

    outcome = run(case(2, 1, faults={("prefill", 0): inject}, send=send_late))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}


def test_a_thousand_malformed_messages_hurt_nobody() -> None:
    """A stranger's registrations and metadata, as a decode rank's but for one frame, and noise.
    Over NIXL they hold what NIXL knows that rank by, whole and broken."""
    rng, all_heard = random.Random(1), "all_heard"

    def malformed(message: list[bytes]) -> list[bytes]:
        for name, frame in STRANGER.items():
            message = frames_of.replaced(message, name, frame)
        at = rng.randrange(frames_of.place(message, "endpoint"), len(message))
        frame = rng.choice([b"", b"x", message[at][:-1], message[at] * 2, rng.randbytes(9)])
        return [*message[:at], frame, *message[at + 1 :]][: rng.choice([at + 1, 99])]

    def before(rank: Rank) -> None:
        """The manager hears from its first moment on."""
        cls = rank.kv_class["manager"]
        real, heard = cls.may_pass, []
        setattr(rank, all_heard, threading.Event())

        def passing(self: Any, frames: list[bytes]) -> bool:
            passed = real(self, frames)
            heard.append(frames)
            if len(heard) == 2:  # decode's registration and metadata
                own = [malformed(rng.choice(heard)) for _ in range(1000)]
                _shout(self.rank_port, [*own, *faults_of_ring.NOISE])
            if len(heard) == 1000:
                getattr(rank, all_heard).set()
            return bool(passed)

        cls.may_pass = passing

    def send(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
        if hasattr(rank, all_heard):
            assert getattr(rank, all_heard).wait(30)
        sender.send(chunk, state)

    with mock.patch.dict(os.environ, SGLANG_DISAGGREGATION_WAITING_TIMEOUT="60"):  # a while
        outcome = run(case(2, 1, before={("prefill", 0): before}, send=send))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
