"""Faults, each tried for real: what the request gets, and that the next one works.

In every case the first request (or some of them) meets the fault; the second round is clean
and must be right to the last byte, on servers that nobody restarted.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from protocol.model import Case, Request
from protocol.ring import Outcome, Rank, run

# The prefill's is longer: a rank that is done early opens its next room at once, and waits
# there while another rank's request still ends by the decode side's timeout (and its ABORT).
SHORT = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "25",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "4",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
}
TWO_ROUNDS = {"requests": (Request(12), Request(9)), "rounds": ((0,), (1,))}


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in SHORT.items():
        monkeypatch.setenv(name, value)
    return


def case(prefill_tp: int, decode_tp: int, **extra: Any) -> Case:
    return Case(prefill_tp, decode_tp, extra=extra, **TWO_ROUNDS)


def recovered(outcome: Outcome, *words: str) -> None:
    """Round one failed on both sides with these words as the reason, round two was right."""
    assert outcome.wrong == []
    for report in outcome.decode:
        assert report.status == ["failed", "success"]
    for report in outcome.prefill:
        assert report.status[-1] == "success"
    for word in words:
        assert word in outcome.reasons


# ---------------------------------------------------------------- the transport


def failing_transport(times: int) -> Callable[[Rank], None]:
    """batch_transfer_sync returns -1 for this rank's first calls."""

    def inject(rank: Rank) -> None:
        real, left = rank.manager.engine.batch_transfer_sync, [times]

        def broken(*args: Any) -> int:
            left[0] -= 1
            return -1 if left[0] >= 0 else real(*args)

        rank.manager.engine.batch_transfer_sync = broken

    return inject


@pytest.mark.parametrize("sender", [0, 1], ids=["target's", "draft-only"])
def test_transport_fails_once(sender: int) -> None:
    """A code other than 0 fails the request; its peer registers again and goes on."""
    faults = {("prefill", sender): failing_transport(1)}
    recovered(run(case(2, 1, faults=faults)), "Failed to send kv chunk of 100")


def test_transport_fails_always() -> None:
    faults = {("prefill", 1): failing_transport(1 << 30)}
    outcome = run(case(2, 1, faults=faults))
    assert outcome.wrong == []
    assert {s for r in outcome.decode for s in r.status} == {"failed"}


# ---------------------------------------------------------------- messages


def lose(operation: str) -> Callable[[Rank], None]:
    """This decode rank's first message of that kind is never sent."""

    def inject(rank: Rank) -> None:
        cls = rank.kv_class["receiver"]
        real, lost = cls._send_bootstrap_message, []

        def lossy(self: Any, *, bootstrap_info: Any, message: Any, operation: str) -> bool:
            if operation == inject.operation and not lost:
                lost.append(1)
                return True
            return real(self, bootstrap_info=bootstrap_info, message=message, operation=operation)

        cls._send_bootstrap_message = lossy

    inject.operation = operation
    return inject


def test_registration_lost() -> None:
    """Stock's transfer thread would die of a KeyError."""
    faults = {("decode", 0): lose("_register_kv_args")}
    recovered(run(case(2, 1, faults=faults)), "its registration never arrived")


def test_metadata_lost() -> None:
    """Both sides end by their timeouts."""
    faults = {("decode", 0): lose("send_metadata")}
    recovered(run(case(2, 1, faults=faults)), "timed out")


def meddle(operation: str, change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Rank], None]:
    """This decode rank's first message of that kind is changed on its way."""

    def inject(rank: Rank) -> None:
        cls = rank.kv_class["receiver"].__mro__[1]  # stock's: the extension is there already
        real, done = cls._send_bootstrap_message, []

        def changed(self: Any, *, bootstrap_info: Any, message: Any, operation: str) -> bool:
            if operation == inject.operation and not done:
                done.append(1)
                message = change(list(message))
            return real(self, bootstrap_info=bootstrap_info, message=message, operation=operation)

        cls._send_bootstrap_message = changed

    inject.operation = operation
    return inject


def replaced(index: int, frame: bytes) -> Callable[[list[bytes]], list[bytes]]:
    return lambda message: [*message[:index], frame, *message[index + 1 :]]


BROKEN_REGISTRATIONS = {
    "cut short": lambda m: m[:15],
    "two frames": lambda m: m[:2],
    "extension cut": lambda m: [*m[:-1], m[-1][:-3]],
    "other protocol": lambda m: [*m[:-1], m[-1][:5] + b"\x00\x63" + m[-1][7:]],
    "random bytes": replaced(6, os.urandom(33)),
    "no numbers": replaced(8, b"many"),
    "pointers missing": lambda m: [*m[:4], m[4][8:], *m[5:]],
    "one frame more": lambda m: [*m, b"more"],
    "wrong rank": replaced(7, b"7"),
}


@pytest.mark.parametrize("what", BROKEN_REGISTRATIONS)
def test_broken_registration(what: str) -> None:
    change = BROKEN_REGISTRATIONS[what]
    faults = {("decode", 0): meddle("_register_kv_args", change)}
    recovered(run(case(2, 1, faults=faults)))


BROKEN_METADATA = {
    "cut short": lambda m: m[:5],
    "one frame more": lambda m: [*m, b"more", b"yet more"],
    "pages outside": replaced(4, np.array([1 << 20, 2, 3], np.int32).tobytes()),
    "pages negative": replaced(4, np.array([-5, 2, 3], np.int32).tobytes()),
    "aux row outside": replaced(5, b"99999"),
    "other number of ranks": replaced(7, b"3"),
    "foreign grant": lambda m: [*m[:10], b"MIXKV\x00\x01" + b"\x92\x01\xcd\x10\x00"],
    "grant from nowhere": lambda m: [*m[:10], os.urandom(40)],
}


@pytest.mark.parametrize("what", BROKEN_METADATA)
def test_broken_metadata_is_answered_with_the_reason(what: str) -> None:
    faults = {("decode", 0): meddle("send_metadata", BROKEN_METADATA[what])}
    started = time.monotonic()
    outcome = run(case(2, 1, faults=faults))
    assert outcome.wrong == []
    assert outcome.decode[0].status == ["failed", "success"]
    assert "room 100" in outcome.decode[0].reasons[0]
    assert time.monotonic() - started < 30


def test_metadata_without_a_room_is_dropped() -> None:
    faults = {("decode", 0): meddle("send_metadata", replaced(0, b"room"))}
    recovered(run(case(2, 1, faults=faults)), "timed out")


def test_doubled_and_reordered_messages_are_harmless() -> None:
    def inject(rank: Rank) -> None:
        cls = rank.kv_class["receiver"]
        real = cls._send_bootstrap_message

        def doubled(self: Any, **kwargs: Any) -> bool:
            return real(self, **kwargs) and real(self, **kwargs)

        cls._send_bootstrap_message = doubled

    outcome = run(case(2, 1, faults={("decode", 0): inject}))
    assert outcome.statuses == {"success"}
    assert [w for w in outcome.wrong if "transfer_infos" not in w and "rooms_seen" not in w] == []


def shout(port_of: Callable[[Rank], int], messages: list[list[bytes]]) -> Callable[[Rank], None]:
    """Send messages to this rank's own control socket, as anybody on the network could."""

    def inject(rank: Rank) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.connect(f"tcp://127.0.0.1:{port_of(rank)}")
        for message in messages:
            socket.send_multipart(message)
        threading.Timer(5, socket.close, kwargs={"linger": 0}).start()

    return inject


NOISE = [
    [b""],
    [b"", b"", b""],
    [b"ABORT"],
    [b"ABORT", b"x", b"y"],
    [b"WATERMARK"],
    [b"STAGING_RSP", b"1"],
    [b"STAGING_REQ"],
    [b"CHUNK_READY", b"1"],
    [b"AUX_DATA", b"1", b"0", b"999", b"\0\0\0\4", b"1234"],
    [b"AUX_DATA", b"1", b"77"],
    [b"ABORT_ACK", b"x"],
    [b"100", b"4", b"99"],
    [b"100", b"x", b"0"],
    [b"None", b"127.0.0.1"],
    [b"\xff\xfe", b"\x80" * 9],
    [b"5" * 30, b"4", b"0"],
    *([os.urandom(n) for n in sizes] for sizes in ([3], [9, 1], [1] * 10, [2] * 20, [4] * 21)),
]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_noise_from_the_network(side: str) -> None:
    """Stock's bootstrap thread ends at the first two-frame message."""
    faults = {(side, 0): shout(lambda rank: rank.manager.rank_port, NOISE)}
    outcome = run(case(2, 1, faults=faults))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
    assert outcome.total("messages_dropped") >= len(NOISE) - 2


# ---------------------------------------------------------------- peers


def die_when_sending(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
    if rank.rank == 1:
        os._exit(9)
    sender.send(chunk, state)


def test_a_draft_only_sender_is_killed() -> None:
    """The target's bytes are there, the draft's never come: the request fails by timeout."""
    extra = {"send": die_when_sending}
    outcome = run(Case(2, 1, requests=(Request(12),), extra=extra))
    assert outcome.decode[0].status == ["failed"]
    assert "timed out" in outcome.decode[0].reasons[0]
    assert [w for r in outcome.decode for w in r.wrong] == []


def test_a_decode_rank_is_killed_and_the_other_is_served() -> None:
    """Two DP ranks on one prefill server: the end of one is not the other's."""

    def die(rank: Rank) -> None:
        threading.Timer(0.0, os._exit, args=(9,)).start()
        time.sleep(1)

    case = Case(
        2, 1, decode_dp=2, requests=(Request(8), Request(8), Request(12)),
        extra={"faults": {("decode", 0): die}},
    )  # fmt: skip
    outcome = run(case)
    assert outcome.decode[1].status == ["success"]
    assert outcome.decode[1].wrong == []


# ---------------------------------------------------------------- aborts and rooms


def abort_after(delay: float) -> Callable[[Rank], None]:
    """This decode rank aborts its first request some time after its metadata went out."""

    def inject(rank: Rank) -> None:
        cls = rank.kv_class["receiver"]
        real, done = cls.send_metadata, []

        def aborting(self: Any, *args: Any, **kwargs: Any) -> None:
            real(self, *args, **kwargs)
            if not done:
                done.append(1)
                time.sleep(delay)
                self.abort()

        cls.send_metadata = aborting

    return inject


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.01, 0.1])
@pytest.mark.parametrize("mode", ["direct", "packed"])
def test_abort_at_any_moment(delay: float, mode: str) -> None:
    """The aborted request's pages may hold anything, all others hold what they should."""
    outcome = run(
        case(2, 1, faults={("decode", 0): abort_after(delay)}, config={"draft_transfer": mode})
    )
    assert [w for w in outcome.wrong if "failure_records" not in w] == []
    assert outcome.decode[0].status == ["failed", "success"]


def test_the_same_room_number_again() -> None:
    outcome = run(case(2, 1, rooms=[100, 100]))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}


def test_the_same_room_number_after_a_failure() -> None:
    faults = {("prefill", 1): failing_transport(1)}
    recovered(run(case(2, 1, faults=faults, rooms=[100, 100])))


# ---------------------------------------------------------------- handshake


def unlike(side: str, **changed: Any) -> Case:
    """One side announces other facts than the other."""

    def inject(rank_cls: Any) -> None:
        import msgspec

        facts = rank_cls.facts
        draft = {k[6:]: v for k, v in changed.items() if k.startswith("draft_")}
        plain = {k: v for k, v in changed.items() if not k.startswith("draft_")}
        if draft:
            plain["draft"] = msgspec.structs.replace(facts.draft, **draft)
        rank_cls.facts = msgspec.structs.replace(facts, **plain)

    return case(2, 1, facts={side: inject}, failed_rooms_stay_clean=True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"page_size": 64}, "--page-size"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"topk": 8}, "--speculative-eagle-topk"),
        ({"aux_item_lens": (64, 8)}, "metadata rows"),
        ({"draft_total_heads": 8}, "drafter KV heads"),
        ({"draft_head_bytes": (4, 4)}, "bytes a token and head"),
        ({"draft_architecture": "Another"}, "drafter architecture"),
    ],
)
def test_unlike_servers_are_refused_with_the_flag_to_change(changed: dict, words: str) -> None:
    outcome = run(unlike("decode", **changed))
    assert outcome.wrong == []
    assert {s for r in outcome.decode for s in r.status} == {"failed"}
    assert all(words in reason for reason in outcome.decode[0].reasons)


def test_drafter_on_one_side_only() -> None:
    for prefill, decode in ((True, False), (False, True)):
        outcome = run(
            case(
                2, 1, draft_on={"prefill": prefill, "decode": decode}, failed_rooms_stay_clean=True
            )
        )
        assert [w for w in outcome.wrong if "entry" in w or "aux" in w] == []
        assert "drafter KV" in outcome.reasons
        assert {s for r in outcome.decode for s in r.status} == {"failed"}
