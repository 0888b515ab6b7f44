"""The parsers of a peer's bytes accept or refuse any drawn input: messages, rows and endpoints.

An input is a valid one, changed a few times within its structure, in its bytes, or in both. It may
raise only the expected exceptions. What is accepted must be usable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sglang_mixkv.channel import data_plane, messages
from sglang_mixkv.channel.handshake import MAX_ROW_BYTES, Row, StagingFacts, Target, read_row
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import plan
from sglang_mixkv.decode.transfer import Opened, Request
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout
from sglang_mixkv.errors import MixKVError

from .channel.test_data_plane import LOCAL, REMOTE, SIZE, THERE, Scripted

bootstrap = pytest.importorskip("sglang_mixkv.engine.bootstrap")  # needs aiohttp
prefill_http = pytest.importorskip("sglang_mixkv.engine.prefill_http")

# ---------------------------------------------------------------- the parsers


def message(data: bytes) -> None:
    """An accepted message can be sent again."""
    try:
        found = messages.decode(data)
    except ValueError:
        return
    assert isinstance(found, messages.Message)
    assert messages.decode(messages.encode(found)) == found


def row(data: bytes) -> None:
    """Read the input as a row, as several rows, and as a server's whole answer. Rows are refused,
    or make a plan whose OPENs prefill can read, and which reads all wanted heads."""
    with suppress(ValueError):
        read_row(data)
    with suppress(ValueError, RecursionError):  # aiohttp's JSON parser rejects the request
        kept = bootstrap._kept(json.loads(data))
        assert kept is None or len(kept) <= MAX_ROW_BYTES
    for body in (data, b'{"rows":[%b]}' % data):
        with suppress(MixKVError):
            rows = prefill_http.read_rows(body)
            infos = [{"rank_ip": ip, "rank_port": port} for ip, port in rows]
            cold, _ = plan.judge(rows.values(), OWN, serve_mismatch=True)
            made = plan.make_plan(infos, rows, OWN, cold)
            opened = Opened(1, 7, made.sources, 0, 16, version=made.version)
            request = Request(opened, True, Times(), 0.0)
            for source in made.sources:
                message(messages.encode(request.message(source, OWN.instance, SLOT_BYTES)))
            asked = [head for source in made.sources for head in source.heads]
            read = [head for one in request.transfers.values() for head in one.source.heads]
            assert asked == read, "heads that nobody reads"
            assert asked or made.cold


def endpoint(data: bytes) -> None:
    """Reads at both ends of the valid endpoint's memory stay within the accepted one's."""
    plane = Scripted()
    try:
        found = data_plane.decode(data, plane.name)
    except ValueError:
        return
    extents = [
        (LOCAL, at, length)
        for length in (1, THERE, SIZE)
        for at in (REMOTE - 1, REMOTE, REMOTE + THERE - length, REMOTE + THERE)
    ]
    for some in (*([one] for one in extents), extents):
        assert len(plane.read(data_plane.RemoteMemory(found), *some)) == 1
    begin, end = found.memory.address, found.memory.address + found.memory.size
    for _, at, length in plane.posted:
        assert begin <= at <= at + length <= end, "a read outside the peer's memory"


# ---------------------------------------------------------------- valid inputs

SLOT_BYTES = 4096
FACTS = DraftFacts("Llama", "EAGLE3", 4, (64, 64), "bfloat16")


def new_row(rank: int, tp: int, name: bytes) -> Row:
    return Row(
        messages.PROTOCOL, "0.3.0", "0.5.23", name, "10.0.0.1", 9000 + rank, f"tcp://10.0.0.1:{rank}",
        tp, rank, 0, (64, 128), "nixl", Target(8, 8, layer_ids=False, even=True), 1,
        DraftLayout(FACTS, tp, rank), StagingFacts("nixl", b"endpoint", 1 << 20, SLOT_BYTES, 8),
    )  # fmt: skip


def answer(*names: bytes) -> bytes:
    """Return the answer of a server with these ranks."""
    rows = [new_row(rank, len(names), name) for rank, name in enumerate(names)]
    return msgspec.json.encode({"protocol": 2, "rows": rows})


OWN = new_row(0, 1, b"decode__")
SENT: list[messages.Message] = [
    messages.Open(2, 7, 10, b"prefill_", b"reader_0", 2, (0, 4), 16, 1 << 20),
    messages.Ready(7, 10, 3, 48, (messages.Announced(5, 99, 16),), True),
    messages.Ack(((5, 99), (6, 100))),
    messages.Fail(7, 10, "closed", "a reason"),
]  # fmt: skip
ROWS = [
    msgspec.json.encode(one)
    for one in (OWN, msgspec.structs.replace(OWN, draft=None, staging=None))
]
ANSWERS = [answer(b"prefill0", b"prefill1"), answer(b"prefill0", b"prefill0")]


# ---------------------------------------------------------------- changes

DEEP = 3_000
ODD = {  # bytes that no encoder writes
    msgspec.msgpack: (b"\x91" * DEEP + b"\x01", b"\xa1\xff", b"\xdd\x7f\xff\xff\xff", b"\xc1"),
    msgspec.json: (b"[" * DEEP + b"]" * DEEP, b'"\xff"', b'"\\ud800"', b"9" * 400, b"NaN"),
}
VALUES = (
    0, 1, -1, 7, 255, 1 << 16, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, None, True,
    0.5, "", "x" * 600, "\0", b"", b"another_", [], {},
)  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each list or dict within the value, with each of its indices or keys."""
    if isinstance(value, list | dict):
        for at in value if isinstance(value, dict) else range(len(value)):
            yield value, at
            yield from places(value[at])


def edit(within: Any, at: Any, kind: str, value: Any) -> None:
    """Change the list or dict at this index or key, or add to it."""
    old = within[at]
    if kind == "remove":
        del within[at]
    elif kind == "shift" and isinstance(old, int):
        within[at] = max(-(1 << 63), min(old + value, (1 << 64) - 1))
    elif kind in ("add", "repeat") and isinstance(within, list):
        within.append(old if kind == "repeat" else value)
    else:
        within["x" if kind == "add" else at] = value


def changed(form: Any, valid: list[bytes]) -> st.SearchStrategy[bytes]:
    """Draw a valid input with some changes. `form`: msgspec's module for the format."""
    values = [*VALUES, *map(msgspec.Raw, ODD[form])]
    edits = [("remove", None), ("repeat", None)] * 4 + [("shift", by) for by in (-1, 1, 8)] * 8
    edits += [(kind, value) for kind in ("put", "add") for value in values]
    inputs, changes = st.sampled_from(valid), st.lists(st.sampled_from(edits), max_size=4)

    @st.composite
    def one(draw: st.DrawFn) -> bytes:
        tree = form.decode(draw(inputs))
        for change in draw(changes):
            if where := [*places(tree)]:
                edit(*where[draw(st.integers(0, len(where) - 1))], *change)
        data: bytes = form.encode(tree)
        if draw(st.integers(0, 7)):
            return data
        at = draw(st.integers(0, len(data)))
        return data[:at] + draw(st.binary(max_size=4)) + data[at + draw(st.integers(0, 4)) :]

    return one()


# ---------------------------------------------------------------- the tests

PARSERS = {
    "message": (message, changed(msgspec.msgpack, [*map(messages.encode, SENT)])),
    "row": (row, changed(msgspec.json, ROWS + ANSWERS)),
    "endpoint": (endpoint, changed(msgspec.msgpack, [Scripted.there])),
}
ROUND, ROUNDS = 1500, 70
"""The inputs of a round, and the rounds with --full. Hypothesis remembers a round's inputs."""


def draw_inputs(parser: str, count: int, **more: Any) -> None:
    """Try drawn inputs of a parser, and raise the first error."""
    read, inputs = PARSERS[parser]
    settings(max_examples=count, report_multiple_bugs=False, **more)(given(inputs)(read))()


@pytest.mark.parametrize("parser", PARSERS)
def test_drawn_inputs_are_used_or_refused(parser: str, pytestconfig: pytest.Config) -> None:
    for _ in range(ROUNDS if pytestconfig.getoption("--full") else 1):
        draw_inputs(parser, ROUND)


NO_ERROR = {"name": "RecursionError", "value": ZeroDivisionError, "raising": False}
GUARDS: dict[str, tuple[str, type[BaseException], str, Any, dict[str, Any]]] = {
    "depth of messages": ("message", RecursionError, "recursion", messages,
                          {"name": "decode", "value": messages._decoder.decode}),
    "types of messages": ("message", AssertionError, "isinstance", messages,
                          {"name": "_decoder", "value": msgspec.msgpack.Decoder()}),
    "depth of answers": ("row", RecursionError, "recursion", prefill_http, NO_ERROR),
    "sizes of zero": ("row", ZeroDivisionError, "zero", plan,
                      {"name": "readers_of", "value": lambda p, d: max(1, d // p)}),
    "instances of ranks": ("row", AssertionError, "heads that nobody reads", plan,
                           {"name": "_check_unique", "value": lambda rows: None}),
    "depth of endpoints": ("endpoint", RecursionError, "recursion", data_plane, NO_ERROR),
    "memory of a peer": ("endpoint", AssertionError, "outside the peer's memory",
                         data_plane.DataPlane,
                         {"name": "_are_inside", "value": lambda self, peer, extents: True}),
}  # fmt: skip
"""By guard: the parser, the error without the guard, the guard's owner and replacement."""


@pytest.mark.parametrize("guard", GUARDS)
def test_a_removed_guard_is_found(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser, error, text, owner, change = GUARDS[guard]
    monkeypatch.setattr(owner, **change)
    with pytest.raises(error, match=text):
        draw_inputs(parser, 14 * ROUND, derandomize=True, database=None, phases=[Phase.generate])
