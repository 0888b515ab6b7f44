"""Control messages: what is right passes, and each thing that can be wrong with one is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.protocol import announcement as announcing
from sglang_mixkv.protocol import extension as wire
from sglang_mixkv.protocol import frames, messages
from sglang_mixkv.protocol import registration as registrations
from sglang_mixkv.protocol.announcement import announcement, kept, read_announcement
from sglang_mixkv.protocol.facts import DraftFacts, Facts
from sglang_mixkv.protocol.messages import Metadata, MetadataPositions
from sglang_mixkv.protocol.registration import Positions, Registration

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
EXTENSION = wire.Extension(
    FACTS, 2, "mha", 8, 8, (4096, 4096, 1 << 20, 1 << 20), ROUTE,
    staging=(1 << 40, 1 << 20), aux_rows=3, state_lens=((128,),),
)  # fmt: skip
SENDER = [b"127.0.0.1", b"9000", b"127.0.0.1:9100"]
AUX = [b"AUX_DATA", b"7", b"0", b"2", b"\0\0\0\4", b"1234"]


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


def read(message: Message) -> Registration:
    return registrations.read(message, Positions())


def read_metadata(message: Message) -> Metadata:
    return messages.read_metadata(message, MetadataPositions())


def put(index: int, frame: bytes) -> Change:
    return lambda message: message.__setitem__(index, frame)


def test_right_messages_pass() -> None:
    said = read(registration())
    said.check()
    assert said.sender == frames.Address("127.0.0.1", 9000, "127.0.0.1:9100")
    assert (said.attn_tp_rank, said.attn_tp_size, said.dcp_rank, said.dcp_size) == (0, 1, 0, 1)
    assert (said.kv_ptrs[3], said.aux_ptrs[1], said.first_draft) == (1 << 42, 1 << 41, 2)
    assert (said.state_ptrs, said.state_item_lens) == (((1 << 39,),), ((64,),))
    assert (said.extension, said.pages, said.states) == (EXTENSION, 4, (("mamba", 2),))
    assert messages.read_abort([b"ABORT", b"7"]) == messages.Abort(7)
    assert messages.read_abort([b"ABORT", b"7", b"::1", b"80", b"3"]).generation == 3
    assert messages.read_status([b"7", b"4", b"1", b"why"]) == messages.Status(7, 4, 1, "why")
    assert messages.read_ack([b"ABORT_ACK", b"7", b"1", b"3"]) == messages.Ack(7, 1, 3)
    assert messages.read_ack([b"ABORT_ACK", b"7"]) == messages.Ack(7)
    assert messages.read_aux(AUX, [8], [3]) == messages.Aux(7, 0, 2)


def test_windows_of_the_drafters_entries() -> None:
    """One for all of them, as 0.1.0 has it, or one each."""
    windows = [
        read(registration(**said)).draft_windows
        for said in ({}, {"draft_window": 512}, {"draft_windows": (99, 0)})
    ]
    assert windows == [(0, 0), (512, 512), (99, 0)]


def test_right_metadata_passes() -> None:
    said = read_metadata(metadata())
    assert (said.room, said.required, said.prefix, said.aux_index) == (100, 1, 64, 1)
    assert said.pages.tolist() == [1, 2, 3]
    assert [indices.tolist() for indices in said.states] == [[1]]
    assert said.grant == wire.Grant(1 << 40, 12)
    assert read_metadata(metadata()[:-1]).grant is None
    dummy = read_metadata([b"100", *SENDER, b"", b"", b"", b"1", b"0", b""])
    assert dummy.is_dummy


def with_more(message: Message, count: int) -> Message:
    """With so many more frames of SGLang's own."""
    return [*message[:-1], *[b"new"] * count, message[-1]]


def test_sglang_may_add_frames() -> None:
    """The extension is the last frame, by its magic, wherever SGLang's own end."""
    for count in (1, most := wire.MAX_NEW_FRAMES):
        assert read(with_more(registration(), count)) == read(registration())
        assert read_metadata(with_more(metadata(), count)).grant == wire.Grant(1 << 40, 12)
    for reader, right in ((read, registration()), (read_metadata, metadata())):
        with pytest.raises(MixKVError, match="frames; expected"):
            reader(with_more(right, most + 1))
        for wrong in ([*right, b"new"], [*right[:-1], b"spoilt"]):
            with pytest.raises(MixKVError, match="frames; expected"):
                reader(wrong)


@pytest.mark.parametrize(
    "lists", [[], [[]], [[1, 2], []], [[], [3]], [[1], [2, 3], [4]]], ids=lambda found: str(found)
)
def test_lists_are_read_as_stock_packs_them(lists: list[list[int]]) -> None:
    found = frames.lists(int_lists("i", *lists), "lists", np.int32)
    assert [numbers.tolist() for numbers in found] == lists


@pytest.mark.parametrize("room", [0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64])
def test_a_room_is_any_uint64(room: int) -> None:
    """As wide as SGLang's row of room numbers; on both sides, in every message."""
    number = str(room).encode()
    readers: list[Callable[[], object]] = [
        lambda: read_metadata([number, *metadata()[1:]]),
        lambda: messages.read_abort([b"ABORT", number]),
        lambda: messages.read_status([number, b"4", b"1"]),
        lambda: messages.read_ack([b"ABORT_ACK", number, b"1", b"1"]),
        lambda: messages.read_aux([AUX[0], number, *AUX[2:]], [8], [3]),
    ]
    for reader in readers:
        with pytest.raises(MixKVError) if room >= 1 << 64 else nullcontext():
            reader()


NO_NUMBERS = [b"", b"-1", b"--1", b"+1", b" 1", b"1 ", b"1_0", b"1.0", b"1e3", b"\xff", b"\0",
              "٣".encode(), b"9" * 21, str(1 << 63).encode(), str(1 << 64).encode()]  # fmt: skip


@pytest.mark.parametrize("frame", NO_NUMBERS)
@pytest.mark.parametrize("index", [2, 7, 8, 9])
def test_no_number_in_a_registration(index: int, frame: bytes) -> None:
    message = registration()
    message[index] = frame
    with pytest.raises(MixKVError):
        read(message).check()


@pytest.mark.parametrize(
    ("index", "frame"),
    [(i, f) for i in (0, 2, 5, 7, 8) for f in NO_NUMBERS if i or f != str(1 << 63).encode()],
)
def test_no_number_in_metadata(index: int, frame: bytes) -> None:
    message = metadata()
    message[index] = frame
    with pytest.raises(MixKVError):
        read_metadata(message)


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
    "DCP size other than in its facts": put(16, b"2"),
    "cut": lambda message: message.__delitem__(slice(19, None)),
    "an extension that is not the last frame": lambda message: message.append(b""),
    "no extension": lambda message: message.pop(),
}


@pytest.mark.parametrize("what", WRONG_REGISTRATIONS)
def test_wrong_registrations_are_refused(what: str) -> None:
    message = registration()
    WRONG_REGISTRATIONS[what](message)
    with pytest.raises(MixKVError):
        read(message).check()


WRONG_METADATA: dict[str, Change] = {
    "pages cut": put(4, b"\0" * 7),
    "pages without an aux row": put(5, b""),
    "device pages": put(9, b"\0" * 4),
    "states cut": put(6, int_lists("i", [1])[:-1]),
    "states beyond their bytes": put(6, struct.pack("<2I", 1, 1 << 31)),
    "no decode rank": put(7, b"0"),
    "session without a port": put(3, b"127.0.0.1"),
    "frame above the limit": put(4, b"\0" * (frames.MAX_PAGES_FRAME + 4)),
    "a grant that is a registration": put(10, wire.encode(EXTENSION)),
    "cut": lambda message: message.__delitem__(slice(9, None)),
}


@pytest.mark.parametrize("what", WRONG_METADATA)
def test_wrong_metadata_is_refused(what: str) -> None:
    message = metadata()
    WRONG_METADATA[what](message)
    with pytest.raises(MixKVError):
        read_metadata(message)


@pytest.mark.parametrize(
    "message",
    [
        [b"ABORT"], [b"ABORT", b"x"], [b"ABORT", b"1", b"\0", b"80"], [b"ABORT", b"1", b"h", b"0"],
        [b"ABORT", b"1", b"h", b"80", b"-1"], [b"ABORT", b"1", b"h", b"80", b"1", b"1"],
    ],
)  # fmt: skip
def test_wrong_aborts_are_refused(message: Message) -> None:
    with pytest.raises(MixKVError):
        messages.read_abort(message)


@pytest.mark.parametrize(
    "message",
    [
        [b"1", b"4"], [b"1", b"5", b"0"], [b"1", b"-1", b"0"], [b"1", b"4", b"9999999"],
        [b"x", b"4", b"0"], [b"1", b"4", b"0", b"\0" * (frames.MAX_FRAME + 1)],
    ],
)  # fmt: skip
def test_wrong_statuses_are_refused(message: Message) -> None:
    with pytest.raises(MixKVError):
        messages.read_status(message)


@pytest.mark.parametrize(
    "changed",
    [(2, b"1"), (2, b"-1"), (3, b"3"), (3, b"-1"), (4, b"\0"), (5, b"123456789")],
)
def test_aux_data_outside_its_row_is_refused(changed: tuple[int, bytes]) -> None:
    message = list(AUX)
    message[changed[0]] = changed[1]
    with pytest.raises(MixKVError):
        messages.read_aux(message, [8], [3])


@pytest.mark.parametrize(
    "message",
    [
        [b"ABORT_ACK"], [b"ABORT_ACK", b"x"], [b"ABORT_ACK", b"1", b"-1"],
        [b"ABORT_ACK", b"1", b"1", b"x"], [b"ABORT_ACK", b"1", b"1", b"1", b"1"],
    ],
)  # fmt: skip
def test_wrong_acknowledgements_are_refused(message: Message) -> None:
    with pytest.raises(MixKVError):
        messages.read_ack(message)


@given(st.lists(st.binary(max_size=8), max_size=32))
def test_any_frames_end_in_a_reason(message: Message) -> None:
    for reader in (read, read_metadata):
        with pytest.raises(MixKVError):
            reader(message)


# ---------------------------------------------------------------- extension


def test_an_extension_is_read_as_it_was_written() -> None:
    assert wire.decode_extension(wire.encode(EXTENSION)) == EXTENSION
    digest = wire.Digest(7, 1, ((1, 2),), ())
    assert wire.decode_digest([wire.encode(digest)]) == digest
    assert wire.decode_digest([b"7", b"4", b"0"]) is None
    with pytest.raises(MixKVError, match="a digest of 2 frames"):
        wire.decode_digest([wire.encode(digest), b""])


def test_without_an_extension_the_reason_names_the_plugin() -> None:
    with pytest.raises(MixKVError, match="does not run sglang-mixkv") as found:
        read(registration()[:-1])
    assert found.value.reason == "no_plugin"


def test_another_protocol_is_named_before_its_schema_is_read() -> None:
    frame = wire.MAGIC + struct.pack(">H", wire.PROTOCOL + 1) + b"\xff not msgpack"
    with pytest.raises(MixKVError, match=f"protocol {wire.PROTOCOL + 1}") as found:
        wire.decode_extension(frame)
    assert found.value.reason == "protocol"


ENCODED = wire.encode(EXTENSION)


@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda b: ENCODED[:7] + b))
def test_any_bytes_end_in_a_reason(frame: bytes) -> None:
    with pytest.raises(MixKVError):
        wire.decode_extension(frame)


@given(st.integers(0, len(ENCODED) - 1))
def test_an_extension_that_is_cut_short_ends_in_a_reason(end: int) -> None:
    with pytest.raises(MixKVError):
        wire.decode_extension(ENCODED[:end])


def test_an_extension_that_is_too_large_is_refused() -> None:
    with pytest.raises(MixKVError):
        wire.decode_extension(ENCODED + b"\0" * wire.MAX_EXTENSION)


DEEP = b"\x91" * 12_000 + b"\x01"


@pytest.mark.parametrize(
    "changed",
    [
        {"num_draft_entries": -1}, {"draft_total_heads": 1 << 63}, {"kv_data_lens": (-1,)},
        {"kv_data_lens": ((1 << 64) - 1,)}, {"kv_data_lens": (0.5,)}, {"kv_data_lens": (0,) * 5000},
        {"draft_kind": "x" * 300}, {"stages": ("0",)}, {"staging": (0, 0, 0)}, {"aux_rows": -1},
        {"state_lens": ((-1,),)}, {"draft_window": -1}, {"draft_windows": (0, -1)},
        {"route": None}, {"facts": None},
        {"draft_kind": msgspec.Raw(b"\xa1\xff")}, {"aux_rows": msgspec.Raw(DEEP)},
        {"draft_kind": msgspec.Raw(b"\xa1x\xa1y" + DEEP)},
        {"stages": msgspec.Raw(b"\xdd\x7f\xff\xff\xff")},
    ],
    ids=str,
)  # fmt: skip
def test_what_an_extension_cannot_say(changed: dict[str, Any]) -> None:
    with pytest.raises(MixKVError):
        read(registration(**changed))


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
        read_metadata([*metadata()[:10], frame])


# ---------------------------------------------------------------- registration as a whole


@pytest.mark.parametrize(
    "changed",
    [
        {"kv_data_lens": (4096,)}, {"num_draft_entries": 5}, {"draft_kind": "gqa"},
        {"draft_windows": (99,)}, {"draft_windows": (99, 99, 99)},
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
        read(registration(**changed)).check()


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
        read(message).check()


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
