"""SGLang's own faults that are tried on the protocol ring.

The first request meets the fault. The second one is clean, follows on the same servers, and must
be right to the last byte, as must every byte of every decode buffer that is not the failed
request's own. Ranks that are killed or stopped: tests/protocol/test_processes.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rig.memory import RankReport
from rig.model import Case, Request
from rig.rank import NOT_YET, Rank, send
from rig.ring import Outcome
from rig.special import Inject, Special

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
REGISTERED_S = 0.3  # what one prefill rank has read, the others have read by then
GONE = "waiting left", "parts left"  # a room that no request came for is known for a minute


def case(prefill_tp: int = 2, decode_tp: int = 1, chunked: bool = False, **special: Any) -> Case:
    more = CHUNKED if chunked else TWO_ROUNDS
    return Case(prefill_tp, decode_tp, special=Special(**special), **more)


@dataclass(frozen=True)
class Fault:
    """`name`: what goes wrong; `ends`: how the request ends on the decode side ("either": depends
    on the moment); `words`: part of the reason; `remains`: tables in which a copy may wait for its
    reaping; `cold`: why the request is served cold; `stays_cold`: the next one is, too; `stocks`:
    reasons are SGLang's."""

    group: str
    name: str
    case: Callable[[], Case]
    ends: str = "failed"
    words: str = ""
    remains: tuple[str, ...] = ()
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
    """What is wrong with how warm drafters start."""
    if fault.cold and not outcome.total(f"channel_cold_{fault.cold}"):
        yield f"no request is cold for {fault.cold!r}"
    cold = [report for report in outcome.decode if report.cold]
    if fault.ends == "success" and cold and not (fault.cold or fault.stays_cold):
        yield f"a request is cold: {[report.stats for report in cold]}"
    if not fault.stays_cold and any(max(report.cold) == len(report.status) - 1 for report in cold):
        yield "the last request is cold, too"


def _endings(fault: Fault, report: RankReport) -> Iterator[str]:
    """What is wrong with how a rank's requests ended."""
    *before, last = report.status or ["nothing"]
    allowed = {"success", "failed"}
    if report.side == "decode" and fault.ends != "either":
        allowed = {fault.ends}
    if not {*before} <= allowed:
        yield f"a request that met the fault ended with {before}, not {allowed}"
    if last != "success":
        yield f"the last request ended with {last}"


# ---------------------------------------------------------------- the bootstrap server


def send_after(delay: float, rank: Rank, sender: Any, chunk: Any, state: Any) -> Any:
    """Send a chunk of the first request so long after the one before."""
    first = sender.bootstrap_room == rank.rooms()[0]
    if first and time.monotonic() < getattr(sender, "sent_at", 0.0) + delay:
        return NOT_YET
    send(rank, sender, chunk, state)
    sender.sent_at = time.monotonic()
    return None


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
    rank.case.shared.away.set()
    threading.Thread(target=back, daemon=True).start()


def start_when_away(rank: Rank) -> None:
    """This rank's manager is made once the bootstrap server has gone."""
    rank.case.shared.away.wait()


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
                self.abort()

        cls.send_metadata = aborting

    return inject


def prefill_aborts(after_chunks: int, rank: Rank, sender: Any, chunk: Any, state: Any) -> None:
    """The prefill's scheduler drops the first request after so many chunks."""
    if sender.bootstrap_room != rank.rooms()[0]:
        send(rank, sender, chunk, state)
        return
    if sender.curr_idx == after_chunks:
        sender.abort()
        return
    send(rank, sender, chunk, state)
    if sender.curr_idx == after_chunks == 3:
        sender.abort()


STORM = tuple(Request(12 + i % 5) for i in range(24))


def storm() -> Case:
    """24 rooms at once, 23 of them aborted, then a clean one."""
    return Case(
        2, 1, requests=(*STORM, Request(9)), rounds=(tuple(range(24)), (24,)),
        special=Special(faults={("decode", 0): abort_after(0.0, count=23)}),
    )  # fmt: skip


# ---------------------------------------------------------------- the list


def _decode_fault(inject: Inject, **special: Any) -> Callable[[], Case]:
    return lambda: case(faults={("decode", 0): inject}, **special)


def _prefill_fault(rank: int, inject: Inject, **special: Any) -> Callable[[], Case]:
    return lambda: case(faults={("prefill", rank): inject}, **special)


def _sglangs() -> Iterator[Fault]:
    group = "bootstrap server away, then back"
    yield Fault(
        group, "before a request",
        _prefill_fault(0, bootstrap_away, before={("decode", 0): start_when_away}),
        ends="success",
    )  # fmt: skip
    yield Fault(
        group, "during a transfer",
        lambda: case(chunked=True, send=send_around_bootstrap_away), words="Lost connection",
    )  # fmt: skip
    group, words = "aborts and rooms", "Aborted by AbortReq"
    yield Fault(
        group, "decode aborts before its metadata",
        _decode_fault(abort_before_metadata), words=words,
    )  # fmt: skip
    for delay in (0.0, 0.01):
        yield Fault(
            group, f"decode aborts {delay * 1e3:g} ms after its metadata",
            _decode_fault(abort_after(delay)), words=words,
        )  # fmt: skip
    for chunks, name in (
        (0, "before the first chunk"), (1, "between chunks"), (3, "after the last"),
    ):  # fmt: skip
        yield Fault(
            group, f"prefill aborts {name}",
            lambda chunks=chunks: case(chunked=True, send=partial(prefill_aborts, chunks)),
            ends="either" if chunks == 3 else "failed", words="borted by",
        )  # fmt: skip
    yield Fault(group, "abort storm", storm, "either", words)
    yield Fault(
        group, "the same room number again",
        lambda: case(rooms=[100, 100], pause=1), ends="success",
    )  # fmt: skip
    yield Fault(
        group, "the same room number after an abort",
        _decode_fault(abort_after(0.002), rooms=[100, 100], pause=4), words=words,
        stays_cold=True,  # an OPEN that comes when its request has ended here waits for the next
    )  # fmt: skip


SGLANGS: list[Fault] = [
    replace(fault, stocks=True, remains=(*fault.remains, *GONE)) for fault in _sglangs()
]
"""Faults of SGLang's own, beside which the channel has to be right."""
