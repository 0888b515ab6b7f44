"""A decode rank's registration as a whole: stock's parsed frames and the extension.

Pure: `info` is what stock made of its frames, any object with those attributes. Nothing here
is compared with this side; that is managers/peer.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_mixkv.core import wire
from sglang_mixkv.core.errors import MixKVError, refuse
from sglang_mixkv.core.geometry import Component, Shard
from sglang_mixkv.core.topology import Kind, Spread

# One past the highest address that a destination may reach: addresses are added as int64.
MAX_ADDRESS = 1 << 63

# The kinds of state in which SGLang gives a layer an entry of no bytes: a DSA layer that shares the
# top-k of an earlier one has no index keys (sglang: disaggregation/utils.py is_elided_entry).
MAY_BE_ELIDED = ("dsa", "dsa_tail")


def rows_in(lens: Sequence[int], item_lens: Sequence[int]) -> int | None:
    """Items that every entry has room for; None where there is no entry that takes any."""
    sizes = zip(lens, item_lens, strict=True)
    return min((length // item for length, item in sizes if item), default=None)


@dataclass(frozen=True)
class PeerRegistration:
    """What a decode rank says of itself. `check` it before anything else is asked of it."""

    info: Any  # mooncake.conn.KVArgsRegisterInfo
    extension: wire.Registration

    @property
    def first_draft(self) -> int:
        return len(self.info.dst_kv_ptrs) - self.extension.num_draft_entries

    @property
    def draft_kv_ptrs(self) -> list[int]:
        return self.info.dst_kv_ptrs[self.first_draft :]

    @property
    def draft_dst_kv_item_len(self) -> list[int]:
        """Bytes a page, one an entry: K and V may differ."""
        return self.info.dst_kv_item_lens[self.first_draft :]

    @property
    def pages(self) -> int | None:
        """Pages that every entry has room for; None without entries."""
        return rows_in(self.extension.kv_data_lens, self.info.dst_kv_item_lens)

    @property
    def states(self) -> tuple[tuple[str, int | None], ...]:
        """Kind and rows of each component of state; rows None: nothing of it is ever written."""
        return tuple((kind, rows_in(lens, items)) for kind, lens, items in self._state_sizes())

    def _state_sizes(self) -> Iterator[tuple[str, Sequence[int], Sequence[int]]]:
        """Kind, region lengths and item lengths of each component of state."""
        return zip(
            self.extension.facts.state_types,
            self.extension.state_lens,
            self.info.dst_state_item_lens,
            strict=True,
        )

    @property
    def has_draft(self) -> bool:
        """Whether draft KV is to be sent to it."""
        return self.extension.num_draft_entries > 0 and not self.extension.cold

    @property
    def draft_spread(self) -> Spread | None:
        if not self.has_draft:
            return None
        return Spread(Kind(self.extension.draft_kind), self.extension.draft_total_heads)

    def shard(self, spread: Spread, entries: slice, page_size: int) -> Shard:
        """The decode rank's component in these of its entries."""
        return Shard(
            Component(
                spread,
                tuple(self.info.dst_kv_item_lens[entries]),
                tuple(self.extension.kv_data_lens[entries]),
            ),
            page_size,
            self.info.dst_attn_tp_size,
            self.info.dst_tp_rank % self.info.dst_attn_tp_size,
        )

    def check(self) -> None:
        """Raise MixKVError unless what it says of itself is whole, and consistent."""
        try:
            self._check_counts()
            self._check_state()
            self._check_draft()
            regions = [
                (self.info.dst_kv_ptrs, self.extension.kv_data_lens),
                *zip(self.info.dst_state_data_ptrs, self.extension.state_lens, strict=True),
                (
                    self.info.dst_aux_ptrs,
                    [n * self.extension.aux_rows for n in self.extension.facts.aux_item_lens],
                ),
                ([self.extension.staging[0]], [self.extension.staging[1]]),
            ]
            for ptrs, lens in regions:
                for ptr, length in zip(ptrs, lens, strict=True):
                    if ptr + length >= MAX_ADDRESS:
                        raise MixKVError(f"a region of {length} bytes at {ptr:#x} is no memory.")
        except MixKVError as error:
            error.reason = "malformed"
            raise

    def _check_counts(self) -> None:
        """Pointers, item lengths and region lengths agree in number; nothing is empty."""
        counts = [
            len(self.info.dst_kv_ptrs),
            len(self.info.dst_kv_item_lens),
            len(self.extension.kv_data_lens),
        ]
        draft = self.extension.num_draft_entries
        if len(set(counts)) != 1 or not 0 <= draft <= counts[0] or self.info.dst_attn_tp_size < 1:
            raise refuse(
                "as many pointers as item lengths and region lengths, the drafter's among them",
                f"{counts} and {draft} draft entries at attention TP {self.info.dst_attn_tp_size}",
                "entries would be paired wrongly",
                "Start both sides with the same SGLang and sglang-mixkv",
            )
        sizes = zip(self.extension.kv_data_lens, self.info.dst_kv_item_lens, strict=True)
        for length, item in sizes:
            _check_room("KV page", item, length)
        aux = len(self.extension.facts.aux_item_lens)
        if len(self.info.dst_aux_ptrs) != aux:
            raise MixKVError(
                f"{len(self.info.dst_aux_ptrs)} metadata buffers with {aux} sizes of their rows."
            )

    def _check_state(self) -> None:
        """One pointer, item length and region length for every entry of every component."""
        said = (
            self.info.dst_state_data_ptrs,
            self.info.dst_state_item_lens,
            self.extension.state_lens,
        )
        shapes = [[len(part) for part in parts] for parts in said]
        kinds = len(self.extension.facts.state_types)
        if shapes[0] != shapes[1] or shapes[0] != shapes[2] or len(shapes[0]) != kinds:
            raise refuse(
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
        draft, facts = self.extension.num_draft_entries, self.extension.facts.draft
        if draft and self.extension.draft_kind not in tuple(Kind):
            raise refuse(
                f"a drafter of kind {[k.value for k in Kind]}",
                self.extension.draft_kind,
                "its rows could not be cut",
                "Start both sides with the same sglang-mixkv",
            )
        said = (self.extension.draft_kind, self.extension.draft_total_heads) if draft else None
        if said != (facts and (facts.kind, facts.total_heads)):
            raise MixKVError(f"the decode rank has a drafter of {said}, and facts of {facts}.")


def _check_room(what: str, item: int, length: int) -> None:
    """Raise MixKVError unless an entry's item has bytes, and its region has room for one."""
    if not 0 < item <= length:
        raise refuse(
            f"regions with room for a {what} at least",
            f"{length} bytes for a {what} of {item}",
            "it would be written outside its pool",
            "Start both sides with the same SGLang and sglang-mixkv",
        )
