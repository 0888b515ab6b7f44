"""Every fault that is tried on the protocol ring: one definition for the tests and for the table
that scripts/faults/table.py writes.

The first request meets the fault. The second one is clean, follows on servers that nobody
restarted by hand, and must be right to the last byte, as must every byte of every decode
buffer that is not the failed request's own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import zmq
from rig import wire
from rig.memory import RankReport
from rig.model import Case, Request
from rig.rank import NOT_YET, Rank, send, stock_class
from rig.ring import Outcome

# The prefill's is longer: a rank that is done early opens its next room at once, and waits
# there while another rank's request still ends by the decode side's timeout (and its ABORT).
BOOTSTRAP_S, WAITING_S = 25, 4
TIMEOUTS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(BOOTSTRAP_S),
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(WAITING_S),
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "3",
    "SGLANG_MIXKV_PATIENCE": "3",
}
TWO_ROUNDS = {"requests": (Request(12), Request(9)), "rounds": ((0,), (1,))}
CHUNKED = {"requests": (Request(12, chunk_pages=1), Request(9)), "rounds": ((0,), (1,))}
STALL_S = 6

Inject = Callable[[Rank], None]


@contextmanager
def short_timeouts() -> Iterator[None]:
    """SGLang's timeouts, short enough to wait for."""
    before = {name: os.environ.get(name) for name in TIMEOUTS}
    os.environ.update(TIMEOUTS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def case(prefill_tp: int = 2, decode_tp: int = 1, chunked: bool = False, **extra: Any) -> Case:
    return Case(prefill_tp, decode_tp, extra=extra, **(CHUNKED if chunked else TWO_ROUNDS))


@dataclass(frozen=True)
class Fault:
    """`name`: what goes wrong; `how`: how that is brought about; `ends`: how the request ends
    on the decode side ("either": depends on the moment); `words`: part of the reason; `next_too`:
    the second fails as well; `remains`: tables in which a copy may wait for its reaping;
    `backend`: the one that it is tried on, if not on all. Over the draft channel, `cold`: why the
    request is served cold; `stays_cold`: the next one is, too; `stocks`: reasons are SGLang's."""

    group: str
    name: str
    how: str
    case: Callable[[], Case]
    ends: str = "failed"
    words: str = ""
    next_too: bool = False
    remains: tuple[str, ...] = ()
    backend: str = ""
    cold: str = ""
    stays_cold: bool = False
    stocks: bool = False

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"


def problems(fault: Fault, outcome: Outcome) -> list[str]:
    """What should not be; empty when all is well."""
    found = []
    for report in outcome.prefill + outcome.decode:
        who = f"{report.side} {report.rank}: "
        lines = [*report.wrong, *filter(None, [report.error])]
        found += [who + line for line in lines if not any(w in line for w in fault.remains)]
        found += [who + line for line in _endings(fault, report)]
        found += [line for line in report.reasons if "unknown reason" in line and not fault.stocks]
    if fault.ends == "failed" and fault.words not in outcome.reasons:
        found.append(f"no reason says {fault.words!r}: {outcome.reasons}")
    return [*found, *_drafters(fault, outcome)]


def _drafters(fault: Fault, outcome: Outcome) -> Iterator[str]:
    """What is wrong with how warm drafters start. Today's way serves no request cold here."""
    if fault.cold and not outcome.total(f"channel_cold_{fault.cold}"):
        yield f"no request is cold for {fault.cold!r}"
    cold = [report for report in outcome.decode if report.cold]
    if fault.ends == "success" and cold and not (fault.cold or fault.stays_cold):
        yield f"a request is cold: {[report.stats for report in cold]}"
    if not fault.stays_cold and any(max(report.cold) == len(report.status) - 1 for report in cold):
        yield "the last request is cold, too"


def _endings(fault: Fault, report: RankReport) -> Iterator[str]:
    """What is wrong with how a rank's requests ended; a restarted rank knows only the last."""
    *before, last = report.status or ["nothing"]
    allowed = {"success", "failed"}
    if report.side == "decode" and fault.ends != "either":
        allowed = {fault.ends}
    if not {*before} <= allowed:
        yield f"a request that met the fault ended with {before}, not {allowed}"
    wanted = {"failed" if fault.next_too else "success"}
    if report.side == "prefill" and fault.next_too:  # a rank that met no fault has sent its part
        wanted = {"success", "failed"}
    if last not in wanted:
        yield f"the last request ended with {last}"


# ---------------------------------------------------------------- the transport


def failing_transport(times: int, written: bool = False) -> Inject:
    """batch_transfer_sync returns -1 for this rank's first calls; with `written` the bytes arrive
    all the same."""

    def inject(rank: Rank) -> None:
        left = [times]

        def breaking(real: Callable[..., int]) -> Callable[..., int]:
            def broken(*args: Any) -> int:
                left[0] -= 1
                if left[0] < 0:
                    return real(*args)
                rank.strike()
                if written:
                    real(*args)
                return -1

            return broken

        rank.on_transfer(breaking)

    return inject


def rejected(rank: Rank) -> None:
    """Mooncake rejects this rank's first asynchronous write."""
    engine, left = rank.plugin.transport.engine, [1]
    mooncake = engine.engine

    def submit(session: str, *one: int) -> int:
        if not left:
            return int(mooncake.transfer_submit_write(session, *one))
        left.clear()
        rank.strike()
        return 0

    engine.engine = Wrapped(mooncake, transfer_submit_write=submit)


def failed_later(rank: Rank) -> None:
    """It is begun and its bytes arrive, but it is said to have failed."""
    engine, left = rank.plugin.transport.engine, [1]
    mooncake = engine.engine

    def check(number: int) -> int:
        state = int(mooncake.transfer_check_status(number))
        if state == 0 or not left:
            return state
        left.clear()
        rank.strike()
        return -1

    engine.engine = Wrapped(mooncake, transfer_check_status=check)


class Wrapped:
    """Another object with some of its methods replaced."""

    def __init__(self, other: Any, **replaced: Any) -> None:
        self._other = other
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


def overflow(rank: Rank) -> None:
    """This rank's first write comes with more ranges in flight than Mooncake's TCP transport
    takes: its engine is then stuck towards that peer for good."""
    engine, first = rank.plugin.transport.engine, [1]

    def flooding(real: Callable[..., int]) -> Callable[..., int]:
        def overflowing(session: str, *ranges: list[int]) -> int:
            if first:
                first.clear()
                rank.strike()
                many = [(column * 8000)[:8000] for column in ranges]
                flood = [
                    threading.Thread(target=engine.batch_transfer_sync, args=(session, *many))
                    for _ in range(4)
                ]
                for thread in flood:
                    thread.start()
                for thread in flood:
                    thread.join()
            return int(real(session, *ranges))

        return overflowing

    rank.on_transfer(flooding)


def no_staging_memory(rank: Rank) -> None:
    """The transport cannot register one byte more."""

    def register(address: int, size: int) -> None:
        raise MemoryError(f"registering {size} bytes returned -1")

    rank.plugin.transport.register = register


# ---------------------------------------------------------------- messages


def meddle(operation: str, change: Callable[[list[bytes]], list[list[bytes]]]) -> Inject:
    """This decode rank's first message of that kind goes out as these instead, extension and
    all."""

    def inject(rank: Rank) -> None:
        cls = stock_class(rank, "receiver")  # the extension is there already
        real, done = cls._send_bootstrap_message, []

        def changed(self: Any, *, bootstrap_info: Any, message: Any, operation: str) -> bool:
            messages = [message]
            if operation == inject.operation and not done:
                done.append(1)
                rank.strike()
                messages = change(list(message))
            return all(
                real(self, bootstrap_info=bootstrap_info, message=one, operation=operation)
                for one in messages
            )

        cls._send_bootstrap_message = changed

    inject.operation = operation
    return inject


def registration_after_metadata(rank: Rank) -> None:
    """The first two messages of this decode rank to each prefill rank change places."""
    cls = stock_class(rank, "receiver")
    real, held = cls._send_bootstrap_message, {}

    def swapped(self: Any, *, bootstrap_info: Any, message: Any, operation: str) -> bool:
        port = bootstrap_info["rank_port"]
        if operation == "_register_kv_args" and port not in held:
            rank.strike()
            held[port] = message
            return True
        sent = real(self, bootstrap_info=bootstrap_info, message=message, operation=operation)
        late = held.get(port)
        if late is not None:
            held[port] = None
            real(self, bootstrap_info=bootstrap_info, message=late, operation="late")
        return sent

    cls._send_bootstrap_message = swapped


def registers_again(rank: Rank) -> None:
    """This decode rank registers anew a little after its first metadata, as after a failure."""
    cls = rank.kv_class["receiver"]
    real, done = cls.send_metadata, []

    def sending(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if not done:
            done.append(1)
            threading.Timer(0.3, self._register_kv_args).start()

    cls.send_metadata = sending


def admits_slowly(rank: Rank) -> None:
    """This prefill rank takes a second over every registration but the first."""
    real, seen = rank.plugin.peers.admit, []

    def slow(said: Any) -> Any:
        if seen:
            rank.strike()
            time.sleep(1)
        seen.append(1)
        return real(said)

    rank.plugin.peers.admit = slow


def registers_while_sending() -> Case:
    """The second registration is looked at while the first request's chunks are under way."""
    faults = {("prefill", rank): admits_slowly for rank in (0, 1)}
    return case(chunked=True, faults={**faults, ("decode", 0): registers_again}, send=hold_the_rest)


def frame(name: str, value: bytes) -> Callable[[list[bytes]], list[list[bytes]]]:
    """One frame of the message replaced."""
    return lambda m: [wire.replaced(m, name, value)]


def elsewhere(message: list[bytes]) -> list[list[bytes]]:
    """KV pointers that no buffer of the decode rank contains."""
    pointers = np.frombuffer(wire.named(message, "kv_ptrs"), np.uint64) + np.uint64(1 << 40)
    return frame("kv_ptrs", pointers.tobytes())(message)


def longer_items(message: list[bytes]) -> list[list[bytes]]:
    lengths = np.frombuffer(wire.named(message, "kv_item_lens"), np.uint64) * np.uint64(2)
    return frame("kv_item_lens", lengths.tobytes())(message)


def fewer_pointers(message: list[bytes]) -> list[list[bytes]]:
    return frame("kv_ptrs", wire.named(message, "kv_ptrs")[8:])(message)


def with_grant(extension: bytes) -> Callable[[list[bytes]], list[list[bytes]]]:
    return lambda m: [[*wire.stock(m), extension]]


def other_protocol(message: list[bytes]) -> list[list[bytes]]:
    return [[*message[:-1], message[-1][:5] + b"\x00\x63" + message[-1][7:]]]


REGISTRATIONS: dict[str, tuple[str, Callable[[list[bytes]], list[list[bytes]]], str]] = {
    "lost": ("never sent", lambda m: [], "its registration never arrived"),
    "cut short": ("without its last 6 frames", lambda m: [m[:-6]], "registration of"),
    "two frames": ("its first 2 frames: ends stock's thread", lambda m: [m[:2]], "never arrived"),
    "extension cut": ("3 bytes off the last frame", lambda m: [[*m[:-1], m[-1][:-3]]], "malformed"),
    "other protocol": ("version 99 in the extension", other_protocol, "protocol 99"),
    "random bytes": (
        "33 random bytes as state pointers",
        frame("state_ptrs", os.urandom(33)),
        "was rejected",
    ),
    "no number": (
        "'many' as the attention-TP size",
        frame("attn_tp_size", b"many"),
        "is not a number",
    ),
    "pointers missing": (
        "one KV pointer less than lengths",
        fewer_pointers,
        "as many pointers as item lengths",
    ),
    "wrong pointers": ("KV pointers + 1 TiB", elsewhere, "Failed to send kv chunk"),
    "wrong lengths": ("KV item lengths x 2", longer_items, "bytes per token"),
    "one frame more": ("a frame behind its last", lambda m: [[*m, b"more"]], "registration of"),
    "wrong rank": ("rank 7 of 1", frame("attn_tp_rank", b"7"), "attention-TP rank is 7"),
}

METADATA: dict[str, tuple[str, Callable[[list[bytes]], list[list[bytes]]], str]] = {
    "lost": ("never sent", lambda m: [], "timed out"),
    "without a room": ("'room' as the room number", frame("room", b"room"), "timed out"),
    "cut short": ("its first 5 frames", lambda m: [m[:5]], "frames"),
    "more frames": ("two frames more", lambda m: [[*m, b"more", b"yet more"]], "frames"),
    "pages outside": (
        "page 1,048,576",
        frame("pages", np.array([1 << 20, 2, 3], np.int32).tobytes()),
        "of a pool of",
    ),
    "pages negative": (
        "page -5",
        frame("pages", np.array([-5, 2, 3], np.int32).tobytes()),
        "pool of",
    ),
    "aux row outside": ("row 99,999", frame("aux_index", b"99999"), "aux row 99999"),
    "other number of ranks": (
        "3 decode ranks instead of 1",
        frame("required", b"3"),
        "shared by 3",
    ),
    "foreign grant": (
        "a region at address 4,096",
        with_grant(b"MIXKV\x00\x01\x92\xcd\x10\x00\x01"),
        "a region of",
    ),
    "random grant": ("40 random bytes as the grant", with_grant(os.urandom(40)), ""),
    "grant of another version": (
        "version 99 in the grant",
        with_grant(b"MIXKV\x00\x63\x92\x01\x01"),
        "protocol 99",
    ),
}


def doubled(rank: Rank) -> None:
    """Everything that this decode rank says it says twice."""
    cls = stock_class(rank, "receiver")
    real = cls._send_bootstrap_message

    def twice(self: Any, **kwargs: Any) -> bool:
        rank.strike()
        return real(self, **kwargs) and real(self, **kwargs)

    cls._send_bootstrap_message = twice


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
    [b"NixlMsgGuard"],
    [b"NixlMsgGuard", b"None", b"127.0.0.1"],
    [b"NixlMsgGuard", b"x", b"", b"", b"", b""],
    [b"KV_STATUS"],
    [b"KV_STATUS", b"100", b"x", b"0"],
    [b"5" * 30, b"4", b"0"],
    *([os.urandom(n) for n in sizes] for sizes in ([3], [9, 1], [1] * 10, [2] * 20, [4] * 21)),
]


def shout(rank: Rank, messages: list[list[bytes]] = NOISE) -> None:
    """Send messages to this rank's own control socket, as anybody on the network could."""
    rank.strike()
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(f"tcp://127.0.0.1:{rank.manager.rank_port}")
    for message in messages:
        socket.send_multipart(message)
    threading.Timer(5, socket.close, kwargs={"linger": 0}).start()


# ---------------------------------------------------------------- peers


def die_when_sending(prefill_rank: int, rank: Rank, sender: Any, chunk: Any, state: Any) -> None:
    """SIGKILL in the middle of a request: its first chunk has left, the others never will."""
    send(rank, sender, chunk, state)
    if rank.rank == prefill_rank and not rank.life and sender.curr_idx == 1:
        time.sleep(0.3)
        rank.strike()
        os.kill(os.getpid(), signal.SIGKILL)


def hold_the_rest(rank: Rank, sender: Any, chunk: Any, state: Any) -> Any:
    """Chunks of the first request leave half a second apart."""
    return send_after(0.5 if sender.curr_idx else 0.0, rank, sender, chunk, state)


def send_after(delay: float, rank: Rank, sender: Any, chunk: Any, state: Any) -> Any:
    """Send a chunk of the first request so long after the one before."""
    first = sender.bootstrap_room == rank.rooms()[0]
    if first and time.monotonic() < getattr(sender, "sent_at", 0.0) + delay:
        return NOT_YET
    send(rank, sender, chunk, state)
    sender.sent_at = time.monotonic()
    return None


def die_when_receiving(rank: Rank) -> None:
    """SIGKILL as soon as the first byte of the first request has arrived."""
    entries = rank.pools["target"]
    before = [entry.copy() for entry in entries]

    def watch() -> None:
        while all((old == new).all() for old, new in zip(before, entries, strict=True)):
            time.sleep(0.001)
        rank.strike()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def stall_when_sending(prefill_rank: int, rank: Rank, sender: Any, chunk: Any, state: Any) -> None:
    """SIGSTOP in the middle of a request, SIGCONT after STALL_S."""
    send(rank, sender, chunk, state)
    first = sender.bootstrap_room == rank.rooms()[0]
    if first and rank.rank == prefill_rank and sender.curr_idx == 1:
        subprocess.Popen(["sh", "-c", f"sleep {STALL_S}; kill -CONT {os.getpid()}"])
        rank.strike()
        os.kill(os.getpid(), signal.SIGSTOP)


def bootstrap_away(rank: Rank) -> None:
    """The bootstrap server's port closes, and opens again with the same table."""
    old = rank.bootstrap
    while not old._is_ready():  # a rank that registers into a closed port is never found
        time.sleep(0.01)
    table = {name: value for name, value in vars(old).items() if name not in OF_THE_SERVER}

    class Back(rank.kv_class["bootstrap_server"]):
        def run(self) -> None:
            vars(self).update(table)
            super().run()

    def back() -> None:
        time.sleep(STALL_S)
        rank.bootstrap = Back("127.0.0.1", rank.ports[0])

    old.close()
    rank.strike()
    threading.Thread(target=back, daemon=True).start()


def start_when_struck(rank: Rank) -> None:
    """This rank's manager is made after the fault."""
    while not rank.case.extra["struck"].value:
        time.sleep(0.01)


OF_THE_SERVER = ("app", "thread", "lock", "_loop", "_runner", "_background_tasks")


def send_around_bootstrap_away(rank: Rank, sender: Any, chunk: Any, state: Any) -> Any:
    """The bootstrap server goes after the first chunk; the last one comes when it is back."""
    last = sender.curr_idx == 2
    sent = send_after(STALL_S + 1 if last else 0.0, rank, sender, chunk, state)
    if sender.bootstrap_room == rank.rooms()[0] and sender.curr_idx == 1 and rank.rank == 0:
        bootstrap_away(rank)
    return sent


# ---------------------------------------------------------------- aborts


def abort_before_metadata(rank: Rank) -> None:
    """The scheduler drops a request for which no pages have been allocated yet."""
    cls = rank.kv_class["receiver"]
    real, done = cls.init, []

    def aborting(self: Any, *args: Any) -> None:
        real(self, *args)
        if not done:
            done.append(1)
            rank.strike()
            self.abort()

    cls.init = aborting


def abort_after(delay: float, count: int = 1) -> Inject:
    """This decode rank aborts its first requests some time after their metadata went out."""

    def inject(rank: Rank) -> None:
        cls = rank.kv_class["receiver"]
        real, done = cls.send_metadata, []

        def aborting(self: Any, *args: Any, **kwargs: Any) -> None:
            real(self, *args, **kwargs)
            if len(done) < count:
                done.append(1)
                time.sleep(delay)
                rank.strike()
                self.abort()

        cls.send_metadata = aborting

    return inject


def prefill_aborts(after_chunks: int, rank: Rank, sender: Any, chunk: Any, state: Any) -> None:
    """The prefill's scheduler drops the first request after so many chunks."""
    if sender.bootstrap_room != rank.rooms()[0]:
        send(rank, sender, chunk, state)
        return
    if sender.curr_idx == after_chunks:
        rank.strike()
        sender.abort()
        return
    send(rank, sender, chunk, state)
    if sender.curr_idx == after_chunks == 3:
        rank.strike()
        sender.abort()


STORM = tuple(Request(12 + i % 5) for i in range(24))


def storm() -> Case:
    """24 rooms at once, 23 of them aborted, then a clean one."""
    return Case(
        2, 1, requests=(*STORM, Request(9)), rounds=(tuple(range(24)), (24,)),
        extra={"faults": {("decode", 0): abort_after(0.0, count=23)}},
    )  # fmt: skip


def room_in_use() -> Case:
    return Case(
        2, 1, requests=(Request(12), Request(9), Request(7)), rounds=((0,), (1,), (2,)),
        extra={"faults": {("prefill", 1): failing_transport(1)}, "rooms": [100, 100, 101]},
    )  # fmt: skip


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

    return case(facts={side: inject}, failed_rooms_stay_clean=True)


UNLIKE: list[tuple[str, dict[str, Any], str]] = [
    ("page size", {"page_size": 64}, "--page-size"),
    ("KV dtype", {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype"),
    ("speculative algorithm", {"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
    ("top-k", {"topk": 8}, "--speculative-eagle-topk"),
    ("metadata rows", {"aux_item_lens": (64, 8)}, "metadata rows"),
    ("drafter's heads", {"draft_total_heads": 8}, "drafter KV heads"),
    (
        "drafter's head size or dtype",
        {"draft_head_bytes": (4, 4)},
        "drafter bytes per token and head",
    ),
    ("drafter's architecture", {"draft_architecture": "Another"}, "drafter architecture"),
]


# ---------------------------------------------------------------- the list


def _decode_fault(inject: Inject, **extra: Any) -> Callable[[], Case]:
    return lambda: case(faults={("decode", 0): inject}, **extra)


def _prefill_fault(rank: int, inject: Inject, **extra: Any) -> Callable[[], Case]:
    return lambda: case(faults={("prefill", rank): inject}, **extra)


def _kills() -> Iterator[Fault]:
    group = "kills and stalls"
    yield Fault(
        group, "decode killed while receiving, restarted",
        "SIGKILL at the first byte that arrives, then a new process with a new session",
        lambda: case(chunked=True, faults={("decode", 0): die_when_receiving}, send=hold_the_rest,
                     restart="decode"),
        words="Failed to send kv chunk",
    )  # fmt: skip
    for rank, name in enumerate(("target's", "draft-only")):
        yield Fault(
            group, f"prefill killed while sending ({name} sender), restarted",
            "SIGKILL of that rank between two chunks; SGLang ends its server; a new one on the "
            "same ports",
            lambda rank=rank: case(chunked=True, send=partial(die_when_sending, rank),
                                   restart="prefill"),
            words="Lost connection",
        )  # fmt: skip
    for rank, name in enumerate(("target's", "draft-only")):
        yield Fault(
            group, f"{name} sender stalls",
            f"SIGSTOP of that rank between two chunks, SIGCONT after {STALL_S} s",
            lambda rank=rank: case(
                chunked=True, send=partial(stall_when_sending, rank), lockstep=True
            ),
            words="" if rank == 0 else "timed out",
        )  # fmt: skip
    yield Fault(
        group, "bootstrap server away, then back, before a request",
        f"its port closed for {STALL_S} s",
        _prefill_fault(0, bootstrap_away, before={("decode", 0): start_when_struck}),
        ends="success",
    )  # fmt: skip
    yield Fault(
        group, "bootstrap server away, then back, during a transfer",
        f"its port closed for {STALL_S} s after the first chunk",
        lambda: case(chunked=True, send=send_around_bootstrap_away), words="Lost connection",
    )  # fmt: skip


def _messages() -> Iterator[Fault]:
    for kind, operation, changes in (
        ("registration", "_register_kv_args", REGISTRATIONS),
        ("metadata", "send_metadata", METADATA),
    ):
        for name, (how, change, words) in changes.items():
            yield Fault(kind, name, how, _decode_fault(meddle(operation, change)), words=words)
    yield Fault(
        "registration", "metadata before its registration",
        "the two messages change places, to every prefill rank",
        _decode_fault(registration_after_metadata), words="its registration never arrived",
    )  # fmt: skip
    yield Fault(
        "registration", "registered again in the middle of a transfer",
        "a second registration, looked at for a second between two chunks",
        registers_while_sending, ends="success",
    )  # fmt: skip
    yield Fault(  # a copy that comes after its request has ended reads like the next request's
        "metadata", "every message doubled", "sent twice", _decode_fault(doubled), ends="success",
        remains=(
            "0 rooms have a sender", "transfer_infos", "request_status", "decode_prefix_len",
        ),
    )  # fmt: skip
    for side in ("prefill", "decode"):
        yield Fault(
            "metadata", f"random messages to a {side} rank",
            f"{len(NOISE)} messages from elsewhere to its control port",
            lambda side=side: case(faults={(side, 0): shout}), ends="success",
        )  # fmt: skip


def _transport() -> Iterator[Fault]:
    group, words = "transport", "Failed to send kv chunk"
    for rank, name in enumerate(("target's", "draft-only")):
        yield Fault(
            group, f"return code -1 once, {name} sender", "batch_transfer_sync returns -1",
            _prefill_fault(rank, failing_transport(1)), words=words,
        )  # fmt: skip
    yield Fault(
        group, "return code -1 although the bytes arrive", "the real call, then -1",
        _prefill_fault(1, failing_transport(1, written=True)), words=words,
    )  # fmt: skip
    yield Fault(
        group, "return code -1 always, on the draft only", "every call of the draft-only sender",
        _prefill_fault(1, failing_transport(1 << 30)), words=words, next_too=True,
    )  # fmt: skip
    for rank, name in enumerate(("target's", "draft-only")):
        yield Fault(
            group, f"engine of the {name} sender stuck for good",
            "4 x 8,000 ranges in flight at once, past SGLang's engine's limit",
            _prefill_fault(rank, overflow), words=words, backend="mooncake",
        )  # fmt: skip
    for name, how, inject in (
        ("is rejected", "transfer_submit_write returns 0", rejected),
        ("fails although the bytes arrive", "transfer_check_status returns -1", failed_later),
    ):
        yield Fault(
            group, f"an asynchronous write {name}", how,
            lambda inject=inject: case(
                1, 2, faults={("prefill", 0): inject}, small_rounds=True,
                config={"draft_transfer": "packed"},
            ),
            words=words, backend="mooncake",
        )  # fmt: skip
    yield Fault(
        group, "no memory for decode's staging buffer", "registering it fails; slices by page",
        _decode_fault(no_staging_memory, config={"draft_transfer": "packed"}), ends="success",
    )  # fmt: skip
    yield Fault(
        group, "no memory for prefill's pack buffer", "registering it fails; direct path (P1-D2)",
        lambda: case(1, 2, faults={("prefill", 0): no_staging_memory},
                     config={"draft_transfer": "packed"}),
        ends="success",
    )  # fmt: skip


def _aborts() -> Iterator[Fault]:
    group, words = "aborts and rooms", "Aborted by AbortReq"
    yield Fault(
        group, "decode aborts before its metadata", "receiver.abort() after init",
        _decode_fault(abort_before_metadata), words=words,
    )  # fmt: skip
    for mode in ("direct", "packed"):
        for delay in (0.0, 0.002, 0.01, 0.1):
            yield Fault(
                group, f"decode aborts {delay * 1e3:g} ms after its metadata, {mode}",
                "receiver.abort()",
                _decode_fault(abort_after(delay), config={"draft_transfer": mode}), words=words,
            )  # fmt: skip
    for chunks, name in (
        (0, "before the first chunk"), (1, "between chunks"), (3, "after the last"),
    ):  # fmt: skip
        yield Fault(
            group, f"prefill aborts {name}", "sender.abort() on both ranks",
            lambda chunks=chunks: case(chunked=True, send=partial(prefill_aborts, chunks)),
            ends="either" if chunks == 3 else "failed", words="borted by",
        )  # fmt: skip
    yield Fault(
        group, "abort storm", "24 rooms at once, 23 aborted at once", storm, "either", words
    )
    yield Fault(
        group, "the same room number again", "two requests, one number, a second apart",
        lambda: case(rooms=[100, 100], pause=1), ends="success",
    )  # fmt: skip
    yield Fault(
        group, "the same room number after a failure",
        "return code -1 once; the same number once SGLang has released the pages",
        _prefill_fault(1, failing_transport(1), rooms=[100, 100], pause=4),
    )  # fmt: skip
    yield Fault(
        group, "the same room number after an abort",
        "aborted after 2 ms; the same number once SGLang has released the pages",
        _decode_fault(abort_after(0.002), rooms=[100, 100], pause=4), words=words,
    )  # fmt: skip
    yield Fault(
        group, "the same room number before the failed request is drained",
        "return code -1 once, the same number at once, then another",
        room_in_use, words="still belongs to another request",
    )  # fmt: skip


def _handshake() -> Iterator[Fault]:
    for name, changed, words in UNLIKE:
        yield Fault(
            "handshake", f"another {name}", "the decode side announces another",
            partial(unlike, "decode", **changed), words=words, next_too=True,
        )  # fmt: skip
    for here, there in (("prefill", "decode"), ("decode", "prefill")):
        yield Fault(
            "handshake", f"drafter on the {here} side only", f"no draft pool on {there}",
            lambda here=here: case(draft_on={"prefill": here == "prefill",
                                             "decode": here == "decode"},
                                   failed_rooms_stay_clean=True),
            words="drafter KV", next_too=True,
        )  # fmt: skip


FAULTS: list[Fault] = [
    *_kills(), *_messages(), *_transport(), *_aborts(), *_handshake(),
]  # fmt: skip
