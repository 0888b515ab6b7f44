"""What a prefill rank knows of one decode rank: built at registration, frozen after.

registration message -> compared with this rank -> route -> plan
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from sglang_mixkv.errors import MixKVError, refuse
from sglang_mixkv.kv.layout import Caches, Kind
from sglang_mixkv.kv.plan import Copies, Pairs, Plan, Reach, component_copies, positional_pairs
from sglang_mixkv.kv.routes import Route, Topology, route_of, routes
from sglang_mixkv.protocol import extension as wire
from sglang_mixkv.protocol.extension import Extension, Grant
from sglang_mixkv.protocol.facts import Facts, cold_differences, differences
from sglang_mixkv.protocol.frames import Address, Numbers
from sglang_mixkv.protocol.messages import Metadata
from sglang_mixkv.protocol.registration import Registration

# The one kind of state (DSA_TAIL) whose indices are a row and spans inside it, which stock
# checks (utils.py build_dsa_tail_transfer_blocks); all others are rows.
ROW_AND_SPANS = "dsa_tail"

PairByLayer = Callable[[list[int], list[int], int, int], Pairs]
"""SGLang's rule for entries with layer ids (utils.py build_transfer_entry_pairs): ids of the
source's and the destination's entries, and how many of each. Raises RuntimeError."""


@dataclass(frozen=True)
class Local:
    """This rank's side of the comparison. `start_layer`: first target layer of this PP stage.

    `cold_allowed`: a peer whose drafter does not fit may have the target's KV alone.
    """

    facts: Facts
    caches: Caches
    layer_ids: tuple[int, ...]
    start_layer: int
    stage: int
    last_stage: int
    sharded_state: bool
    pair_by_layer: PairByLayer
    cold_allowed: bool = False


@dataclass(frozen=True)
class Peer:
    """One decode rank as this prefill rank serves it. No plan: stock's transfer serves it.

    `pages`, `aux_rows`, `states` (kind, rows): what bounds a room's destinations; pages or rows
    None: there is nothing of it to write. `staging`: address and bytes of the buffer it grants
    regions in. `required_peers`: decode ranks that share a room on this prefill rank. `cold`: it
    gets the target's KV alone. `verify`: it asks for checksums. `page_tokens`: tokens of a request
    in each of its pages. `target_entries`: the first so many that it registered are its target's.
    `process`: which start of the decode rank it is, empty where that does not say so.
    """

    address: Address
    route: Route
    plan: Plan | None
    pages: int | None
    aux_rows: int
    states: tuple[tuple[str, int | None], ...] = ()
    staging: tuple[int, int] = (0, 0)
    required_peers: int = 1
    cold: bool = False
    verify: bool = False
    page_tokens: int = 1
    target_entries: int = 0
    process: str = ""

    @property
    def session(self) -> str:
        return self.address.session

    def check_continues(self, before: Peer) -> None:
        """Raise MixKVError unless it is the process that registered this session before: to another
        the pages that were named then mean nothing."""
        if (self.address, self.process) != (before.address, before.process):
            text = "its decode rank was started anew; its pages are another process's now"
            raise MixKVError("MIXKV-ROOM-04", text)

    def check_metadata(self, said: Metadata) -> None:
        """Raise MixKVError unless a room's metadata stays inside what this peer registered."""
        if self.plan is not None:
            self._check_role(said)
            if said.grant is not None:
                self._check_grant(self.plan, said.grant, len(said.pages) * self.plan.parts)
        if said.is_dummy:
            return
        if said.prefix % self.page_tokens:
            raise _misfit(f"a prefix of {said.prefix} tokens ends inside a page.")
        if self.pages is not None:
            _check_inside("pages", said.pages, self.pages)
        if said.aux_index >= self.aux_rows:
            raise _misfit(f"aux row {said.aux_index} of {self.aux_rows}.")
        if said.states and len(said.states) != len(self.states):
            raise _misfit(f"indices of {len(said.states)} kinds of state, of {len(self.states)}.")
        for indices, (kind, rows) in zip(said.states, self.states, strict=False):
            if rows is not None:
                named = indices[:1] if kind == ROW_AND_SPANS else indices
                _check_inside(f"{kind} rows", named, rows)

    def _check_role(self, said: Metadata) -> None:
        if said.is_dummy != self.route.is_dummy or said.required != self.required_peers:
            raise _misfit(
                f"expected metadata for {_role(self.route.is_dummy)} shared by "
                f"{self.required_peers} decode ranks, as the routes have it; got it for "
                f"{_role(said.is_dummy)} shared by {said.required}."
            )

    def _check_grant(self, plan: Plan, grant: Grant, pages: int) -> None:
        """Raise MixKVError unless it is for a room of so many pages and stays inside what the
        peer registered."""
        start, size = self.staging
        firsts = plan.firsts(pages)
        need = plan.draft_bytes(pages - first for first in firsts)
        placed = grant.tokens or grant.extent  # 0.1.0 names no page with slices that are not
        if placed and firsts and grant.first_page != min(firsts):
            raise _misfit(
                f"draft KV from page {grant.first_page} of {pages} on, where the windows of the "
                f"registration begin at {min(firsts)}."
            )
        if grant.tokens and grant.tokens != (pages - grant.first_page) * plan.page_size:
            raise _misfit(
                f"a region of {grant.tokens} tokens from page {grant.first_page} of {pages}."
            )
        if grant.tokens and (grant.address < start or grant.address + need > start + size):
            raise refuse(
                "MIXKV-ROOM-01",
                f"a region inside the {size} bytes of staging that the decode rank announced",
                f"{need} bytes at offset {grant.address - start}",
                "slices would be written outside it",
                "Start both sides with the same sglang-mixkv",
            )
        parts = [c.parts.part for c in (plan.target, *(reach.copies for reach in plan.draft))]
        if grant.by_page and any((part.src_row != part.width).any() for part in parts):
            raise _misfit("this rank's rows hold more than the slices that are wanted by extent.")
        size, extent = plan.page_size, grant.extent
        if extent and extent % size and size % extent:
            raise _misfit(f"extents of {extent} tokens do not fit pages of {size}.")


def _misfit(text: str) -> MixKVError:
    """What of a room does not fit the registration of its decode rank."""
    return MixKVError("MIXKV-ROOM-01", text)


def _role(is_dummy: bool) -> str:
    return "a dummy" if is_dummy else "a sender"


def _check_inside(what: str, numbers: Numbers, count: int) -> None:
    if len(numbers) > count or (len(numbers) and not 0 <= numbers.min() <= numbers.max() < count):
        raise _misfit(
            f"{len(numbers)} {what}, {numbers.min()}..{numbers.max()}, of a pool of {count}."
        )


def admit(local: Local, registration: Registration) -> Peer:
    """The peer, or MixKVError with every reason why it is not served."""
    _compare_facts(local, registration.extension)
    registration.check()
    route = _agreed_route(local, registration)
    extension = registration.extension
    planned = registration.has_draft or extension.cold or extension.verify
    plan = _plan(local, registration, route) if planned else None
    return Peer(
        registration.sender,
        route,
        plan,
        plan.dst_pages // plan.parts if plan else registration.pages,
        extension.aux_rows,
        registration.states,
        extension.staging,
        max(1, registration.attn_tp_size // local.caches.target.tp),
        extension.cold,
        extension.verify,
        local.caches.target.page_size * registration.dcp_size,
        registration.first_draft,
        extension.process,
    )


def _compare_facts(local: Local, extension: Extension) -> None:
    prefill, decode = local.facts, extension.facts
    if extension.cold:
        _compare_cold(local, decode)
        return
    if local.stage != local.last_stage:  # only the last stage holds the drafter
        prefill, decode = (msgspec.structs.replace(f, draft=None) for f in (prefill, decode))
    found = differences(prefill, decode)
    if found:
        raise MixKVError("MIXKV-PAIR-03", " ".join(found))


def _compare_cold(local: Local, decode: Facts) -> None:
    found = cold_differences(local.facts, decode)
    if found:
        raise MixKVError("MIXKV-PAIR-03", " ".join(found))
    ours, theirs = ((len(f.aux_item_lens), f.draft_aux) for f in (local.facts, decode))
    if ours != theirs:
        raise MixKVError(
            "MIXKV-PAIR-03",
            f"metadata rows (all, the drafter's): prefill has {ours}, decode has {theirs}; what is "
            "not the drafter's would land at wrong offsets. Run the same SGLang release and "
            "sampling mask on both sides.",
        )
    if not local.cold_allowed:
        raise refuse(
            "MIXKV-PAIR-03",
            "drafters that fit, since this prefill runs with --mixkv-on-draft-mismatch refuse",
            " ".join(differences(local.facts, decode)) or "a decode rank that wants no draft KV",
            "the accept length would be low",
            "Give both sides the same drafter, or both --mixkv-on-draft-mismatch cold",
        )


def _agreed_route(local: Local, registration: Registration) -> Route:
    target = local.caches.target
    stages = registration.extension.stages
    if not stages or list(stages) != sorted(set(stages)) or stages[-1] > local.last_stage:
        raise MixKVError(
            "MIXKV-REG-01",
            f"the decode rank contacts prefill stages {stages[:8]}, of {local.last_stage + 1}.",
        )
    table = routes(
        Topology(
            prefill_tp=target.tp,
            decode_tp=registration.attn_tp_size,
            target=target.component.spread,
            draft=registration.draft_spread,
            stages=stages,
            last_stage=local.last_stage,
            sharded_state=local.sharded_state,
        ),
        registration.attn_tp_rank % registration.attn_tp_size,
    )
    route = route_of(table, target.rank, local.stage)
    told = registration.extension.route
    if route is None or wire.notice_of(route) != told:
        raise refuse(
            "MIXKV-PAIR-05",
            f"decode rank {registration.attn_tp_rank} of {registration.attn_tp_size} to see this "
            f"prefill rank {target.rank} of {target.tp} as {route and wire.notice_of(route)}",
            f"{told}",
            "draft heads would be sent twice or never",
            "Start both sides with the same models, SGLang and sglang-mixkv",
        )
    return route


def _plan(local: Local, registration: Registration, route: Route) -> Plan:
    caches, first = local.caches, registration.first_draft
    page_size, parts = caches.target.page_size, registration.dcp_size // local.facts.dcp
    target = registration.shard(caches.target.component.spread, slice(first), page_size)
    target.check("decode target")
    ptrs = list(registration.kv_ptrs)
    target_pairs, draft_pairs = _pairs(local, registration)
    pages, joined = [target.pages * parts], registration.dcp_size // parts
    copies = component_copies(
        list(caches.target_ptrs), caches.target, ptrs[:first], target,
        route.target_heads, target_pairs if route.is_send_target else [],
    )  # fmt: skip
    if parts > 1:  # SGLang sends it, token by token
        copies = Copies.empty()
    reaches: tuple[Reach, ...] = ()
    if caches.draft is not None and route.is_send_draft:
        spread, windows = caches.draft.component.spread, registration.draft_windows
        draft = registration.shard(
            spread, slice(first, None), page_size * registration.dcp_size, windows
        )
        draft.check("decode draft")
        draft = draft.split(parts)
        pages.append(draft.pages)
        reaches = tuple(
            Reach(window, component_copies(
                list(caches.draft_ptrs), caches.draft, ptrs[first:], draft,
                route.draft_heads, [pair for pair in draft_pairs if pair[1] in entries],
            ).joined(joined))
            for window, entries in draft.component.by_window.items()
        )  # fmt: skip
    return Plan(page_size, copies, reaches, caches.pages, min(pages), parts, joined)


def _pairs(local: Local, registration: Registration) -> tuple[Pairs, Pairs]:
    """(source entry, destination entry) of the target, then of the drafter from 0 each."""
    n_src, n_dst = len(local.caches.target_ptrs), registration.first_draft
    n_draft, n_dst_draft = 0, 0
    if registration.has_draft:
        n_draft = len(local.caches.draft_ptrs)
        n_dst_draft = registration.extension.num_draft_entries
    dst_ids = list(registration.kv_layer_ids)[: n_dst + n_dst_draft]
    if not local.layer_ids and not dst_ids:
        mha = local.caches.target.component.spread.kind is Kind.MHA
        return (
            positional_pairs(n_src, n_dst, local.start_layer, halves=mha),
            positional_pairs(n_draft, n_dst_draft, 0, halves=False) if n_draft else [],
        )
    try:
        pairs = local.pair_by_layer(
            list(local.layer_ids)[: n_src + n_draft],
            dst_ids,
            n_src + n_draft,
            n_dst + n_dst_draft,
        )
    except RuntimeError as error:
        raise MixKVError("MIXKV-PAIR-07", str(error)) from None
    if any((i < n_src) != (j < n_dst) for i, j in pairs):
        text = "layer ids pair entries of the target with entries of the drafter."
        raise MixKVError("MIXKV-REG-01", text)
    return (
        [(i, j) for i, j in pairs if i < n_src],
        [(i - n_src, j - n_dst) for i, j in pairs if i >= n_src],
    )
