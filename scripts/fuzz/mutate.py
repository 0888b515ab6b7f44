"""Multipart messages as fuzz inputs, and mutations that keep their frames apart.

An input is a few messages one after the other: each frame with its length before it (u32,
little-endian), the frame NEXT between two messages. Any bytes are some messages.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sglang_mixkv.engine.releases import sglang_version

RECORDED_ON = "0.5.23"
NEXT = b"\0next message"

Messages = list[list[bytes]]
Mutate = Callable[[bytes, int], bytes]

NUMBERS = (0, 1, -1, 7, 255, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
VALUES: tuple[Any, ...] = (*NUMBERS, None, True, 0.5, 1e300, "", "x" * 300, "\0", [], {})
WORDS = (
    b"", b"None", b"ABORT", b"ABORT_ACK", b"AUX_DATA", b"WATERMARK", b"STAGING_RSP", b"STAGING_REQ",
    b"CHUNK_READY", b"\xff", b"\0", b"9" * 30, b"1e3", b"1_0", b" 1", b"+1", b"::1", b"[::1]:5",
    b"a b", b"*", b":5", b"10.0.0.1:99999", b"\xd9\xa1", *(str(n).encode() for n in NUMBERS),
)  # fmt: skip
ROOMS = (b"7", b"100", b"101")  # of a bystander, and those of the recorded messages


class Format(NamedTuple):
    """A serialization: what it cannot say by itself is put in as `odd` bytes."""

    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    odd: tuple[bytes, ...]


DEEP = 12_000
MSGPACK = Format(
    msgspec.msgpack.decode,
    msgspec.msgpack.encode,
    (b"\x91" * DEEP + b"\x01", b"\xa1\xff", b"\xdd\x7f\xff\xff\xff", b"\xc1", b"\x81\xa1\xff\x01"),
)
JSON = Format(
    msgspec.json.decode,
    msgspec.json.encode,
    (b"[" * DEEP + b"]" * DEEP, b'"\xff"', b'{"\xff":1}', b'"\\ud800"', b"9" * 400, b"-0", b"NaN"),
)


def recorded(path: Path) -> bytes:
    """A seed, as sent by a rank with the SGLang that is installed: the messages of the supported
    releases differ in that number alone, which lies in strings with their length in front."""
    data, version = path.read_bytes(), sglang_version()
    if len(version) != len(RECORDED_ON):
        return data
    return data.replace(RECORDED_ON.encode(), version.encode())


def pack(messages: Messages) -> bytes:
    frames = [frame for message in messages for frame in (*message, NEXT)][:-1]
    return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)


def unpack(data: bytes) -> Messages:
    messages: Messages = [[]]
    at, padded = 0, data + bytes(4)
    while at < len(data):
        (length,) = struct.unpack_from("<I", padded, at)
        frame = data[at + 4 : at + 4 + length]
        at += 4 + length
        if frame == NEXT:
            messages.append([])
        else:
            messages[-1].append(frame)
    return [message for message in messages if message]  # ZMQ delivers no empty message


def mutate(
    data: bytes,
    mutate_bytes: Mutate,
    rng: random.Random,
    max_size: int,
    others: Sequence[bytes] = (),
) -> bytes:
    """One change to one message; `mutate_bytes` is libFuzzer's. Or one message more, of this
    input or of one of the `others`."""
    messages = unpack(data) or [[b"None"]]
    at = rng.randrange(len(messages))
    kind = rng.randrange(12)
    if kind == 0:
        messages.insert(at, list(rng.choice(messages)))
    elif kind == 1 and others:
        messages[at:at] = unpack(rng.choice(others))
    elif kind == 2 and len(messages) > 1:
        del messages[at]
    else:
        rng.choice(CHANGES)(messages[at], mutate_bytes, rng)
    packed = pack([message for message in messages if message])
    return packed if len(packed) <= max_size else data[:max_size]


def _shape(frames: list[bytes], _: Mutate, rng: random.Random) -> None:
    """A frame more, a frame less, or the message cut short."""
    at = rng.randrange(len(frames))
    kind = rng.randrange(3)
    if kind == 0:
        frames.insert(at, rng.choice(frames))
    elif kind == 1:
        del frames[at]
    else:
        del frames[at:]


def _words(frames: list[bytes], _: Mutate, rng: random.Random) -> None:
    frames[rng.randrange(len(frames))] = rng.choice(WORDS)


def _room(frames: list[bytes], _: Mutate, rng: random.Random) -> None:
    """Another room, where the message has its own."""
    frames[int(len(frames) > 1 and not frames[0].isdigit())] = rng.choice(ROOMS)


def _bytes(frames: list[bytes], mutate_bytes: Mutate, rng: random.Random) -> None:
    at = rng.randrange(len(frames))
    frames[at] = mutate_bytes(frames[at] or b"\0", len(frames[at]) + 8)


def _numbers(frames: list[bytes], _: Mutate, rng: random.Random) -> None:
    """Overwrite one aligned number of a packed vector, or add one."""
    width = rng.choice((4, 8))
    index = rng.choice([i for i, f in enumerate(frames) if len(f) % width == 0 and f] or [0])
    frame = frames[index]
    at = rng.randrange(len(frame) // width + 1) * width
    value = rng.choice((*NUMBERS, rng.getrandbits(8 * width), len(frame)))
    number = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    frames[index] = frame[:at] + number + frame[at + width :]


def _extension(frames: list[bytes], _: Mutate, rng: random.Random) -> None:
    """Change one value inside the msgpack of the extension frame."""
    frames[-1] = frames[-1][:7] + mutate_value(frames[-1][7:], MSGPACK, rng)


CHANGES = (_words, _room, _numbers, _numbers, _extension, _extension, _bytes, _shape)


def mutate_value(data: bytes, form: Format, rng: random.Random) -> bytes:
    """The same document with one value in it changed; as it is where it cannot be read."""
    try:
        return form.encode(change(form.decode(data), rng, form.odd))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, TypeError):
        return data


def change(value: Any, rng: random.Random, odd: tuple[bytes, ...]) -> Any:
    """`value` with one value inside it replaced, removed, added or multiplied."""
    if not isinstance(value, (list, dict)) or not value or rng.randrange(8) == 0:
        if isinstance(value, int) and rng.randrange(2):
            return value + rng.choice((-1, 1, value, -2 * value))
        return msgspec.Raw(rng.choice(odd)) if rng.randrange(10) == 0 else rng.choice(VALUES)
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    kind = rng.randrange(12)
    if kind == 0:
        del value[key]
    elif kind == 1 and isinstance(value, list):
        value.extend([value[key]] * rng.choice((1, 2, 50)))
    elif kind == 2 and isinstance(value, dict):
        value[rng.choice(("x", key))] = msgspec.Raw(rng.choice(odd))
    else:
        value[key] = change(value[key], rng, odd)
    return value


def mutate_json(data: bytes, mutate_bytes: Mutate, rng: random.Random, max_size: int) -> bytes:
    """One change to a JSON document."""
    changed = mutate_value(data, JSON, rng) if rng.randrange(3) else data
    return mutate_bytes(data, max_size) if changed == data else changed[:max_size]
