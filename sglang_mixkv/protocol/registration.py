"""A decode rank's registration with a prefill rank: SGLang's own frames and the extension.

`read` turns the frames into one value, `check` sees that it is whole and consistent. Nothing
here compares it with the rank that reads it; that is prefill/peer.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from sglang_mixkv.errors import MixKVError, refuse
from sglang_mixkv.kv.layout import Component, Kind, Shard, Spread
from sglang_mixkv.protocol import extension, frames
from sglang_mixkv.protocol.frames import Address, Frames

# One past the highest address that a destination may reach: addresses are added as int64.
MAX_ADDRESS = 1 << 63

# The kinds of state in which SGLang gives a layer an entry of no bytes: a DSA layer that shares the
# top-k of an earlier one has no index keys (sglang: disaggregation/utils.py is_elided_entry).
MAY_BE_ELIDED = ("dsa", "dsa_tail")

Lists = tuple[tuple[int, ...], ...]


def rows_in(lens: Sequence[int], item_lens: Sequence[int]) -> int | None:
    """Items that every entry has room for; None where there is no entry that takes any."""
    sizes = zip(lens, item_lens, strict=True)
    return min((length // item for length, item in sizes if item), default=None)


class Positions(msgspec.Struct, frozen=True):
    """Where SGLang puts what in a registration message, by frame number.

    The defaults are Mooncake's of SGLang 0.5.22 and 0.5.23 (KVArgsRegisterInfo.from_zmq in
    mooncake/conn.py); NIXL's stand in engine/releases.py (nixl/conn.py). `count`: frames that
    SGLang sends. None: this backend has no such frame. `read_session`: reads the name of the
    sender's transport session.
    """

    count: int = 20
    endpoint: int = 1
    port: int = 2
    session: int = 3
    kv_ptrs: int = 4
    aux_ptrs: int = 5
    state_ptrs: int = 6
    attn_tp_rank: int = 7
    attn_tp_size: int = 8
    kv_item_len: int = 9
    state_item_lens: int = 10
    state_dims: int = 11
    kv_layer_ids: int = 12
    state_layer_ids: int = 13
    staging_ptr: int = 14
    staging_size: int = 15
    dcp_size: int = 16
    dcp_rank: int = 17
    staging_layer_ids: int | None = 18
    kv_item_lens: int = 19
    device: int | None = None
    slots: int | None = None
    memory_kinds: int | None = None
    state_lens: int | None = None
    agent_metadata: int | None = None
    read_session: Callable[[bytes], str] = frames.session


class Registration(msgspec.Struct, frozen=True):
    """What a decode rank says of itself.

    `kv_ptrs`, `kv_item_lens`: address and bytes per page of every KV entry, the drafter's last.
    `state_ptrs`, `state_item_lens`: the same of each kind of model state. `kv_item_len`: the
    target's, as stock compares it under DCP.
    """

    sender: Address
    attn_tp_rank: int
    attn_tp_size: int
    kv_ptrs: tuple[int, ...]
    kv_item_lens: tuple[int, ...]
    kv_item_len: int
    kv_layer_ids: tuple[int, ...]
    aux_ptrs: tuple[int, ...]
    state_ptrs: Lists
    state_item_lens: Lists
    dcp_size: int
    dcp_rank: int
    extension: extension.Extension

    @property
    def first_draft(self) -> int:
        """Number of the drafter's first entry."""
        return len(self.kv_ptrs) - self.extension.num_draft_entries

    @property
    def pages(self) -> int | None:
        """Pages that every entry has room for; None without entries."""
        return rows_in(self.extension.kv_data_lens, self.kv_item_lens)

    @property
    def states(self) -> tuple[tuple[str, int | None], ...]:
        """Kind and rows of each component of state; rows None: nothing of it is ever written."""
        return tuple((kind, rows_in(lens, items)) for kind, lens, items in self._state_sizes())

    def _state_sizes(self) -> Iterator[tuple[str, Sequence[int], Sequence[int]]]:
        """Kind, region lengths and item lengths of each component of state."""
        said = self.extension
        return zip(said.facts.state_types, said.state_lens, self.state_item_lens, strict=True)

    @property
    def has_draft(self) -> bool:
        """Whether draft KV is to be sent to it."""
        return self.extension.num_draft_entries > 0 and not self.extension.cold

    @property
    def draft_spread(self) -> Spread | None:
        if not self.has_draft:
            return None
        return Spread(Kind(self.extension.draft_kind), self.extension.draft_total_heads)

    @property
    def draft_windows(self) -> tuple[int, ...]:
        """One for each of the drafter's entries."""
        said = self.extension
        return said.draft_windows or (said.draft_window,) * said.num_draft_entries

    def shard(
        self, spread: Spread, entries: slice, page_size: int, windows: tuple[int, ...] = ()
    ) -> Shard:
        """The decode rank's component in these of its entries."""
        items, lens = self.kv_item_lens[entries], self.extension.kv_data_lens[entries]
        return Shard(
            Component(spread, items, lens, windows),
            page_size,
            self.attn_tp_size,
            self.attn_tp_rank % self.attn_tp_size,
        )

    # -- consistency

    def check(self) -> None:
        """Raise MixKVError unless what it says of itself is whole, and consistent."""
        self._check_counts()
        self._check_state()
        self._check_draft()
        for ptr, length in self._regions():
            if ptr + length >= MAX_ADDRESS:
                text = f"a region of {length} bytes at {ptr:#x} lies outside the address space."
                raise MixKVError("MIXKV-REG-01", text)

    def _regions(self) -> Any:
        """(address, bytes) of everything that is written to."""
        said = self.extension
        aux = [n * said.aux_rows for n in said.facts.aux_item_lens]
        return chain(
            zip(self.kv_ptrs, said.kv_data_lens, strict=True),
            *(
                zip(*pair, strict=True)
                for pair in zip(self.state_ptrs, said.state_lens, strict=True)
            ),
            zip(self.aux_ptrs, aux, strict=True),
            [said.staging],
        )

    def _check_counts(self) -> None:
        """Pointers, item lengths and region lengths agree in number; nothing is empty."""
        said = self.extension
        counts = [len(self.kv_ptrs), len(self.kv_item_lens), len(said.kv_data_lens)]
        if len(set(counts)) != 1 or said.num_draft_entries > counts[0]:
            raise refuse(
                "MIXKV-REG-01",
                "as many pointers as item lengths and region lengths, the drafter's among them",
                f"{counts} and {said.num_draft_entries} draft entries",
                "entries would be paired wrongly",
                "Start both sides with the same SGLang and sglang-mixkv",
            )
        for length, item in zip(said.kv_data_lens, self.kv_item_lens, strict=True):
            _check_room("KV page", item, length)
        if len(self.aux_ptrs) != len(said.facts.aux_item_lens):
            raise MixKVError(
                "MIXKV-REG-01",
                f"{len(self.aux_ptrs)} metadata buffers with {len(said.facts.aux_item_lens)} sizes "
                "of their rows.",
            )

    def _check_state(self) -> None:
        """One pointer, item length and region length for every entry of every component."""
        said = (self.state_ptrs, self.state_item_lens, self.extension.state_lens)
        shapes = [[len(part) for part in parts] for parts in said]
        kinds = len(self.extension.facts.state_types)
        if shapes[0] != shapes[1] or shapes[0] != shapes[2] or len(shapes[0]) != kinds:
            raise refuse(
                "MIXKV-REG-01",
                f"pointers, item lengths and region lengths for {kinds} kinds of state",
                f"entries {[shape[:8] for shape in shapes]}",
                "state could be written outside its pool",
                "Start both sides with the same SGLang and sglang-mixkv",
            )
        for kind, lens, items in self._state_sizes():
            for length, item in zip(lens, items, strict=True):
                if (length, item) != (0, 0) or kind not in MAY_BE_ELIDED:
                    _check_room(f"{kind} row", item, length)

    def _check_draft(self) -> None:
        """The drafter's part of the registration is the drafter in its facts."""
        said, facts = self.extension, self.extension.facts.draft
        if said.num_draft_entries and said.draft_kind not in tuple(Kind):
            raise refuse(
                "MIXKV-REG-01",
                f"a drafter of kind {[k.value for k in Kind]}",
                said.draft_kind,
                "its rows could not be cut",
                "Start both sides with the same sglang-mixkv",
            )
        draft = (said.draft_kind, said.draft_total_heads) if said.num_draft_entries else None
        if draft != (facts and (facts.kind, facts.total_heads)):
            text = f"the decode rank has a drafter of {draft}, and facts of {facts}."
            raise MixKVError("MIXKV-REG-01", text)
        if said.num_draft_entries and said.facts.dcp != self.dcp_size:
            text = f"the decode rank has DCP size {self.dcp_size}, and facts of {said.facts.dcp}."
            raise MixKVError("MIXKV-REG-01", text)
        if len(said.draft_windows) not in (0, said.num_draft_entries):
            counts = f"{said.num_draft_entries} draft entries and {len(said.draft_windows)} windows"
            raise MixKVError("MIXKV-REG-01", f"the decode rank has {counts}.")


def _check_room(what: str, item: int, length: int) -> None:
    """Raise MixKVError unless an entry's item has bytes, and its region has room for one."""
    if not 0 < item <= length:
        raise refuse(
            "MIXKV-REG-01",
            f"regions with room for a {what} at least",
            f"{length} bytes for a {what} of {item}",
            "it would be written outside its pool",
            "Start both sides with the same SGLang and sglang-mixkv",
        )


def read(message: Frames, at: Positions) -> Registration:
    """The registration in a whole message, not checked yet.

    Raises MixKVError for what SGLang could not read either, and for one without a usable
    extension.
    """
    stock, more = extension.split(message, at.count, "registration")
    size = frames.number(stock[at.attn_tp_size], "attention-TP size", low=1, high=1 << 16)
    dcp_size = frames.number(stock[at.dcp_size] or b"1", "DCP size", low=1, high=1 << 16)
    _check_unused(stock, at)
    return Registration(
        sender=sender_of(stock, at),
        attn_tp_rank=frames.number(stock[at.attn_tp_rank], "attention-TP rank", high=size),
        attn_tp_size=size,
        kv_ptrs=frames.words(stock[at.kv_ptrs], "KV pointers", "Q"),
        kv_item_lens=frames.words(stock[at.kv_item_lens], "KV item lengths", "Q"),
        kv_item_len=frames.number(stock[at.kv_item_len], "KV item length"),
        kv_layer_ids=frames.words(stock[at.kv_layer_ids], "KV layer ids", "I"),
        aux_ptrs=frames.words(stock[at.aux_ptrs], "aux pointers", "Q"),
        state_ptrs=_lists(stock[at.state_ptrs], "state pointers", np.uint64),
        state_item_lens=_lists(stock[at.state_item_lens], "state item lengths", np.uint32),
        dcp_size=dcp_size,
        dcp_rank=frames.number(stock[at.dcp_rank] or b"0", "DCP rank", high=dcp_size),
        extension=extension.decode_extension(more),
    )


def sender_of(stock: Frames, at: Positions) -> Address:
    """Who sent it. Raises MixKVError."""
    return Address(
        frames.host(stock[at.endpoint], "endpoint"),
        frames.number(stock[at.port], "port", low=1, high=frames.MAX_PORT),
        at.read_session(stock[at.session]),
    )


def session_of(message: Sequence[bytes], at: Positions) -> str:
    """The session that a message names, for one that cannot be read otherwise; "" without."""
    named = message[at.session] if len(message) > at.session else b""
    return named.decode("ascii", "replace") if len(named) <= frames.MAX_TEXT else ""


def _check_unused(stock: Frames, at: Positions) -> None:
    """What stock reads and this plugin does not."""
    frames.lists(stock[at.state_dims], "state dims", np.uint32)
    frames.lists(stock[at.state_layer_ids], "state layer ids", np.uint32)
    if at.staging_layer_ids is not None:
        frames.words(stock[at.staging_layer_ids], "staging layer ids", "Q")
    if len(stock[at.staging_ptr]) not in (0, 8):
        raise frames.unreadable(f"staging pointer of {len(stock[at.staging_ptr])} bytes.")
    if stock[at.staging_size]:
        frames.number(stock[at.staging_size], "staging size")
    if at.agent_metadata is not None:
        frames.check_agent_metadata(stock[at.agent_metadata], stock[at.session])
    if at.device is not None:
        frames.number(stock[at.device], "device", high=1 << 16)
    if at.slots is not None and stock[at.slots]:
        frames.number(stock[at.slots], "KV slots")
    if at.state_lens is not None:
        frames.lists(stock[at.state_lens], "state lengths", np.uint64)
    if at.memory_kinds is not None:
        _check_memory_kinds(stock[at.memory_kinds], len(stock[at.kv_item_lens]) // 8)


def _check_memory_kinds(frame: bytes, entries: int) -> None:
    """One word per KV entry, or none at all; in host memory there is HiSparse's, which the plugin
    refuses to start with."""
    kinds = frame.split(b",") if frame else []
    if kinds and kinds != [b"VRAM"] * entries:
        text = f"memory kinds {kinds[:4]} of {entries} KV entries: only VRAM is supported."
        raise frames.unreadable(text)


def _lists(frame: bytes, what: str, dtype: Any) -> Lists:
    return tuple(tuple(numbers.tolist()) for numbers in frames.lists(frame, what, dtype))
