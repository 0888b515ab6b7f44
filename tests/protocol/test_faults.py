"""Faults, each tried for real: what the request gets, and that the next one works.

The first request meets the fault. The second one is clean, follows on the same servers, and must
be right to the last byte, as must every byte of every decode buffer that is not the failed
request's own. A drafter's trouble ends no request: the one that met it is served, cold where rows
did not come. What ends a request are faults of SGLang's own transfer, and a decode rank that cannot
even clear its rows. Aborts by prefill: test_aborts.py; ranks that go away: test_traffic.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from rig.ring.model import Case, Request
from rig.ring.rank import Rank
from rig.ring.run import run
from rig.ring.special import Inject, Special
from rig.ring.timeouts import GONE, TIMEOUTS

from sglang_mixkv.draft.rows import DraftRows

pytestmark = pytest.mark.transports(1)

DECODE, DRAFT_ONLY = ("decode", 0), ("prefill", 1)
"""Ranks: of prefill's two, one sends an MLA target."""
TWO_ROUNDS: dict[str, Any] = {"requests": (Request(12), Request(9)), "rounds": ((0,), (1,))}


def first(name: str, method: str, what: Callable[..., Any], of: Any = None) -> Inject:
    """Replace this rank's first call of a method, of SGLang's class of that kind or of the class
    `of`."""

    def inject(rank: Rank) -> None:
        cls, met = of or rank.kv_class[name], []
        real = getattr(cls, method)

        def once(self: Any, *args: Any, **kwargs: Any) -> Any:
            if met:
                return real(self, *args, **kwargs)
            met.append(1)
            return what(real, self, *args, **kwargs)

        setattr(cls, method, once)

    return inject


def aborts(seconds: float) -> Callable[..., None]:
    def aborting(real: Callable[..., None], receiver: Any, *args: Any, **kwargs: Any) -> None:
        real(receiver, *args, **kwargs)
        time.sleep(seconds)
        receiver.abort()

    return aborting


def no_memory(*_: Any) -> None:
    raise MemoryError


def all_of(*injected: Inject) -> Inject:
    def inject(rank: Rank) -> None:
        for one in injected:
            one(rank)

    return inject


def thread_ends(rank: Rank) -> None:
    """End this rank's channel thread at its next piece of work."""

    def end(*_: Any) -> None:
        raise SystemExit

    channel = rank.manager.prefill_channel or rank.manager.decode_channel
    channel._poll = end


PACK = first("", "pack", no_memory, DraftRows)
NEITHER = all_of(*(first("", name, no_memory, DraftRows) for name in ("unpack", "clear")))
AFTER = first("receiver", "send_metadata", aborts(0))

# What is wrong, where, how the first request ends on decode, and words of its reason.
FAULTS: dict[str, tuple[Any, Inject, str, str]] = {
    "decode aborts before its metadata":
        (DECODE, first("receiver", "init", aborts(0)), "failed", "borted by"),
    "decode aborts after its metadata": (DECODE, AFTER, "failed", "borted by"),
    "packing raises": (DRAFT_ONLY, PACK, "cold", "prefill_pack"),
    "unpacking and clearing raise": (DECODE, NEITHER, "failed", "could not be cleared"),
    "prefill's thread ends": (DRAFT_ONLY, thread_ends, "cold", "has ended"),
    "decode's thread ends": (DECODE, thread_ends, "cold", "has ended"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in TIMEOUTS.items():
        monkeypatch.setenv(name, seconds)


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str) -> None:
    where, inject, becomes, words = FAULTS[name]
    outcome = run(Case(2, 1, special=Special(faults={where: inject}), **TWO_ROUNDS))
    broken = (words, " left") if words == "has ended" else ()
    assert [line for line in outcome.wrong if not any(w in line for w in (*GONE, *broken))] == []
    (decode,) = outcome.decode
    assert decode.status == ["failed" if becomes == "failed" else "success", "success"]
    assert all(report.status[1:] == ["success"] for report in outcome.prefill)
    if becomes == "failed":
        assert words in outcome.reasons
        assert decode.cold == set()
    else:
        assert decode.cold == ({0, 1} if broken else {0})
        assert broken or outcome.total("rooms_total", "cold", words) == 1
        assert broken or outcome.total("prefill_rooms_total", "cold", words) == 1
        assert broken or outcome.total("fails_sent_total", "pack") == 1


@pytest.mark.parametrize("aborted", [False, True], ids=["served", "aborted"])
def test_the_same_room_number_again(aborted: bool) -> None:
    """The number is used again once its first use has ended, as by SGLang's retraction. An OPEN
    that comes when its request has ended waits for the next one of this number, which may be cold
    then."""
    faults = {DECODE: first("receiver", "send_metadata", aborts(0.002))} if aborted else {}
    special = Special(faults=faults, rooms=[100, 100], pause=4 if aborted else 1)
    outcome = run(Case(2, 1, special=special, **TWO_ROUNDS))
    assert [line for line in outcome.wrong if not any(word in line for word in GONE)] == []
    (decode,) = outcome.decode
    assert decode.status == ["failed" if aborted else "success", "success"]
    assert aborted or not decode.cold
