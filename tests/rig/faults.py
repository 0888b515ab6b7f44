"""Faults of SGLang's own and of the draft channel that are tried on the protocol ring.

The first request meets the fault. The second one is clean, follows on the same servers, and must
be right to the last byte, as must every byte of every decode buffer that is not the failed
request's own. A drafter's trouble ends no request: the one that met it is served, cold where rows
did not come. What ends a request are faults of SGLang's own transfer, and a decode rank that cannot
even clear its rows. Ranks and bootstrap servers that go away: tests/protocol/test_processes.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from rig.memory import RankReport
from rig.model import Case, Request
from rig.rank import Rank, send
from rig.ring import Outcome
from rig.special import Inject, Key, Special

from sglang_mixkv.draft.rows import DraftRows

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
    if fault.cold and not outcome.total("rooms_total", "cold", fault.cold):
        yield f"no request is cold for {fault.cold!r}"
    cold = [report for report in outcome.decode if report.cold]
    if fault.ends == "success" and cold and not (fault.cold or fault.stays_cold):
        yield f"a request is cold: {[report.counted for report in cold]}"
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


# ---------------------------------------------------------------- the draft channel


def channel_of(rank: Rank) -> Any:
    return rank.manager.decode_channel or rank.manager.prefill_channel


def raising(*names: str) -> Inject:
    """This rank's first call of each of these functions over rows raises."""

    def broken(name: str) -> Callable[..., Any]:
        real, met = getattr(DraftRows, name), []

        def once(self: DraftRows, *args: Any) -> Any:
            if met:
                return real(self, *args)
            met.append(1)
            raise MemoryError(f"no memory to {name}")

        return once

    def inject(rank: Rank) -> None:
        for name in names:
            setattr(DraftRows, name, broken(name))

    return inject


def thread_ends(rank: Rank) -> None:
    """This rank's channel thread ends at its next piece of work."""

    def end(*_: Any) -> None:
        raise SystemExit

    setattr(channel_of(rank), "_look" if rank.side == "decode" else "_handle", end)


# ---------------------------------------------------------------- the list


DECODE, DRAFT_ONLY = ("decode", 0), ("prefill", 1)
"""Ranks: of prefill's two, one sends an MLA target."""


def at(rank: Key, inject: Inject, **special: Any) -> Callable[[], Case]:
    return lambda: case(faults={rank: inject}, **special)


def aborting(name: str, what: Callable[[], Case], ends: str = "failed", **more: Any) -> Fault:
    more = {"words": "borted by", "stocks": True, "remains": GONE, **more}
    return Fault("aborts and rooms", name, what, ends, **more)


def prefill_aborting(after_chunks: int) -> Callable[[], Case]:
    return lambda: case(chunked=True, send=partial(prefill_aborts, after_chunks))


def of_channel(name: str, what: Callable[[], Case], **more: Any) -> Fault:
    more = {"ends": "success", "remains": GONE, **more}
    return Fault("the draft channel", name, what, **more)


BROKEN = {"remains": ("has ended", " left"), "stays_cold": True}
FAULTS: list[Fault] = [
    aborting("decode aborts before its metadata", at(DECODE, abort_before_metadata)),
    aborting("decode aborts at once after its metadata", at(DECODE, abort_after(0.0))),
    aborting("decode aborts 10 ms after its metadata", at(DECODE, abort_after(0.01))),
    aborting("prefill aborts before the first chunk", prefill_aborting(0)),
    aborting("prefill aborts between chunks", prefill_aborting(1)),
    aborting("prefill aborts after the last", prefill_aborting(3), "either"),
    aborting("the same room number again", lambda: case(rooms=[100, 100], pause=1), "success"),
    aborting(
        "the same room number after an abort",
        at(DECODE, abort_after(0.002), rooms=[100, 100], pause=4),
        stays_cold=True,  # an OPEN that comes when its request has ended here waits for the next
    ),
    # What SGLang's managers do about them; the others: tests/sim, tests/pure/test_threads.py.
    of_channel("packing raises", at(DRAFT_ONLY, raising("pack")), cold="prefill_pack"),
    of_channel(
        "unpacking and clearing raise", at(DECODE, raising("unpack", "clear")), ends="failed",
        words="could not be cleared",
    ),
    of_channel("prefill's thread ends", at(DRAFT_ONLY, thread_ends), **BROKEN),
    of_channel("decode's thread ends", at(DECODE, thread_ends), **BROKEN),
]  # fmt: skip
