"""What a prefill rank knows of one decode rank: built at registration, frozen after.

registration message -> checked against this rank -> route -> plan
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.utils import build_transfer_entry_pairs

from sglang_mixkv.core import wire
from sglang_mixkv.core.errors import MixKVError, refuse
from sglang_mixkv.core.facts import Facts, cold_differences, differences
from sglang_mixkv.core.frames import Metadata
from sglang_mixkv.core.geometry import Component, Shard
from sglang_mixkv.core.pairs import Pairs, positional_pairs
from sglang_mixkv.core.plan import Copies, Plan, component_copies
from sglang_mixkv.core.routes import Route, Topology, route_of, routes
from sglang_mixkv.core.topology import Kind, Spread
from sglang_mixkv.managers.kv_args import Caches
from sglang_mixkv.transfer.writer import Region


@dataclass(frozen=True)
class PrefillRank:
    """This side of the comparison. `start_layer`: first target layer of this PP stage.

    `cold_allowed`: a peer whose drafter does not fit may have the target's KV alone.
    """

    facts: Facts
    caches: Caches
    layer_ids: tuple[int, ...]
    start_layer: int
    stage: int
    last_stage: int
    sharded_state: bool
    cold_allowed: bool = False


@dataclass(frozen=True)
class PeerRegistration:
    """A decode rank's registration: stock's parsed frames and the extension."""

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
        """Raise MixKVError unless pointers, item lengths and region lengths agree in number."""
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
        if not self.extension.stages:
            raise MixKVError("the decode rank names no prefill stage that it contacts.")
        if draft and self.extension.draft_kind not in tuple(Kind):
            raise refuse(
                f"a drafter of kind {[k.value for k in Kind]}",
                self.extension.draft_kind,
                "its rows could not be cut",
                "Start both sides with the same sglang-mixkv",
            )


@dataclass(frozen=True)
class Peer:
    """One decode rank as this prefill rank serves it. No plan: stock's transfer serves it.

    `draft_window`: tokens before the prompt's end that its drafter can reach; 0: all.
    `staging`: address and bytes of the buffer it grants regions in. `aux_rows`: rows of its
    aux buffers. `required_peers`: decode ranks that share a room on this prefill rank.
    `cold`: it gets the target's KV alone. `verify`: it asks for checksums.
    """

    session: str
    route: Route
    plan: Plan | None
    draft_window: int = 0
    staging: tuple[int, int] = (0, 0)
    aux_rows: int = 0
    required_peers: int = 1
    cold: bool = False
    verify: bool = False

    def check_metadata(self, said: Metadata, pages: npt.NDArray[np.int32]) -> None:
        """Raise MixKVError unless a room's metadata stays inside what this peer registered."""
        assert self.plan is not None
        if said.is_dummy != self.route.is_dummy or said.required != self.required_peers:
            role = "a dummy" if said.is_dummy else "a sender"
            raise MixKVError(
                f"the decode rank takes this prefill rank for {role} to {said.required} decode "
                f"ranks, by the routes it is another to {self.required_peers}."
            )
        if said.is_dummy:
            return
        if len(pages) and not 0 <= pages.min() <= pages.max() < self.plan.dst_pages:
            raise MixKVError(
                f"pages {pages.min()}..{pages.max()} of a pool of {self.plan.dst_pages}."
            )
        if said.aux_index >= self.aux_rows:
            raise MixKVError(f"aux row {said.aux_index} of {self.aux_rows}.")

    def check_grant(self, grant: wire.Grant) -> Region:
        """The region, or MixKVError when it is not inside what the peer registered."""
        assert self.plan is not None
        start, size = self.staging
        need = grant.tokens * int(self.plan.draft.width.sum())
        if grant.tokens <= 0 or grant.address < start or grant.address + need > start + size:
            raise refuse(
                f"a region inside the {size} bytes of staging that the decode rank announced",
                f"{need} bytes at offset {grant.address - start}",
                "slices would be written outside it",
                "Start both sides with the same sglang-mixkv",
            )
        return Region(grant.address, grant.tokens)


def admit(local: PrefillRank, registration: PeerRegistration) -> Peer:
    """The peer, or MixKVError with every reason why it is not served."""
    registration.check()
    _compare_facts(local, registration.extension)
    route = _agreed_route(local, registration)
    session = registration.info.mooncake_session_id
    extension = registration.extension
    if not (registration.has_draft or extension.cold or extension.verify):
        return Peer(session, route, None)
    plan = _plan(local, registration, route)
    decode_tp = registration.info.dst_attn_tp_size
    return Peer(
        session,
        route,
        plan,
        extension.draft_window,
        extension.staging,
        extension.aux_rows,
        max(1, decode_tp // local.caches.target.tp),
        extension.cold,
        extension.verify,
    )


def _compare_facts(local: PrefillRank, extension: wire.Registration) -> None:
    prefill, decode = local.facts, extension.facts
    if extension.cold:
        _compare_cold(local, decode)
        return
    if local.stage != local.last_stage:  # only the last stage holds the drafter
        prefill, decode = (msgspec.structs.replace(f, draft=None) for f in (prefill, decode))
    found = differences(prefill, decode)
    if found:
        raise MixKVError(" ".join(found))


def _compare_cold(local: PrefillRank, decode: Facts) -> None:
    found = cold_differences(local.facts, decode)
    if found:
        raise MixKVError(" ".join(found))
    if not local.cold_allowed:
        raise refuse(
            "drafters that fit, since this prefill runs with --mixkv-on-draft-mismatch refuse",
            " ".join(differences(local.facts, decode)) or "a decode rank that wants no draft KV",
            "the accept length would be low",
            "Give both sides the same drafter, or both --mixkv-on-draft-mismatch cold",
        )


def _agreed_route(local: PrefillRank, registration: PeerRegistration) -> Route:
    target = local.caches.target
    info = registration.info
    table = routes(
        Topology(
            prefill_tp=target.tp,
            decode_tp=info.dst_attn_tp_size,
            target=target.component.spread,
            draft=registration.draft_spread,
            stages=registration.extension.stages,
            last_stage=local.last_stage,
            sharded_state=local.sharded_state,
        ),
        info.dst_tp_rank % info.dst_attn_tp_size,
    )
    route = route_of(table, target.rank, local.stage)
    told = registration.extension.route
    if route is None or wire.notice_of(route) != told:
        raise refuse(
            f"decode rank {info.dst_tp_rank} of {info.dst_attn_tp_size} to see this prefill rank "
            f"{target.rank} of {target.tp} as {route and wire.notice_of(route)}",
            f"{told}",
            "draft heads would be sent twice or never",
            "Start both sides with the same models, SGLang and sglang-mixkv",
        )
    return route


def _plan(local: PrefillRank, registration: PeerRegistration, route: Route) -> Plan:
    caches, first = local.caches, registration.first_draft
    page_size = caches.target.page_size
    target = registration.shard(caches.target.component.spread, slice(first), page_size)
    target.check("decode target")
    ptrs = registration.info.dst_kv_ptrs
    target_pairs, draft_pairs = _pairs(local, registration)
    pages = [target.pages]
    copies = component_copies(
        list(caches.target_ptrs), caches.target, ptrs[:first], target,
        route.target_heads, target_pairs if route.is_send_target else [],
    )  # fmt: skip
    draft_copies = Copies.empty()
    if caches.draft is not None and route.is_send_draft:
        draft = registration.shard(caches.draft.component.spread, slice(first, None), page_size)
        draft.check("decode draft")
        pages.append(draft.pages)
        draft_copies = component_copies(
            list(caches.draft_ptrs), caches.draft, registration.draft_kv_ptrs, draft,
            route.draft_heads, draft_pairs,
        )  # fmt: skip
    return Plan(page_size, copies, draft_copies, _source_pages(caches), min(pages))


def _source_pages(caches: Caches) -> int:
    return min(shard.pages for shard in (caches.target, caches.draft) if shard is not None)


def _pairs(local: PrefillRank, registration: PeerRegistration) -> tuple[Pairs, Pairs]:
    """(source entry, destination entry) of the target, then of the drafter from 0 each."""
    n_src, n_dst = len(local.caches.target_ptrs), registration.first_draft
    n_draft, n_dst_draft = 0, 0
    if registration.has_draft:
        n_draft = len(local.caches.draft_ptrs)
        n_dst_draft = registration.extension.num_draft_entries
    dst_ids = list(registration.info.dst_kv_layer_ids)[: n_dst + n_dst_draft]
    if not local.layer_ids and not dst_ids:
        mha = local.caches.target.component.spread.kind is Kind.MHA
        return (
            positional_pairs(n_src, n_dst, local.start_layer, halves=mha),
            positional_pairs(n_draft, n_dst_draft, 0, halves=False) if n_draft else [],
        )
    try:
        pairs = build_transfer_entry_pairs(
            list(local.layer_ids)[: n_src + n_draft],
            dst_ids,
            n_src + n_draft,
            n_dst + n_dst_draft,
        )
    except RuntimeError as error:
        raise MixKVError(str(error)) from None
    return (
        [(i, j) for i, j in pairs if i < n_src],
        [(i - n_src, j - n_dst) for i, j in pairs if i >= n_src],
    )
