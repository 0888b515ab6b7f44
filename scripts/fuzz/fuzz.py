"""Fuzz the stateless parsers of a peer's bytes: messages, rows, endpoints.

    fuzz.py --runs N [PARSER...]

An input is one of the seeds, changed a few times, mostly within its structure. A finding is an
unexpected exception, or an unusable input that is accepted: a message that cannot be sent again,
rows that neither make a plan nor are refused, or an endpoint that allows reads outside its memory.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from sglang_mixkv.channel import data_plane, handshake, messages
from sglang_mixkv.channel.handshake import Target
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode.plan import judge, make_plan
from sglang_mixkv.decode.transfer import Opened, Request
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout
from sglang_mixkv.engine import bootstrap, prefill_http
from sglang_mixkv.errors import MixKVError

VALUES: tuple[Any, ...] = (
    0, 1, -1, 7, 255, 1 << 16, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, None, True,
    0.5, "", "x" * 600, "\0", b"", b"another_", [], {},
)  # fmt: skip
DEEP = 3_000
ODD = {  # bytes that no encoder writes
    msgspec.msgpack: (b"\x91" * DEEP + b"\x01", b"\xa1\xff", b"\xdd\x7f\xff\xff\xff", b"\xc1"),
    msgspec.json: (b"[" * DEEP + b"]" * DEEP, b'"\xff"', b'"\\ud800"', b"9" * 400, b"NaN"),
}

BASE, SLOT_BYTES, SLOTS = 1 << 20, 4096, 8
MEMORY = data_plane.Memory(BASE, SLOT_BYTES * SLOTS)
DRAFT = DraftFacts("Llama", "EAGLE3", 4, (64, 64), "bfloat16")


def new_row(rank: int, tp: int, name: bytes) -> handshake.Row:
    return handshake.Row(
        messages.PROTOCOL, "0.3.0", "0.5.23", name, "10.0.0.1", 9000 + rank, "tcp://10.0.0.1:9100",
        tp, rank, 0, (64, 128), "nixl", Target(8, 8, layer_ids=False, even=True), 1,
        DraftLayout(DRAFT, tp, rank),
        handshake.StagingFacts("nixl", b"endpoint", BASE, SLOT_BYTES, SLOTS),
    )  # fmt: skip


OWN = new_row(0, 1, b"decode__")


# ---------------------------------------------------------------- the parsers


def message(data: bytes) -> None:
    try:
        found = messages.decode(data)
    except ValueError:
        return
    assert isinstance(found, messages.Message)
    assert messages.decode(messages.encode(found)) == found


def row(data: bytes) -> None:
    """Read the input as a row, as several rows, and as a server's whole answer."""
    with suppress(ValueError):
        handshake.read_row(data)
    with suppress(ValueError, RecursionError):  # aiohttp's JSON parser rejects the request
        kept = bootstrap._kept(json.loads(data))
        assert kept is None or len(kept) <= handshake.MAX_ROW_BYTES
    for body in (data, b'{"rows":[%b]}' % data):
        with suppress(MixKVError):
            rows = prefill_http.read_rows(body)
            infos = [{"rank_ip": ip, "rank_port": port, "is_dummy": False} for ip, port in rows]
            cold, _ = judge(rows.values(), OWN, serve_mismatch=True)
            plan = make_plan(infos, rows, OWN, cold)
            opened = Opened(1, 7, plan.sources, 0, 16, version=plan.version)
            _check_opens(Request(opened, True, Times(), 0.0))
            assert plan.cold or any(source.heads for source in plan.sources)


def _check_opens(request: Request) -> None:
    """Check that each prefill rank can read the OPEN to it, and that all wanted heads are read."""
    for source in request.opened.sources:
        message(messages.encode(request.message(source, OWN.instance, SLOT_BYTES)))
    asked = [head for source in request.opened.sources for head in source.heads]
    read = [head for one in request.transfers.values() for head in one.source.heads]
    assert asked == read, "heads that nobody reads"


class Posting(data_plane.DataPlane):
    """A data plane that only records what it would read."""

    name = "nixl"

    def __init__(self) -> None:
        super().__init__()
        self._memory, self.posted = MEMORY, list[data_plane.Extent]()

    def _register(self, memory: data_plane.Memory) -> bytes:
        return b""

    def _open(self, peer: data_plane.RemoteMemory) -> None: ...

    def _post(self, read: data_plane.Read, extents: Sequence[data_plane.Extent]) -> None:
        self.posted += extents

    def _check(self, read: data_plane.Read) -> str:
        return ""

    def _drop(self, peer: data_plane.RemoteMemory) -> None: ...


def endpoint(data: bytes) -> None:
    """Start reads at both ends of a valid endpoint's memory, one by one and in a single list."""
    plane = Posting()
    try:
        found = data_plane.decode(data, plane.name)
    except ValueError:
        return
    extents = [
        (BASE, remote, length)
        for length in (1, SLOT_BYTES, MEMORY.size)
        for remote in (BASE, BASE - 1, BASE + MEMORY.size - length, BASE + MEMORY.size)
    ]
    for some in (*([one] for one in extents), extents):
        plane.start("read", data_plane.RemoteMemory(found), some)
    begin, end = found.memory.address, found.memory.address + found.memory.size
    for _, remote, length in plane.posted:
        assert begin <= remote <= remote + length <= end, "a read outside the peer's memory"
    assert len(plane.ended()) == len(extents) + 1


# ---------------------------------------------------------------- seeds


def answer(*names: bytes) -> bytes:
    """Return the answer of a server with these ranks."""
    rows = [new_row(rank, len(names), name) for rank, name in enumerate(names)]
    return b'{"protocol":2,"rows":%b}' % msgspec.json.encode(rows)


WITHOUT = msgspec.structs.replace(OWN, draft=None, staging=None)
SENT: list[messages.Message] = [
    messages.Open(2, 7, 10, b"prefill_", b"reader_0", 2, (0, 4), 16, 1 << 20),
    messages.Ready(7, 10, 3, 48, (messages.Announced(5, 99, 16),), True),
    messages.Ack(((5, 99), (6, 100))),
    messages.Fail(7, 10, "closed", "a reason"),
]  # fmt: skip
PAIRS = [answer(b"prefill0", b"prefill1"), answer(b"prefill0", b"prefill0")]
ENDPOINT = data_plane.Endpoint("nixl", b"target", MEMORY, b"instance")
SEEDS = {
    "message": [messages.encode(message) for message in SENT],
    "row": [*map(msgspec.json.encode, (WITHOUT, OWN)), *PAIRS],
    "endpoint": [msgspec.msgpack.encode(ENDPOINT)],
}


# ---------------------------------------------------------------- mutations


def change(form: Any, data: bytes, rng: random.Random) -> bytes:
    """Change one value, or some bytes. `form`: msgspec's module for the format."""
    try:
        changed: bytes = form.encode(_changed(form.decode(data), form, rng))
    except (ValueError, OverflowError, RecursionError, TypeError):
        changed = data
    if changed != data and rng.randrange(8):
        return changed
    at, added = rng.randrange(len(data) + 1), rng.randbytes(rng.randrange(5))
    return data[:at] + added + data[at + rng.randrange(5) :]


def _changed(value: Any, form: Any, rng: random.Random) -> Any:
    """Return `value` with one value inside it replaced, removed, added or repeated."""
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


TARGETS = {"message": message, "row": row, "endpoint": endpoint}


def fuzz(name: str, seed: int, runs: int) -> tuple[bytes, str]:
    """Try the seeds, then mutations of them; return the first finding's input and traceback."""
    one, seeds, rng = TARGETS[name], SEEDS[name], random.Random(seed)
    form = msgspec.json if name == "row" else msgspec.msgpack
    for number in range(runs):
        data = seeds[number] if number < len(seeds) else rng.choice(seeds)
        for _ in range(rng.randrange(1, 7) if number >= len(seeds) else 0):
            data = change(form, data, rng)
        try:
            one(data)
        except BaseException:
            return data, traceback.format_exc()
    return b"", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("parsers", nargs="*", default=TARGETS, metavar="PARSER", help=str([*TARGETS]))
    add("--runs", type=int, default=20_000)
    add("--seed", type=int, default=0, help="0: a new one each time")
    args = parser.parse_args()
    seed = args.seed or random.randrange(1, 1 << 30)
    for name in args.parsers:
        data, trace = fuzz(name, seed, args.runs)
        print(f"{name}: {args.runs} inputs, seed {seed}: {trace or 'no finding'}")
        if trace:
            print(data)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
