"""What reads a peer's bytes and keeps no state: messages, rows, endpoints.

A target takes one input; what it raises is a finding. What a parser lets through must be usable: a
message can be sent again, rows make a plan or are refused, an endpoint is read inside its memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from sglang_mixkv.channel import data_plane, messages
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode.events import OpenRoom
from sglang_mixkv.decode.plan import judge, make_plan
from sglang_mixkv.decode.transfer import Room
from sglang_mixkv.draft import facts
from sglang_mixkv.draft.facts import Target
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout
from sglang_mixkv.engine import bootstrap, prefill_http
from sglang_mixkv.errors import MixKVError

BASE, SLOT_BYTES, SLOTS = 1 << 20, 4096, 8
MEMORY = data_plane.Memory(BASE, SLOT_BYTES * SLOTS)
DRAFT = DraftFacts("Llama", "EAGLE3", 4, (64, 64), "bfloat16")


def new_row(rank: int, tp: int, name: bytes) -> facts.Row:
    return facts.Row(
        messages.PROTOCOL, "0.3.0", "0.5.23", name, "10.0.0.1", 9000 + rank, "tcp://10.0.0.1:9100",
        tp, rank, 0, (64, 128), "nixl", Target(8, 8, layer_ids=False, even=True), 1,
        DraftLayout(DRAFT, tp, rank),
        facts.StagingFacts("nixl", b"endpoint", BASE, SLOT_BYTES, SLOTS),
    )  # fmt: skip


OWN = new_row(0, 1, b"decode__")


def message(data: bytes) -> None:
    try:
        found = messages.decode(data)
    except ValueError:
        return
    assert isinstance(found, messages.Message)
    assert messages.decode(messages.encode(found)) == found


def row(data: bytes) -> None:
    """A row, several of them, or a server's whole answer."""
    with suppress(ValueError):
        facts.read_row(data)
    with suppress(ValueError, RecursionError):  # aiohttp's own JSON refuses the request
        kept = bootstrap._kept(json.loads(data))
        assert kept is None or len(kept) <= facts.MAX_ROW_BYTES
    for body in (data, b'{"rows":[%b]}' % data):
        with suppress(MixKVError):
            rows = prefill_http.read_rows(body)
            infos = [{"rank_ip": ip, "rank_port": port, "is_dummy": False} for ip, port in rows]
            cold, _ = judge(rows.values(), OWN, serve_mismatch=True)
            plan = make_plan(infos, rows, OWN, cold)
            _open(
                Room(OpenRoom(1, 7, plan.sources, 0, 16, version=plan.version), True, Times(), 0.0)
            )
            assert plan.cold or any(source.heads for source in plan.sources)


def _open(room: Room) -> None:
    """Each prefill rank can read its OPEN, and what is asked for is read."""
    for source in room.opened.sources:
        message(messages.encode(room.message(source, OWN.instance, SLOT_BYTES)))
    asked = [head for source in room.opened.sources for head in source.heads]
    read = [head for part in room.parts.values() for head in part.source.heads]
    assert asked == read, "heads that nobody reads"


class Posting(data_plane.DataPlane):
    """It keeps what it would read."""

    name = "nixl"

    def __init__(self) -> None:
        super().__init__()
        self._memory, self.posted = MEMORY, list[data_plane.Extent]()

    def _register(self, memory: data_plane.Memory) -> bytes:
        return b""

    def _open(self, peer: data_plane.Peer) -> None: ...

    def _post(self, read: data_plane.Read, extents: Sequence[data_plane.Extent]) -> None:
        self.posted += extents

    def _check(self, read: data_plane.Read) -> str:
        return ""

    def _drop(self, peer: data_plane.Peer) -> None: ...


def endpoint(data: bytes) -> None:
    """Reads at both ends of the memory that an honest endpoint has, and one list of them all."""
    plane = Posting()
    try:
        found = data_plane.decode(data, plane.name)
    except ValueError:
        return
    extents = [
        data_plane.Extent(BASE, remote, length)
        for length in (1, SLOT_BYTES, MEMORY.size)
        for remote in (BASE, BASE - 1, BASE + MEMORY.size - length, BASE + MEMORY.size)
    ]
    for some in (*([one] for one in extents), extents):
        plane.start("read", data_plane.Peer(found), some)
    begin, end = found.memory.address, found.memory.address + found.memory.size
    for _, remote, length in plane.posted:
        assert begin <= remote <= remote + length <= end, "a read outside the peer's memory"
    assert len(plane.ended()) == len(extents) + 1


def answer(*names: bytes) -> bytes:
    """Of a server with these ranks."""
    rows = [new_row(rank, len(names), name) for rank, name in enumerate(names)]
    return b'{"protocol":2,"rows":%b}' % msgspec.json.encode(rows)


WITHOUT = msgspec.structs.replace(OWN, draft=None, staging=None)
SENT: list[messages.Message] = [
    messages.Open(2, 7, 10, b"prefill_", b"reader_0", 2, (0, 4), 16, 1 << 20),
    messages.Ready(7, 10, 3, 48, (messages.Announced(5, 99, 16),), True),
    messages.Ack(((5, 99), (6, 100))),
    messages.Fail(7, 10, "closed", "a reason"),
]  # fmt: skip
SEEDS = {
    "message": [messages.encode(message) for message in SENT],
    "row": [
        msgspec.json.encode(WITHOUT),
        msgspec.json.encode(OWN),
        answer(b"prefill0", b"prefill1"),
        answer(b"prefill0", b"prefill0"),
    ],
    "endpoint": [
        msgspec.msgpack.encode(data_plane.Endpoint("nixl", b"target", MEMORY, b"instance"))
    ],
}
