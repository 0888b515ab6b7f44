"""The breaker, which opens after three strikes and then lets only probes through."""

from __future__ import annotations

import pytest

from sglang_mixkv.decode.breaker import Breaker

A, B = b"peer___a", b"peer___b"


def opened(*peers: bytes) -> Breaker:
    breaker = Breaker()
    for peer in peers:
        assert [breaker.record_failure(peer, n, 0.0) for n in (1, 2, 3)] == [False, False, True]
    return breaker


def test_three_strikes_open_a_breaker_and_forget_closes_it():
    breaker = Breaker()
    for generation in range(10):
        assert not breaker.record_failure(A, generation, 0.0)
        if generation % 2:
            breaker.forget(A)
    assert not breaker.blocked([A], 11, 0.0)
    breaker = opened(A)
    assert breaker.open_peers() == [A]
    assert [breaker.blocked(peers, 4, 0.0) for peers in ([B, A], [B], [])] == [True, False, False]
    assert not breaker.blocked([A], 4, 1.0)
    breaker.forget(A)
    assert not breaker.blocked([A], 5, 1.0)
    assert not breaker.blocked([A], 6, 1.0)
    assert breaker.open_peers() == []


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_segment_does_not_reset_a_closed_breakers_strikes(before: int) -> None:
    """An arriving segment does not reset the strikes of a closed breaker.

    Even a late room has received some segments.
    """
    breaker = Breaker()
    found = [breaker.record_failure(A, generation, 0.0) for generation in range(before)]
    breaker.came(A)
    found += [breaker.record_failure(A, generation, 0.0) for generation in range(before, 3)]
    assert found == [False, False, True]


def test_waits_between_probes_double_up_to_30_s():
    breaker, now, waits = opened(A), 0.0, []
    for generation in range(10, 18):
        began = now
        while breaker.blocked([A], generation, now):
            now += 0.5
        waits.append(now - began)
        assert not breaker.record_failure(A, 3, now)  # it began before the breaker opened
        assert breaker.blocked([A], 100 + generation, now + 1.9)  # the probe is still in flight
        assert not breaker.record_failure(A, generation, now)  # the breaker was already open
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_released_probe_lets_another_room_through():
    """The release of a peer's last probe lets another room through.

    A room may be a probe for several peers at once. A room that one of its peers blocks is not a
    probe.
    """
    breaker = opened(A, B)
    assert not breaker.blocked([A, B], 4, 1.0)
    breaker.release_probe(99)
    assert breaker.blocked([A], 5, 1.0)
    breaker.release_probe(4)
    assert not breaker.blocked([B], 5, 1.0)
    assert breaker.blocked([A, B], 6, 1.0)
    breaker.record_failure(B, 5, 1.0)
    breaker.release_probe(4)  # has no effect the second time
    assert breaker.blocked([A, B], 7, 2.0)
    assert not breaker.blocked([A], 8, 2.0)
