"""The parsers, which need no SGLang. Each target is one input -> nothing, or any error: a finding.

A parser returns, or raises MixKVError; what it lets through can be worked with.
"""

from __future__ import annotations

import json
from contextlib import suppress

from mutate import unpack

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.protocol import announcement as announcing
from sglang_mixkv.protocol import extension as wire
from sglang_mixkv.protocol import messages
from sglang_mixkv.protocol import registration as registering
from sglang_mixkv.protocol.messages import MetadataPositions
from sglang_mixkv.protocol.registration import Positions

AUX_ITEM_LENS, AUX_ROWS = (32, 8), (3, 5)


def prefill(data: bytes) -> None:
    """Messages to a prefill rank, told apart as prefill/gate.py does."""
    for frames in unpack(data):
        with suppress(MixKVError):
            if frames[0] == b"None":
                registering.session_of(frames, Positions())
                registering.read(frames, Positions())
            elif frames[0] == messages.ABORT:
                messages.read_abort(frames)
            else:
                messages.metadata_sender(frames, MetadataPositions())
                messages.read_metadata(frames, MetadataPositions())


def decode(data: bytes) -> None:
    """Messages to a decode rank, told apart as decode/gate.py does."""
    for frames in unpack(data):
        with suppress(MixKVError):
            if wire.decode_digest(frames) is not None:
                continue
            if frames[0] == b"ABORT_ACK":
                messages.read_ack(frames)
            elif frames[0] == b"AUX_DATA":
                aux = messages.read_aux(frames, AUX_ITEM_LENS, AUX_ROWS)
                size = AUX_ITEM_LENS[aux.buffer]
                end = aux.row * size + len(frames[5])
                assert 0 <= end <= AUX_ROWS[aux.buffer] * size, "outside its buffer"
            else:
                messages.read_status(frames)


def extension(data: bytes) -> None:
    """The plugin's frame, of a registration and of metadata."""
    for frames in unpack(data):
        try:
            _, frame = wire.split(frames, max(1, len(frames) - 1), "message")
        except MixKVError:
            continue
        with suppress(MixKVError):
            wire.decode_extension(frame)
        with suppress(MixKVError):
            grant = wire.decode_grant(frame)
            assert grant is None or 0 <= grant.address < 1 << 63, "no address"


def registration(data: bytes) -> None:
    """A registration as a whole: what it says of memory is inside the address space."""
    for frames in unpack(data):
        with suppress(MixKVError):
            said = registering.read(frames, Positions())
            said.check()
            last = (said.pages or 0) - 1
            for ptr, item in zip(said.kv_ptrs, said.kv_item_lens, strict=True):
                assert ptr + last * item < 1 << 63, "a page outside the address space"
            assert all(rows is None or rows > 0 for _, rows in said.states), "state without rows"
            if said.draft_spread is not None:
                said.shard(said.draft_spread, slice(said.first_draft, None), 4).check("draft")


def announcement(data: bytes) -> None:
    """A prefill server's facts, and what its bootstrap server keeps of a row."""
    with suppress(MixKVError):
        announcing.read_announcement(data, "a server")
    with suppress(ValueError, RecursionError):  # aiohttp's own JSON refuses the request
        said = json.loads(data)
        assert len(announcing.kept(said) or b"") <= announcing.MAX_ANNOUNCEMENT
