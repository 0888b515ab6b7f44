"""A fault affects one request as expected, and the next request on the same servers is correct.

Every byte of every decode buffer is compared, except in the pages of the failed request. A fault of
the drafter fails no request: the request is served, with a cold drafter if rows did not arrive. A
request fails only after a fault of SGLang's own transfer, or if decode cannot clear its rows.
test_aborts.py tests aborts by prefill, and test_traffic.py tests ranks that are killed or stopped.
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
"""Ranks. Prefill rank 0 sends the MLA target, and rank 1 sends only draft KV."""
TWO_ROUNDS: dict[str, Any] = {"requests": (Request(12), Request(9)), "rounds": ((0,), (1,))}


def first(name: str, method: str, what: Callable[..., Any], of: Any = None) -> Inject:
    """Replace a rank's first call of a method. `name`: the kind of SGLang's class, for example
    `receiver`. `of`: a class to use in place of that one."""

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
    """End this rank's channel thread at its next poll."""

    def end(*_: Any) -> None:
        raise SystemExit

    channel = rank.manager.prefill_channel or rank.manager.decode_channel
    channel._poll = end


PACK = first("", "pack", no_memory, DraftRows)
NEITHER = all_of(*(first("", name, no_memory, DraftRows) for name in ("unpack", "clear")))
AFTER = first("receiver", "send_metadata", aborts(0))

# Per fault: the rank, the injection, how the first request ends on decode, and part of the reason.
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
def test_a_room_number_can_be_reused(aborted: bool) -> None:
    """A room number is reused after its first use has ended, as in SGLang's retraction. An OPEN
    that arrives after its request has ended waits for the next request with this number, which may
    then be cold."""
    faults = {DECODE: first("receiver", "send_metadata", aborts(0.002))} if aborted else {}
    special = Special(faults=faults, rooms=[100, 100], pause=4 if aborted else 1)
    outcome = run(Case(2, 1, special=special, **TWO_ROUNDS))
    assert [line for line in outcome.wrong if not any(word in line for word in GONE)] == []
    (decode,) = outcome.decode
    assert decode.status == ["failed" if aborted else "success", "success"]
    assert aborted or not decode.cold
