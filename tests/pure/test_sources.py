"""What becomes of a prefill server that a decode rank refused."""

from __future__ import annotations

from unittest import mock

import pytest

from sglang_mixkv.decode import sources as module
from sglang_mixkv.decode.sources import CURRENT_S, Next, Sources
from sglang_mixkv.errors import MixKVError

A = "host:1"
DIFFERS = MixKVError("MIXKV-PAIR-03", "another page size")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def sources(clock: Clock) -> Sources:
    """One server is refused, and its first request had that answer."""
    sources = Sources(mock.Mock())
    assert sources.next(A) is Next.RESOLVE
    sources.refuse(A, DIFFERS)
    assert [sources.next(A), sources.next(A)] == [Next.REFUSE, Next.REFUSE]
    clock.now += CURRENT_S
    return sources


def test_it_is_asked_by_one_request_and_the_others_wait(sources: Sources, clock: Clock) -> None:
    assert [sources.next(A) for _ in range(3)] == [Next.ASK, Next.WAIT, Next.WAIT]
    clock.now += 60
    assert sources.next(A) is Next.WAIT


def test_a_request_that_had_it_asked_is_decided_by_the_answer(
    sources: Sources, clock: Clock
) -> None:
    """However late that request looks again."""
    sources.next(A)
    sources.asked(A, DIFFERS)
    clock.now += 60
    assert [sources.next(A), sources.next(A)] == [Next.REFUSE, Next.ASK]
    assert "another page size" in str(sources.why_not(A))


def test_one_that_cannot_be_reached_is_asked_once_a_second(sources: Sources, clock: Clock) -> None:
    sources.next(A)
    sources.asked(A)
    assert sources.next(A) is Next.WAIT
    clock.now += CURRENT_S
    assert sources.next(A) is Next.ASK


def test_one_that_fits_now_is_used(sources: Sources) -> None:
    sources.next(A)
    sources.put(mock.Mock(address=A))
    sources.asked(A)
    assert not sources.is_refused(A)
    assert sources.why_not(A) is None
