"""The parsers that need no SGLang. Each target is one input -> nothing, or any error: a finding.

A parser returns, or raises MixKVError; what it lets through can be worked with.
"""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from types import SimpleNamespace

from mutate import unpack

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.protocol import announcement as announcing
from sglang_mixkv.protocol import extension as wire
from sglang_mixkv.protocol import frames as stock_frames
from sglang_mixkv.protocol.registration import PeerRegistration

AUX_ITEM_LENS, AUX_ROWS = (32, 8), (3, 5)


def prefill(data: bytes) -> None:
    """Messages to a prefill rank, told apart as engine/gate.py does."""
    for frames in unpack(data):
        with suppress(MixKVError):
            if frames[0] == b"None":
                stock_frames.check_registration(frames)
            elif frames[0] == b"ABORT":
                stock_frames.check_abort(frames)
            else:
                stock_frames.metadata_sender(frames)
                stock_frames.check_metadata(frames)


def decode(data: bytes) -> None:
    """Messages to a decode rank, told apart as engine/decode.py does."""
    for frames in unpack(data):
        with suppress(MixKVError):
            if wire.decode_digest(frames) is not None:
                continue
            if frames[0] == b"ABORT_ACK":
                stock_frames.check_ack(frames)
            elif frames[0] == b"AUX_DATA":
                aux = stock_frames.check_aux(frames, AUX_ITEM_LENS, AUX_ROWS)
                size = AUX_ITEM_LENS[aux.buffer]
                end = aux.row * size + len(frames[5])
                assert 0 <= end <= AUX_ROWS[aux.buffer] * size, "outside its buffer"
            else:
                stock_frames.check_status(frames)


def extension(data: bytes) -> None:
    """The plugin's frame, of a registration and of metadata."""
    for frames in unpack(data):
        with suppress(MixKVError):
            wire.decode(frames)
        with suppress(MixKVError):
            grant = wire.decode_grant(frames)
            assert grant is None or 0 <= grant.address < 1 << 63, "no address"


def registration(data: bytes) -> None:
    """A registration as a whole: what it says of memory is inside the address space."""
    for frames in unpack(data):
        with suppress(MixKVError):
            stock_frames.check_registration(frames)
            peer = PeerRegistration(_stand_in(frames), wire.decode(frames))
            peer.check()
            spread = peer.draft_spread
            last = (peer.pages or 0) - 1
            for ptr, item in zip(peer.info.dst_kv_ptrs, peer.info.dst_kv_item_lens, strict=True):
                assert ptr + last * item < 1 << 63, "a page outside the address space"
            if spread is not None:
                peer.shard(spread, slice(peer.first_draft, None), 4).check("draft")


def _stand_in(frames: list[bytes]) -> SimpleNamespace:
    """What KVArgsRegisterInfo.from_zmq reads of a registration, as far as it is asked for."""

    def lists(frame: bytes, code: str) -> list[list[int]]:
        width = struct.calcsize(code)
        sizes = stock_frames.lists(frame, "", width)
        numbers = iter(struct.unpack(f"<{sum(sizes)}{code}", frame[4 * (1 + len(sizes)) :]))
        return [[next(numbers) for _ in range(size)] for size in sizes]

    return SimpleNamespace(
        mooncake_session_id=frames[3].decode(),
        dst_kv_ptrs=list(struct.unpack(f"{len(frames[4]) // 8}Q", frames[4])),
        dst_aux_ptrs=list(struct.unpack(f"{len(frames[5]) // 8}Q", frames[5])),
        dst_state_data_ptrs=lists(frames[6], "Q"),
        dst_state_item_lens=lists(frames[10], "I"),
        dst_tp_rank=int(frames[7]),
        dst_attn_tp_size=int(frames[8]),
        dst_kv_item_lens=list(struct.unpack(f"{len(frames[19]) // 8}Q", frames[19])),
    )


def announcement(data: bytes) -> None:
    """A prefill server's facts, and what its bootstrap server keeps of a row."""
    with suppress(MixKVError):
        announcing.read_announcement(data, "a server")
    with suppress(ValueError, RecursionError):  # aiohttp's own JSON refuses the request
        said = json.loads(data)
        assert len(announcing.kept(said) or b"") <= announcing.MAX_ANNOUNCEMENT
