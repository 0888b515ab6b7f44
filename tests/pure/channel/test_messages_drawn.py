"""The properties of each message that both sides rely on, and the numbers that are drawn."""

from __future__ import annotations

import os
from itertools import islice

import pytest

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.messages import Ack, Announced, Fail, Open, Ready

BIG = (1 << 63) - 1


@pytest.mark.parametrize(
    "message",
    [
        Ack(((0, 1), (1 << 20, BIG))), Ack(()), Fail(0, 1, "a"), Fail(0, 1, "_" * 32, "x" * 512),
        Ready(0, 1, 0, 0, (Announced(0, 1, 1), Announced(1 << 20, BIG, 1 << 31)), last=False),
        Ready(0, 1, 0, 0, (), last=True), Open(0, 0, 1, bytes(8), bytes(8), 1, (0, 0), 0, 1),
    ],
)  # fmt: skip
def test_the_least_and_the_most_of_each_item_pass(message: messages.Message) -> None:
    assert messages.decode(messages.encode(message)) == message


def test_heads_are_a_range() -> None:
    one = Open(3, 7, 8, bytes(8), bytes(8), 1, (2, 5), 0, 1)
    assert one.wanted == range(2, 5)


@pytest.mark.parametrize("length", [0, 511, 512, 513, 5000])
def test_a_fail_says_no_more_than_fits(length: int) -> None:
    said = messages.fail(7, 8, "slow", "a\nb" + "x" * length)
    assert said == Fail(7, 8, "slow", ("a b" + "x" * length)[:512])


def test_nesting_ends_in_the_error_of_what_is_no_message() -> None:
    """Items of a later version may be nested; too deep ones end in the usual error."""
    assert messages.encode(Ack(())) == b"\x92\x03\x90"
    with pytest.raises(ValueError, match="nested"):
        messages.decode(b"\x93\x03\x90" + b"\x91" * 4000)


def test_drawn_numbers_have_63_bits_and_are_not_0(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [bytes(8) + b"\xff" * 8 + b"\x02" + bytes(495), b"\x04" + bytes(511)]
    asked = list[int]()

    def urandom(count: int) -> bytes:
        asked.append(count)
        return readings[len(asked) - 1]

    monkeypatch.setattr(os, "urandom", urandom)
    drawn = list(islice(messages.draws(), 65))
    assert drawn == [1, (1 << 63) - 1, 1, *[1] * 61, 2]
    assert asked == [512, 512]


def test_instances_differ() -> None:
    assert len({messages.draw_instance() for _ in range(100)}) == 100
    assert {len(messages.draw_instance()) for _ in range(3)} == {8}


def test_peers_of_other_releases_find_the_limits_that_they_know() -> None:
    """A longer message, one with more items, or another version is nothing to the other side."""
    limits = messages.MAX_BYTES, messages.MAX_LIST, messages.INSTANCE_BYTES
    assert (limits, messages.PROTOCOL) == ((4096, 32, 8), (3, 3))
