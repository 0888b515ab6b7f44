"""The channel's four messages: valid ones round-trip, and all others are rejected."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.messages import MAX_BYTES, MAX_LIST, Ack, Announced, Fail, Open, Ready

BIG = (1 << 63) - 1
OPEN = Open(1, 7, 8, b"prefill_", b"decode__", 2, (0, 4), 16, 1 << 20)
READY = Ready(7, 8, 3, 48, (Announced(5, 99, 16), Announced(6, 98, 4)), last=True)
ACK, FAIL = Ack(((5, 99), (6, 98))), Fail(7, 8, "deadline", "its KV did not come")
ALL = (OPEN, READY, ACK, FAIL)
LARGEST = (
    Open(1 << 16, (1 << 64) - 1, BIG, b"p" * 8, b"d" * 8, 1 << 16, (1 << 16, 1 << 16), 1 << 40,
         1 << 40),
    Ready((1 << 64) - 1, BIG, 1 << 31, 1 << 40, (Announced(1 << 20, BIG, 1 << 31),) * MAX_LIST,
          True),
    Ack(((1 << 20, BIG),) * MAX_LIST),
    Fail((1 << 64) - 1, BIG, "x" * 32, "\U0001f4a5" * 512),
)  # fmt: skip
BOUNDS = {
    "version": (0, 1 << 16), "room": (0, (1 << 64) - 1), "generation": (1, BIG),
    "readers": (1, 1 << 16), "first_token": (0, 1 << 40), "slot_bytes": (1, 1 << 40),
    "segment": (0, 1 << 31), "weights": (0, (1 << 32) - 1),
}  # fmt: skip
NUMBERS = [
    (message, name)
    for message in ALL
    for name in message.__struct_fields__
    if type(getattr(message, name)) is int
]
BAD = [
    (OPEN, "heads", (-1, 4)), (OPEN, "heads", (0, (1 << 16) + 1)), (OPEN, "heads", (0,)),
    (OPEN, "heads", (0, 1, 2)), (OPEN, "prefill", b"7 bytes"), (OPEN, "reader", b"9 bytes.."),
    (READY, "last", None), (READY, "segments", ((5, 99, 16),) * (MAX_LIST + 1)),
    *[(READY, "segments", (one,)) for one in (
        (-1, 99, 16), ((1 << 20) + 1, 99, 16), (5, 0, 16), (5, BIG + 1, 16), (5, 99, 0),
        (5, 99, (1 << 31) + 1), (5, 99), ("5", 99, 16), (5, 99, 1.5))],
    (ACK, "slots", ((5, 99),) * (MAX_LIST + 1)),
    *[(ACK, "slots", (one,)) for one in (
        (-1, 99), ((1 << 20) + 1, 99), (5, 0), (5, BIG + 1), (5,), (5, 99, 1))],
    (FAIL, "code", ""), (FAIL, "code", "x" * 33), (FAIL, "code", "Slow"), (FAIL, "code", "a b"),
    (FAIL, "code", "slow\n"), (FAIL, "detail", "x" * 513), (FAIL, "detail", None),
]  # fmt: skip


def ids(value: object) -> str | None:
    return type(value).__name__ if isinstance(value, msgspec.Struct) else None


def items(message: messages.Message) -> list[object]:
    return msgspec.msgpack.decode(messages.encode(message))


def with_field(message: messages.Message, name: str, value: object) -> bytes:
    """Encode the message with one item replaced, possibly by an invalid value."""
    changed = items(message)
    changed[1 + message.__struct_fields__.index(name)] = value
    return msgspec.msgpack.encode(changed)


@pytest.mark.parametrize("message", [*ALL, *LARGEST], ids=ids)
def test_round_trip(message):
    """Every message round-trips, and even the largest is within the socket's limit."""
    assert len(messages.encode(message)) < MAX_BYTES
    assert messages.decode(messages.encode(message)) == message


@pytest.mark.parametrize(("message", "name"), NUMBERS, ids=ids)
def test_numbers_at_and_beyond_their_bounds(message, name):
    least, most = BOUNDS[name]
    for value in (least, most):
        assert getattr(messages.decode(with_field(message, name, value)), name) == value
    for value in (least - 1, most + 1):
        with pytest.raises((ValueError, OverflowError)):  # msgpack has 64 bits
            messages.decode(with_field(message, name, value))


@pytest.mark.parametrize(("message", "name", "value"), BAD, ids=ids)
def test_other_values_are_rejected(message, name, value):
    with pytest.raises(ValueError):  # noqa: PT011
        messages.decode(with_field(message, name, value))


@pytest.mark.parametrize("message", ALL, ids=ids)
def test_an_additional_item_is_ignored(message):
    more = msgspec.msgpack.encode([*items(message), "of a later version"])
    assert messages.decode(more) == message


@pytest.mark.parametrize("message", ALL, ids=ids)
def test_only_items_with_a_default_may_be_missing(message):
    fields = msgspec.structs.fields(message)
    needed = sum(field.required for field in fields)
    for count in range(len(fields)):
        fewer = msgspec.msgpack.encode(items(message)[: 1 + count])
        if count < needed:
            with pytest.raises(ValueError):  # noqa: PT011
                messages.decode(fewer)
        else:
            default = fields[count].default
            assert getattr(messages.decode(fewer), fields[count].name) == default


@pytest.mark.parametrize("kind", [0, 5, -1, "1", None, True])
def test_an_unknown_kind_is_rejected(kind):
    with pytest.raises(ValueError):  # noqa: PT011
        messages.decode(msgspec.msgpack.encode([kind, *items(OPEN)[1:]]))


@given(st.text(max_size=700))
def test_the_detail_of_a_fail_is_printable_and_short(detail):
    built = messages.fail(7, 8, "slow", detail)
    assert built.detail.isprintable()
    assert len(built.detail) == min(len(detail), 512)
    assert len(messages.encode(built)) < MAX_BYTES
    assert messages.decode(messages.encode(built)) == built


@pytest.mark.parametrize("message", [OPEN, READY], ids=ids)
def test_a_message_without_weights_is_valid(message):
    """A message without the field `weights` is valid, since older releases do not send it.

    A new field must be the last one of its message.
    """
    assert message.__struct_fields__[-1] == "weights"
    older = msgspec.msgpack.encode(items(message)[:-1])
    assert messages.decode(older) == message
    assert message.weights == 0
