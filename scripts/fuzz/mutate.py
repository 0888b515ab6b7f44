"""Inputs, and mutations that keep their structure.

The input of a parser is one document. That of a state machine is a row of steps: a byte that
selects what happens, and a frame with its length in front (u16, little-endian), which is the
message where one comes. Any bytes are some steps.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec

Steps = list[tuple[int, bytes]]
Mutate = Callable[[bytes, int], bytes]  # libFuzzer's, of bytes; its second argument is a limit

VALUES: tuple[Any, ...] = (
    0, 1, -1, 7, 255, 1 << 16, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, None, True,
    0.5, "", "x" * 600, "\0", b"", b"another_", [], {},
)  # fmt: skip
DEEP = 3_000
ODD = {  # what no encoder writes
    msgspec.msgpack: (b"\x91" * DEEP + b"\x01", b"\xa1\xff", b"\xdd\x7f\xff\xff\xff", b"\xc1"),
    msgspec.json: (b"[" * DEEP + b"]" * DEEP, b'"\xff"', b'"\\ud800"', b"9" * 400, b"NaN"),
}


def pack(steps: Steps) -> bytes:
    return b"".join(struct.pack("<BH", what, len(frame)) + frame for what, frame in steps)


def unpack(data: bytes) -> Steps:
    steps, at = [], 0
    while at + 3 <= len(data):
        what, length = struct.unpack_from("<BH", data, at)
        steps.append((what, data[at + 3 : at + 3 + length]))
        at += 3 + length
    return steps


def change_document(form: Any, data: bytes, change_bytes: Mutate, rng: random.Random) -> bytes:
    """One value changed, or some bytes. `form`: msgspec's module of the format."""
    try:
        changed: bytes = form.encode(_changed(form.decode(data), form, rng))
    except (ValueError, OverflowError, RecursionError, TypeError):
        changed = data
    return change_bytes(data, len(data) + 8) if changed == data or not rng.randrange(8) else changed


def _changed(value: Any, form: Any, rng: random.Random) -> Any:
    """`value` with one value inside it replaced, removed, added or doubled."""
    if not isinstance(value, list | dict) or not value or not rng.randrange(12):
        if isinstance(value, int) and rng.randrange(2):
            return value + rng.choice((-1, 1, 8, value, -2 * value))
        return msgspec.Raw(rng.choice(ODD[form])) if not rng.randrange(8) else rng.choice(VALUES)
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    kind = rng.randrange(12)
    if kind == 0:
        del value[key]
    elif kind == 1 and isinstance(value, dict):
        value["x"] = msgspec.Raw(rng.choice(ODD[form]))
    elif kind == 1:
        value.append(rng.choice((value[key], msgspec.Raw(rng.choice(ODD[form])))))
    else:
        value[key] = _changed(value[key], form, rng)
    return value


def change_steps(
    others: list[bytes], data: bytes, change_bytes: Mutate, rng: random.Random
) -> bytes:
    """One step changed, moved, removed or doubled, or one more of another input."""
    steps = unpack(data) or [(0, b"")]
    at, to = rng.randrange(len(steps)), rng.randrange(len(steps))
    what, frame = steps[at]
    match rng.randrange(8):
        case 0:
            steps.insert(to, steps[at])
        case 1:
            steps.insert(to, steps.pop(at))
        case 2:
            del steps[at]
        case 3:
            steps.insert(to, rng.choice(unpack(rng.choice(others))))
        case 4:
            steps[at] = rng.randrange(256), frame
        case _:
            at = rng.choice([i for i, (_, frame) in enumerate(steps) if frame] or [at])
            what, frame = steps[at]
            steps[at] = what, change_document(msgspec.msgpack, frame, change_bytes, rng)[:8192]
    return pack(steps)
