"""Control messages: what is right passes, and each thing that can be wrong with one is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.protocol import announcement as announcing
from sglang_mixkv.protocol import extension as wire
from sglang_mixkv.protocol import frames
from sglang_mixkv.protocol.announcement import announcement, kept, read_announcement
from sglang_mixkv.protocol.facts import DraftFacts, Facts
from sglang_mixkv.protocol.registration import PeerRegistration

Message = list[bytes]
Change = Callable[[Message], None]


def u64(*numbers: int) -> bytes:
    return struct.pack(f"{len(numbers)}Q", *numbers)


def int_lists(code: str, *lists: list[int]) -> bytes:
    """As sglang: common/utils.py pack_int_lists."""
    parts = [struct.pack(f"<{len(numbers)}{code}", *numbers) for numbers in lists]
    head = struct.pack(f"<{1 + len(parts)}I", len(parts), *map(len, parts)) if parts else b""
    return head + b"".join(parts)


FACTS = Facts(
    plugin="0.1.0", engine="0.5.23", page_size=4, kv_cache_dtype="bf16", aux_item_lens=(64, 8),
    state_types=("mamba",), draft=DraftFacts("mha", "LlamaForCausalLMEagle3", 8, (32, 32)),
)  # fmt: skip
ROUTE = wire.RouteNotice(True, wire.HeadRange(0, 1), wire.HeadRange(0, 8), True, True)
EXTENSION = wire.Registration(
    FACTS, 2, "mha", 8, 8, (4096, 4096, 1 << 20, 1 << 20), ROUTE,
    staging=(1 << 40, 1 << 20), aux_rows=3, state_lens=((128,),),
)  # fmt: skip
SENDER = [b"127.0.0.1", b"9000", b"127.0.0.1:9100"]


def registration(**changed: Any) -> Message:
    """Two entries of an MLA target, two of the drafter, one of state, two aux buffers."""
    extension = msgspec.structs.replace(EXTENSION, **changed)
    return [
        b"None", *SENDER, u64(1 << 44, 1 << 45, 1 << 46, 1 << 42), u64(1 << 43, 1 << 41),
        int_lists("Q", [1 << 39]), b"0", b"1", b"1024", int_lists("I", [64]), int_lists("I", [8]),
        b"", int_lists("I", [0]), b"", b"", b"1", b"0", b"", u64(1024, 1024, 1024, 1024),
        wire.encode(extension),
    ]  # fmt: skip


def metadata() -> Message:
    pages = np.array([1, 2, 3], np.int32).tobytes()
    grant = wire.encode(wire.Grant(1 << 40, 12))
    return [b"100", *SENDER, pages, b"1", int_lists("i", [1]), b"1", b"64", b"", grant]


def put(index: int, frame: bytes) -> Change:
    return lambda message: message.__setitem__(index, frame)


def test_right_messages_pass() -> None:
    assert frames.check_registration(registration()).port == 9000
    said = frames.check_metadata(metadata())
    assert (said.room, said.required, said.prefix, said.aux_index) == (100, 1, 64, 1)
    assert said.pages.tolist() == [1, 2, 3]
    assert [indices.tolist() for indices in said.states] == [[1]]
    dummy = frames.check_metadata([b"100", *SENDER, b"", b"", b"", b"1", b"0", b""])
    assert dummy.is_dummy
    assert frames.check_abort([b"ABORT", b"7"]).room == 7
    assert frames.check_abort([b"ABORT", b"7", b"::1", b"80", b"3"]).generation == 3
    assert frames.check_status([b"7", b"4", b"1", b"why"]).status == 4
    assert (
        frames.check_aux([b"AUX_DATA", b"7", b"0", b"2", b"\0\0\0\4", b"1234"], [8], [3]).row == 2
    )


@pytest.mark.parametrize(
    "lists", [[], [[]], [[1, 2], []], [[], [3]], [[1], [2, 3], [4]]], ids=lambda found: str(found)
)
def test_lists_are_read_as_stock_packs_them(lists: list[list[int]]) -> None:
    found = frames.int_lists(int_lists("i", *lists), "lists")
    assert [numbers.tolist() for numbers in found] == lists


@pytest.mark.parametrize("room", [0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64])
def test_a_room_is_any_uint64(room: int) -> None:
    """As wide as SGLang's row of room numbers; on both sides, in every message."""
    number = str(room).encode()
    messages: list[Callable[[], object]] = [
        lambda: frames.check_metadata([number, *metadata()[1:]]),
        lambda: frames.check_abort([b"ABORT", number]),
        lambda: frames.check_status([number, b"4", b"1"]),
        lambda: frames.check_ack([b"ABORT_ACK", number, b"1", b"1"]),
        lambda: frames.check_aux([b"AUX_DATA", number, b"0", b"2", b"\0\0\0\4", b"12"], [8], [3]),
    ]
    for check in messages:
        with pytest.raises(MixKVError) if room >= 1 << 64 else nullcontext():
            check()


NO_NUMBERS = [b"", b"-1", b"--1", b"+1", b" 1", b"1 ", b"1_0", b"1.0", b"1e3", b"\xff", b"\0",
              "٣".encode(), b"9" * 21, str(1 << 63).encode(), str(1 << 64).encode()]  # fmt: skip


@pytest.mark.parametrize("frame", NO_NUMBERS)
@pytest.mark.parametrize("index", [2, 7, 8, 9])
def test_no_number_in_a_registration(index: int, frame: bytes) -> None:
    message = registration()
    message[index] = frame
    with pytest.raises(MixKVError):
        frames.check_registration(message)


@pytest.mark.parametrize(
    ("index", "frame"),
    [(i, f) for i in (0, 2, 5, 7, 8) for f in NO_NUMBERS if i or f != str(1 << 63).encode()],
)
def test_no_number_in_metadata(index: int, frame: bytes) -> None:
    message = metadata()
    message[index] = frame
    with pytest.raises(MixKVError):
        frames.check_metadata(message)


WRONG_REGISTRATIONS: dict[str, Change] = {
    "session without a host": put(3, b"9100"),
    "session without a port": put(3, b"127.0.0.1"),
    "session of port 0": put(3, b"127.0.0.1:0"),
    "endpoint that is not UTF-8": put(1, b"\xff\xfe"),
    "endpoint with NUL": put(1, b"127.0.0.1\0"),
    "endpoint with a blank": put(1, b"127.0.0.1 "),
    "endpoint of a file": put(1, b"../etc"),
    "endpoint too long": put(1, b"a" * 257),
    "rank beyond the size": put(7, b"1"),
    "size 0": put(8, b"0"),
    "pointers cut": put(4, u64(1)[:-1]),
    "item lengths of another number": put(19, u64(1024)),
    "frame above the limit": put(12, b"\0" * (frames.MAX_FRAME + 4)),
    "more lists than bytes": put(6, struct.pack("<I", 1 << 31)),
    "lists beyond the limit": put(6, struct.pack("<I", 1 << 20) + b"\0" * (4 << 20)),
    "lists that overlap": put(6, struct.pack("<3I", 2, 8, 8) + b"\0" * 8),
    "list of another width": put(6, struct.pack("<2I", 1, 7) + b"\0" * 7),
    "staging pointer cut": put(14, b"\0" * 7),
    "DCP rank beyond its size": put(17, b"1"),
    "cut": lambda message: message.__delitem__(slice(19, None)),
    "two extensions": lambda message: message.append(message[-1]),
}


@pytest.mark.parametrize("what", WRONG_REGISTRATIONS)
def test_wrong_registrations_are_refused(what: str) -> None:
    message = registration()
    WRONG_REGISTRATIONS[what](message)
    with pytest.raises(MixKVError):
        frames.check_registration(message)


WRONG_METADATA: dict[str, Change] = {
    "pages cut": put(4, b"\0" * 7),
    "pages without an aux row": put(5, b""),
    "device pages": put(9, b"\0" * 4),
    "states cut": put(6, int_lists("i", [1])[:-1]),
    "states beyond their bytes": put(6, struct.pack("<2I", 1, 1 << 31)),
    "no decode rank": put(7, b"0"),
    "session without a port": put(3, b"127.0.0.1"),
    "frame above the limit": put(4, b"\0" * (frames.MAX_PAGES_FRAME + 4)),
    "two frames more": lambda message: message.append(b""),
}


@pytest.mark.parametrize("what", WRONG_METADATA)
def test_wrong_metadata_is_refused(what: str) -> None:
    message = metadata()
    WRONG_METADATA[what](message)
    with pytest.raises(MixKVError):
        frames.check_metadata(message)


@pytest.mark.parametrize(
    "message",
    [
        [b"ABORT"], [b"ABORT", b"x"], [b"ABORT", b"1", b"\0", b"80"], [b"ABORT", b"1", b"h", b"0"],
        [b"ABORT", b"1", b"h", b"80", b"-1"], [b"ABORT", b"1", b"h", b"80", b"1", b"1"],
    ],
)  # fmt: skip
def test_wrong_aborts_are_refused(message: Message) -> None:
    with pytest.raises(MixKVError):
        frames.check_abort(message)


@pytest.mark.parametrize(
    "message",
    [
        [b"1", b"4"], [b"1", b"5", b"0"], [b"1", b"-1", b"0"], [b"1", b"4", b"9999999"],
        [b"x", b"4", b"0"], [b"1", b"4", b"0", b"\0" * (frames.MAX_FRAME + 1)],
    ],
)  # fmt: skip
def test_wrong_statuses_are_refused(message: Message) -> None:
    with pytest.raises(MixKVError):
        frames.check_status(message)


@pytest.mark.parametrize(
    "changed",
    [(2, b"1"), (2, b"-1"), (3, b"3"), (3, b"-1"), (4, b"\0"), (5, b"123456789")],
)
def test_aux_data_outside_its_row_is_refused(changed: tuple[int, bytes]) -> None:
    message = [b"AUX_DATA", b"7", b"0", b"2", b"\0\0\0\4", b"1234"]
    message[changed[0]] = changed[1]
    with pytest.raises(MixKVError):
        frames.check_aux(message, [8], [3])


# ---------------------------------------------------------------- extension


DEEP = b"\x91" * 12_000 + b"\x01"


@pytest.mark.parametrize(
    "changed",
    [
        {"num_draft_entries": -1}, {"draft_total_heads": 1 << 63}, {"kv_data_lens": (-1,)},
        {"kv_data_lens": ((1 << 64) - 1,)}, {"kv_data_lens": (0.5,)}, {"kv_data_lens": (0,) * 5000},
        {"draft_kind": "x" * 300}, {"stages": ("0",)}, {"staging": (0, 0, 0)}, {"aux_rows": -1},
        {"state_lens": ((-1,),)}, {"draft_window": -1}, {"route": None}, {"facts": None},
        {"draft_kind": msgspec.Raw(b"\xa1\xff")}, {"aux_rows": msgspec.Raw(DEEP)},
        {"draft_kind": msgspec.Raw(b"\xa1x\xa1y" + DEEP)},
        {"stages": msgspec.Raw(b"\xdd\x7f\xff\xff\xff")},
    ],
    ids=str,
)  # fmt: skip
def test_what_an_extension_cannot_say(changed: dict[str, Any]) -> None:
    with pytest.raises(MixKVError):
        wire.decode(registration(**changed))


def test_unknown_fields_pass_unless_they_are_nested_deeply() -> None:
    fields = msgspec.to_builtins(EXTENSION)
    frame = wire.MAGIC + b"\0\1" + msgspec.msgpack.encode({**fields, "more": [[1]]})
    assert wire.decode_extension(frame) == EXTENSION
    deep = wire.MAGIC + b"\0\1" + msgspec.msgpack.encode({**fields, "more": msgspec.Raw(DEEP)})
    with pytest.raises(MixKVError, match="recursion"):
        wire.decode_extension(deep)


@pytest.mark.parametrize("grant", [(-1, 4), (1 << 63, 4), (4, -1), (4,), (0.5, 4), ("0", 4)])
def test_what_a_grant_cannot_say(grant: tuple) -> None:
    frame = wire.MAGIC + b"\0\1" + msgspec.msgpack.encode(grant)
    with pytest.raises(MixKVError):
        wire.decode_grant([*metadata()[:10], frame])


# ---------------------------------------------------------------- registration as a whole


def peer(message: Message) -> PeerRegistration:
    """As KVArgsRegisterInfo.from_zmq reads it."""

    def numbers(frame: bytes) -> list[int]:
        return list(struct.unpack(f"{len(frame) // 8}Q", frame))

    info = SimpleNamespace(
        dst_kv_ptrs=numbers(message[4]), dst_aux_ptrs=numbers(message[5]),
        dst_state_data_ptrs=[[1 << 39]], dst_state_item_lens=[[64]], dst_tp_rank=0,
        dst_attn_tp_size=1, dst_kv_item_lens=numbers(message[19]),
    )  # fmt: skip
    return PeerRegistration(info, wire.decode(message))


def test_a_right_registration_says_what_bounds_its_rooms() -> None:
    one = peer(registration())
    one.check()
    assert one.pages == 4
    assert one.states == (("mamba", 2),)


@pytest.mark.parametrize(
    "changed",
    [
        {"kv_data_lens": (4096,)}, {"num_draft_entries": 5}, {"draft_kind": "gqa"},
        {"draft_kind": "mla"}, {"draft_total_heads": 4}, {"num_draft_entries": 0},
        {"facts": msgspec.structs.replace(FACTS, draft=None)}, {"state_lens": ()},
        {"state_lens": ((128, 128),)}, {"state_lens": ((128,), (128,))},
        {"kv_data_lens": (4096, 4096, 1 << 20, (1 << 63) - 1)}, {"state_lens": (((1 << 63) - 1,),)},
        {"aux_rows": 1 << 61}, {"staging": (1 << 62, 1 << 62)}, {"staging": ((1 << 63) - 1, 1)},
        {"facts": msgspec.structs.replace(FACTS, aux_item_lens=(64,))},
        {"facts": msgspec.structs.replace(FACTS, state_types=())},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_registration_cannot_say(changed: dict[str, Any]) -> None:
    with pytest.raises(MixKVError):
        peer(registration(**changed)).check()


@pytest.mark.parametrize(
    ("index", "frame"),
    [
        (4, u64((1 << 63) - 4096, 1, 1, 1)),
        (4, u64((1 << 64) - 1, 1, 1, 1)),
        (5, u64((1 << 64) - 1, 1)),
        (5, u64(1)),
        (19, u64(0, 1024, 1024, 1024)),
        (19, u64(1 << 63, 1024, 1024, 1024)),
    ],
)
def test_addresses_that_are_no_memory(index: int, frame: bytes) -> None:
    message = registration()
    message[index] = frame
    with pytest.raises(MixKVError):
        peer(message).check()


# ---------------------------------------------------------------- announcement


def test_an_announcement_is_read() -> None:
    body = msgspec.json.encode(announcement(FACTS))
    assert read_announcement(body, "a server") == FACTS
    assert kept(msgspec.json.decode(body)) == body


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"{}", b'{"protocol":2}', b'{"protocol":1}', b'{"protocol":"1"}',
        b'{"protocol":1,"facts":null}', b"[" * 50_000, b'{"x":' + b"[" * 50_000, b"\xff",
        b'{"protocol":1,"facts":{"plugin":"\xff"}}', b'{"protocol":' + b"9" * 5000 + b"}",
        b"{}" + b" " * announcing.MAX_ANNOUNCEMENT,
    ],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
def test_what_an_announcement_cannot_say(body: bytes) -> None:
    with pytest.raises(MixKVError):
        read_announcement(body, "a server")


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"x": found}
    return found


@pytest.mark.parametrize(
    "said", [None, 1, [], "x", nested(10_500), {"x": "\ud800"}, {"x": "y" * (64 << 10)}],
    ids=lambda said: str(type(said)),
)  # fmt: skip
def test_what_a_bootstrap_server_does_not_pass_on(said: Any) -> None:
    assert kept(said) is None
