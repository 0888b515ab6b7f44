"""The decode side: see that a prefill server fits, and tell each of its ranks its route.

These methods run in the scheduler's loop, where an exception would end the decode server:
what does not fit is kept as a reason, and the receiver refuses its requests.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager, MooncakeKVReceiver
from sglang.srt.runtime_context import get_disagg

from sglang_mixkv.core.errors import MixKVError
from sglang_mixkv.core.facts import Facts, cold_differences, differences
from sglang_mixkv.core.geometry import Shard
from sglang_mixkv.core.pages import window_start
from sglang_mixkv.core.routes import Route, Topology, required_responses, routes
from sglang_mixkv.core.topology import Kind, Spread
from sglang_mixkv.core.wire import Grant, Registration, encode, notice_of
from sglang_mixkv.managers import facts as handshake
from sglang_mixkv.managers import farewell
from sglang_mixkv.managers.aside import override
from sglang_mixkv.managers.cold import Clearer, clear_aux
from sglang_mixkv.managers.decode_gate import DecodeGate
from sglang_mixkv.managers.shared import Expected
from sglang_mixkv.managers.staging import Slices, Staging, prepare
from sglang_mixkv.managers.verify import Asked

logger = logging.getLogger(__name__)

# More ranks in any one dimension than a prefill server can have.
MAX_RANKS = 4096


class DecodeSide(DecodeGate):
    """Overrides of CommonKVManager that act on decode ranks.

    `staging`: where this rank puts head slices in order, once a peer needs that. `cold_server`:
    the prefill server that is being resolved gets no draft KV from; PrefillServerInfo remembers
    it as `mixkv_cold`.
    """

    staging: Staging | None = None
    cold_server = False

    def verifies(self, info: PrefillServerInfo) -> bool:
        """Whether requests from that server are compared: by our flag, or by SGLang's.

        --disaggregation-enable-kv-checksum compares what both sides digest alike; where layouts
        differ stock skips it (decode.py _kv_checksum_comparable), and ours steps in, but for
        context parallelism, which it does not know.
        """
        if self.config.verify == "checksum":
            return True
        if info.attn_cp_size != 1 or self.dcp_size != 1:
            return False
        sizes = (info.attn_tp_size, info.pp_size) != (self.attn_tp_size, self.pp_size)
        apart = sizes or getattr(info, "mixkv_cold", False)
        return bool(apart and get_disagg().disaggregation_enable_kv_checksum)

    @cached_property
    def clearer(self) -> Clearer:
        return Clearer(self.rows)

    @override(MooncakeKVManager)
    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """As stock, once a prefill server; a server that does not fit is kept with a reason."""
        if bootstrap_addr in self.prefill_info_table:
            return True
        try:
            facts = handshake.fetch(bootstrap_addr)
            if facts is None:
                return False
            self.cold_server = self._is_cold(facts, bootstrap_addr)
            known = bool(super().try_ensure_parallel_info(bootstrap_addr))
            if known:
                self.refusals.pop(bootstrap_addr, None)
            return known
        except Exception as error:
            self._refuse(bootstrap_addr, error)
            return True

    def _is_cold(self, facts: Facts, bootstrap_addr: str) -> bool:
        """Whether that server's requests go without draft KV. MixKVError when not even that."""
        found = differences(facts, self.facts)
        if not found:
            return False
        apart = cold_differences(facts, self.facts)
        if apart or self.config.on_draft_mismatch != "cold":
            raise MixKVError(" ".join(apart or found), "facts")
        logger.warning(
            "sglang-mixkv serves requests of prefill server %s without draft KV "
            "(--mixkv-on-draft-mismatch cold): %s", bootstrap_addr, " ".join(found),
        )  # fmt: skip
        return True

    def draft_for(self, info: PrefillServerInfo) -> Shard | None:
        """The drafter as far as that prefill server's KV serves it."""
        return None if getattr(info, "mixkv_cold", False) else self.caches.draft

    def _refuse(self, bootstrap_addr: str, error: Exception) -> None:
        """Keep the reason, and a stand-in for the server's facts so that requests resolve."""
        reason = f"sglang-mixkv refuses prefill server {bootstrap_addr}: {error}"
        logger.error("%s", reason)
        self.stats.refused(error)
        self.refusals[bootstrap_addr] = reason
        self.prefill_info_table[bootstrap_addr] = PrefillServerInfo(
            attn_tp_size=1, attn_cp_size=1, dp_size=1, pp_size=1, page_size=None,
            kv_cache_dtype=None, follow_bootstrap_room=True,
        )  # fmt: skip

    def refusal_of(self, bootstrap_addr: str) -> str | None:
        """Why that server is not used. The next request asks it again: it may have restarted."""
        reason = self.refusals.get(bootstrap_addr)
        if reason is not None:
            self.prefill_info_table.pop(bootstrap_addr, None)
        return reason

    def why_in_use(self, room: int) -> str | None:
        """Why a room number cannot be used: its last request failed, and prefill ranks have not
        all said yet that nothing of it is under way. A late success would count for this one."""
        if room not in self._deferred_abort_ack_tracker:
            return None
        return (
            f"room {room} still belongs to a request that failed: bytes and answers to it may "
            "arrive. Send the request with another bootstrap_room, as SGLang's router does."
        )

    def tell_prefill(self, bootstrap_addr: str, room: int, dp_rank: int) -> None:
        """Let that server's half of a refused request end now rather than by timeout."""
        executor = self._ensure_prefill_recompute_executor()
        executor.submit(farewell.tell, MooncakeKVReceiver, bootstrap_addr, room, dp_rank)

    @override(MooncakeKVManager)
    def _resolve_rank_mapping(self, info: PrefillServerInfo) -> None:
        """As stock; with a drafter, wait for every distinct sender of this rank."""
        sizes = (info.attn_tp_size, info.attn_cp_size, info.dp_size, info.pp_size)
        if not all(0 < size <= MAX_RANKS for size in sizes):  # lists of them are made
            raise MixKVError(f"the prefill server has sizes (TP, CP, DP, PP) {sizes}.")
        info.mixkv_cold = self.cold_server
        super()._resolve_rank_mapping(info)
        if info.attn_cp_size != 1 and self.config.verify == "checksum":
            raise MixKVError(
                f"--mixkv-verify checksum does not know attention CP; the prefill server has "
                f"{info.attn_cp_size}, so no request could be compared. Start this decode server "
                "with --mixkv-verify off, or the prefill without attention CP."
            )
        if self.caches.draft is None:
            return
        if info.attn_cp_size != 1:
            raise MixKVError(
                f"the prefill server has attention CP {info.attn_cp_size}; with a drafter only 1 "
                "is supported. Use tensor or DP attention on the prefill side."
            )
        info.required_prefill_response_num = required_responses(self.routes_from(info))

    def routes_from(self, info: PrefillServerInfo) -> tuple[Route, ...]:
        """This rank's table for that prefill server. MixKVError where sizes do not fit."""
        draft = self.draft_for(info)
        return routes(
            Topology(
                prefill_tp=info.attn_tp_size,
                decode_tp=self.attn_tp_size,
                target=self.caches.target.component.spread,
                draft=draft.component.spread if draft else None,
                stages=self.stages_of(info),
                last_stage=info.pp_size - 1,
                sharded_state=self.sharded_state,
            ),
            self.kv_args.engine_rank % self.attn_tp_size,
        )

    def stages_of(self, info: PrefillServerInfo) -> tuple[int, ...]:
        """Prefill pipeline stages that this rank contacts: its own, or all, as in stock."""
        if info.pp_size == self.pp_size:
            return (self.pp_rank or 0,)
        return tuple(range(info.pp_size))

    def count_received(self, pages: int, info: PrefillServerInfo) -> None:
        """Count what one request needed, as this rank's pool holds it."""
        if self.caches.draft is not None:  # without a drafter the prefill side does not count
            draft_pages = pages - window_start(pages, self.kv_args.page_size, self.draft_window)
            draft_items = self.caches.draft.component.item_lens if self.draft_for(info) else ()
            self.stats.add(
                target_bytes_needed=pages * sum(self.caches.target.component.item_lens),
                draft_bytes_needed=draft_pages * sum(draft_items),
            )
        self.stats.publish()

    def extension_for(self, info: PrefillServerInfo, route: Route) -> bytes:
        """The registration's extension frame for the prefill rank with this route."""
        draft = self.caches.draft
        spread = draft.component.spread if draft else Spread(Kind.MLA)
        return encode(
            Registration(
                facts=self.facts,
                num_draft_entries=self.kv_args.num_draft_entries,
                draft_kind=spread.kind.value,
                draft_heads=len(draft.heads) if draft else 0,
                draft_total_heads=spread.total_heads,
                kv_data_lens=tuple(self.kv_args.kv_data_lens),
                route=notice_of(route),
                stages=self.stages_of(info),
                draft_window=self.draft_window,
                staging=self.staging.span if self.staging else (0, 0),
                aux_rows=min(self.aux_rows, default=0),
                cold=getattr(info, "mixkv_cold", False),
                verify=self.verifies(info),
                state_lens=tuple(map(tuple, self.kv_args.state_data_lens)),
            )
        )

    def expect(self, info: PrefillServerInfo) -> Expected:
        """Who sends to a room, as stock's unique numbers (_prefill_unique_rank)."""
        table = {self._unique_rank(route, info): route for route in self.routes_from(info)}
        senders = [number for number, route in table.items() if not route.is_dummy]
        return Expected(frozenset(senders), frozenset(table))

    def _senders(self, info: PrefillServerInfo) -> dict[int, Route]:
        """The senders of KV, by stock's unique number."""
        return {
            self._unique_rank(route, info): route
            for route in self.routes_from(info)
            if route.is_send_target or route.is_send_draft
        }

    @staticmethod
    def _unique_rank(route: Route, info: PrefillServerInfo) -> int:
        return route.prefill_rank * info.pp_size + route.stage

    def prepare(self, room: int, info: PrefillServerInfo, pages: Any, aux_row: int | None) -> None:
        """Before a room's metadata goes out: clear what will not come, note what is verified."""
        draft, own = self.draft_for(info), self.caches.draft
        if own is not None and draft is None:
            self.clearer.clear(own, self.caches.draft_ptrs, pages)
            if aux_row is not None:
                clear_aux(self.kv_args, aux_row, self.facts.draft_aux)
        if getattr(info, "mixkv_cold", False):
            self.stats.cold()
        if self.verifies(info) and len(pages):
            skip = window_start(len(pages), self.kv_args.page_size, self.draft_window)
            self.verifier.ask(room, Asked(pages, skip, draft, self._senders(info)))

    def slices_from(self, info: PrefillServerInfo) -> tuple[Slices, Slices] | None:
        """The target's and the drafter's heads from that server, None without a drafter."""
        draft, table = self.draft_for(info), self.routes_from(info)
        if draft is None:
            return None
        target_from, draft_from = (
            {(route.prefill_rank, route.stage): heads for route, heads in found if heads}
            for found in (
                [(route, route.target_heads) for route in table],
                [(route, route.draft_heads) for route in table],
            )
        )
        caches, size = self.caches, info.attn_tp_size
        return (
            Slices(caches.target, caches.target_ptrs, target_from, size),
            Slices(draft, caches.draft_ptrs, draft_from, size),
        )

    def prepare_staging(self, info: PrefillServerInfo) -> None:
        """Take the staging memory before the first peer that needs it is registered with."""
        slices = self.slices_from(info)
        if slices is not None and self.staging is None:
            size, mode = self.config.staging_mb << 20, self.config.draft_transfer
            self.staging = prepare(self.engine, self.rows, size, *slices, mode)
            self.count_staging()

    def grant(self, room: int, info: PrefillServerInfo, pages: Any) -> dict[tuple[int, int], Grant]:
        """How a room's head slices come, by (prefill rank, stage); none: direct or packed."""
        slices = self.slices_from(info)
        if slices is None or self.staging is None or not len(pages):
            return {}
        numbers = np.asarray(pages, np.int64)
        skip = window_start(len(pages), self.kv_args.page_size, self.draft_window)
        full = self.staging.full
        told = self.staging.grant(room, *slices, numbers, skip, self.config.draft_transfer)
        self.stats.add(staging_full=self.staging.full - full)
        self.count_staging()
        return told

    def count_staging(self) -> None:
        """Show what the staging buffer holds now."""
        staging = self.staging
        if staging is not None:
            self.stats.staging(lambda: sum(staging.in_use()), staging.span[1])

    @override(MooncakeKVManager)
    def update_status(self, bootstrap_room: int, status: Any) -> None:
        """As stock; before a room succeeds, its region is scattered and its KV verified."""
        live = self.request_status.get(bootstrap_room) != KVPoll.Failed
        if status == KVPoll.Success and live:
            problem = self._complete(bootstrap_room)
            if problem is not None:
                logger.error("sglang-mixkv fails room %s: %s", bootstrap_room, problem)
                self.record_failure(bootstrap_room, f"sglang-mixkv: {problem}")
                status = KVPoll.Failed
        super().update_status(bootstrap_room, status)

    def _complete(self, room: int) -> str | None:
        """All senders have answered: bring the room's KV in place. What went wrong, or None."""
        try:
            if self.staging is not None:
                self.staging.scatter(room)
                self.count_staging()
            if room not in self.verifier.rooms:
                return None
            self.stats.add(rooms_verified=1)
            return self.verifier.problem(room)
        except Exception as error:
            logger.exception("sglang-mixkv could not complete room %s", room)
            return f"could not complete room {room}: {error!r}"

    def release_room(self, room: int) -> None:
        """The room ended; a region that was not scattered is quarantined."""
        if self.staging is not None:
            self.staging.release(room)
            self.count_staging()
        self.verifier.forget(room)

    @property
    def draft_window(self) -> int:
        """The drafter's reach in tokens; 0, everything, where pages become a shared prefix."""
        window: int = getattr(self.kv_args, "draft_window", 0)
        return 0 if get_disagg().disaggregation_decode_enable_radix_cache else window
