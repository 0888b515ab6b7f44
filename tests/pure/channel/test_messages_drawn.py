"""The properties of messages that both sides rely on, and the generation of random numbers."""

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
def test_minimum_and_maximum_values_round_trip(message: messages.Message) -> None:
    assert messages.decode(messages.encode(message)) == message


def test_wanted_heads_are_a_range() -> None:
    one = Open(3, 7, 8, bytes(8), bytes(8), 1, (2, 5), 0, 1)
    assert one.wanted == range(2, 5)


@pytest.mark.parametrize("length", [0, 511, 512, 513, 5000])
def test_the_text_of_a_fail_is_truncated(length: int) -> None:
    message = messages.fail(7, 8, "slow", "a\nb" + "x" * length)
    assert message == Fail(7, 8, "slow", ("a b" + "x" * length)[:512])


def test_too_deep_nesting_is_a_value_error() -> None:
    """A message with too deeply nested items raises ValueError, as any invalid message does.

    A later version may add nested items.
    """
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


def test_drawn_instances_differ() -> None:
    assert len({messages.draw_instance() for _ in range(100)}) == 100
    assert {len(messages.draw_instance()) for _ in range(3)} == {8}


def test_limits_of_messages_are_unchanged() -> None:
    """The limits of a message do not change.

    Another release would reject a message that is longer, has more items or has another version.
    """
    limits = messages.MAX_BYTES, messages.MAX_LIST, messages.INSTANCE_BYTES
    assert (limits, messages.PROTOCOL) == ((4096, 32, 8), (3, 3))
