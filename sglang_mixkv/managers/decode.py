"""The decode side: see that a prefill server fits, and tell each of its ranks its route.

These methods run in the scheduler's loop, where an exception would end the decode server:
what does not fit is kept as a reason, and the receiver refuses its requests.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg

from sglang_mixkv.core.errors import MixKVError
from sglang_mixkv.core.facts import Facts, cold_differences, differences
from sglang_mixkv.core.geometry import Shard
from sglang_mixkv.core.pages import window_start
from sglang_mixkv.core.routes import Route, Topology, required_responses, routes
from sglang_mixkv.core.topology import Kind, Spread
from sglang_mixkv.core.wire import Grant, Registration, encode, notice_of
from sglang_mixkv.managers import facts as handshake
from sglang_mixkv.managers.aside import override
from sglang_mixkv.managers.background import Background
from sglang_mixkv.managers.cold import Clearer, clear_aux
from sglang_mixkv.managers.decode_gate import DecodeGate
from sglang_mixkv.managers.farewell import Farewells
from sglang_mixkv.managers.refusals import Refusal
from sglang_mixkv.managers.source import Source, unique_number
from sglang_mixkv.managers.staging import QUARANTINE_S, Slices, Staging, prepare
from sglang_mixkv.managers.verify import Asked

logger = logging.getLogger(__name__)

# More ranks in any one dimension than a prefill server can have.
MAX_RANKS = 4096


class DecodeSide(DecodeGate):
    """Overrides of CommonKVManager that act on decode ranks.

    `sources`: the prefill servers that are used, by bootstrap address; `refusals`: those that
    are not. `staging`: where this rank puts head slices in order, once a peer needs that.
    `asked`: per thread, what the server that is being resolved has said (`.of`).
    """

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False
    ) -> None:
        self.sources: dict[str, Source] = {}
        self.refusals: dict[str, Refusal] = {}
        self.staging: Staging | None = None
        self.asked = threading.local()
        self.background = Background()
        self.farewells = Farewells(self.background)
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.clearer = Clearer(self.rows)

    # -- prefill servers

    @override(MooncakeKVManager)
    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """As stock, once per prefill server. One that does not fit is kept with a reason; it is
        asked again outside of the scheduler's loop, and not known meanwhile."""
        if bootstrap_addr in self.prefill_info_table:
            return True
        refusal = self.refusals.get(bootstrap_addr)
        if refusal is None:
            return self._ask(bootstrap_addr)
        if refusal.counts():
            self.prefill_info_table[bootstrap_addr] = refusal.info
            return True
        if refusal.may_be_asked():
            refusal.asking = self.background.submit(self._ask_again, refusal)
        return False

    def _ask(self, bootstrap_addr: str) -> bool:
        """Resolve a prefill server that nothing is known of. Whether that is done."""
        try:
            return self._resolve(bootstrap_addr)
        except Exception as error:
            refusal = self.refusals[bootstrap_addr] = Refusal(bootstrap_addr, error)
            logger.error("%s", refusal.reason)
            return self.try_ensure_parallel_info(bootstrap_addr)

    def _ask_again(self, refusal: Refusal) -> None:
        """Resolve a refused server: it may have been restarted."""
        try:
            self._resolve(refusal.addr)
            refusal.asked()
        except Exception as error:
            refusal.asked(error)

    def _resolve(self, bootstrap_addr: str) -> bool:
        """Stock's try_ensure_parallel_info, with what the server says beyond it. Raises why it
        does not fit."""
        facts = handshake.fetch(bootstrap_addr)
        if facts is None:
            return False
        self.asked.of = bootstrap_addr, facts, self._is_cold(facts, bootstrap_addr)
        return bool(super().try_ensure_parallel_info(bootstrap_addr))

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

    @override(MooncakeKVManager)
    def _resolve_rank_mapping(self, info: PrefillServerInfo) -> None:
        """As stock; with a drafter, wait for every distinct sender of this rank.

        Stock publishes `info` next: what is derived from it is there before, and the server is
        refused no longer.
        """
        sizes = (info.attn_tp_size, info.attn_cp_size, info.dp_size, info.pp_size)
        if not all(0 < size <= MAX_RANKS for size in sizes):  # lists of them are made
            raise MixKVError(f"the prefill server has sizes (TP, CP, DP, PP) {sizes}.")
        super()._resolve_rank_mapping(info)
        addr, facts, cold = getattr(self.asked, "of", ("", None, False))
        source = self._source(info, cold=cold, extents=facts is not None and facts.extents)
        if self.caches.draft is not None:
            if info.attn_cp_size != 1:
                raise MixKVError(
                    f"the prefill server has attention CP {info.attn_cp_size}; with a drafter "
                    "only 1 is supported. Use tensor or DP attention on the prefill side."
                )
            info.required_prefill_response_num = required_responses(source.routes.values())
        self.sources[addr] = source
        self.refusals.pop(addr, None)

    def _source(self, info: PrefillServerInfo, *, cold: bool, extents: bool) -> Source:
        """What follows from a server's sizes. MixKVError where they do not fit."""
        draft = None if cold else self.caches.draft
        stages = self._stages_of(info)
        table = self._routes_from(info, draft, stages)
        numbers = {unique_number(route, info.pp_size): route for route in table}
        with_kv = {n: r for n, r in numbers.items() if r.is_send_target or r.is_send_draft}
        size = self.kv_args.page_size
        rows = [shard.rows if shard else () for shard in (self.caches.target, draft)]
        return Source(
            routes={(route.prefill_rank, route.stage): route for route in table},
            stages=stages,
            contacted=frozenset(numbers),
            senders=frozenset(n for n, route in numbers.items() if not route.is_dummy),
            kv_senders=with_kv,
            draft=draft,
            slices=self._slices_from(info, draft, table),
            draft_window=self.draft_window,
            cold=cold,
            verify=self._verifies(info, cold),
            extents=extents,
            page_bytes=(size * sum(rows[0]), size * sum(rows[1])),
        )

    def _verifies(self, info: PrefillServerInfo, cold: bool) -> bool:
        """Whether requests from that server are compared: by our flag, or by SGLang's.

        --disaggregation-enable-kv-checksum compares what both sides digest alike; where layouts
        differ stock skips it (decode.py _kv_checksum_comparable), and ours steps in.
        """
        if self.config.verify == "checksum":
            return True
        sizes = (info.attn_tp_size, info.pp_size) != (self.attn_tp_size, self.pp_size)
        return bool((sizes or cold) and get_disagg().disaggregation_enable_kv_checksum)

    def _routes_from(
        self, info: PrefillServerInfo, draft: Shard | None, stages: tuple[int, ...]
    ) -> tuple[Route, ...]:
        """This rank's table for that prefill server."""
        return routes(
            Topology(
                prefill_tp=info.attn_tp_size,
                decode_tp=self.attn_tp_size,
                target=self.caches.target.component.spread,
                draft=draft.component.spread if draft else None,
                stages=stages,
                last_stage=info.pp_size - 1,
                sharded_state=self.sharded_state,
            ),
            self.kv_args.engine_rank % self.attn_tp_size,
        )

    def _stages_of(self, info: PrefillServerInfo) -> tuple[int, ...]:
        """Prefill pipeline stages that this rank contacts: its own, or all, as in stock."""
        if info.pp_size == self.pp_size:
            return (self.pp_rank or 0,)
        return tuple(range(info.pp_size))

    def _slices_from(
        self, info: PrefillServerInfo, draft: Shard | None, table: tuple[Route, ...]
    ) -> tuple[Slices, Slices] | None:
        """The target's and the drafter's heads from that server, None without a drafter."""
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

    def refusal_of(self, bootstrap_addr: str) -> str | None:
        """Why a request to that server is refused, None where it is not. In the scheduler.

        The stand-in goes again, so that the next request asks (`try_ensure_parallel_info`).
        """
        refusal, info = self.refusals.get(bootstrap_addr), self.prefill_info_table
        if refusal is None or info.get(bootstrap_addr, refusal.info) is not refusal.info:
            return None
        info.pop(bootstrap_addr, None)
        self.stats.refused(refusal.error)
        refusal.one_more()
        return refusal.reason

    def why_in_use(self, room: int) -> str | None:
        """Why a room number cannot be used: its last request failed, and prefill ranks have not
        all said yet that nothing of it is in flight. A late success would count for this one."""
        if room not in self._deferred_abort_ack_tracker:
            return None
        return (
            f"room {room} still belongs to a request that failed: bytes and answers to it may "
            "arrive. Send the request with another bootstrap_room, as SGLang's router does."
        )

    def extension_for(self, source: Source, route: Route) -> bytes:
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
                stages=source.stages,
                draft_window=source.draft_window,
                staging=self.staging_span,
                aux_rows=min(self.aux_rows, default=0),
                cold=source.cold,
                verify=source.verify,
                state_lens=tuple(map(tuple, self.kv_args.state_data_lens)),
            )
        )

    # -- requests

    def prepare(self, room: int, source: Source, pages: Any, aux_row: int | None) -> None:
        """Before a room's metadata goes out: clear what will not come, note what is verified."""
        own = self.caches.draft
        if own is not None and source.draft is None:
            self.clearer.clear(own, self.caches.draft_ptrs, pages)
            if aux_row is not None:
                clear_aux(self.kv_args, aux_row, self.facts.draft_aux)
        if source.cold:
            self.stats.cold()
        if source.verify and len(pages):
            skip = self._pages_skipped(source, len(pages))
            asked = Asked(self.caches, pages, skip, source.draft, source.kv_senders)
            self.verifier.ask(room, asked)

    def _pages_skipped(self, source: Source, pages: int) -> int:
        """Pages that are outside of the drafter's window."""
        return window_start(pages, self.kv_args.page_size, source.draft_window)

    def count_received(self, pages: int, source: Source) -> None:
        """Count what one request needed, as this rank's pool holds it."""
        if self.caches.draft is not None:  # without a drafter the prefill side does not count
            target, draft = source.page_bytes
            draft_pages = pages - self._pages_skipped(source, pages)
            self.stats.add(
                target_bytes_needed=pages * target, draft_bytes_needed=draft_pages * draft
            )
        self.stats.publish()

    @property
    def staging_span(self) -> tuple[int, int]:
        """Address and bytes of the buffer in which regions are granted; (0, 0): none are."""
        return self.staging.span if self.staging else (0, 0)

    def prepare_staging(self, source: Source) -> None:
        """Take the staging memory before the first peer that needs it is registered with."""
        if source.slices is None:
            return
        release_s = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get()
        self.staging = prepare(
            self.engine, self.rows, self.config.staging_mb << 20, *source.slices,
            self.config.draft_transfer, max(QUARANTINE_S, 2 * release_s), self.staging,
        )  # fmt: skip
        self.count_staging()

    def grant(self, room: int, source: Source, pages: Any) -> dict[tuple[int, int], Grant]:
        """How a room's head slices come, by (prefill rank, stage); none: direct or packed."""
        if source.slices is None or self.staging is None or not len(pages):
            return {}
        numbers = np.asarray(pages, np.int64)
        full, mode = self.staging.full, self.config.draft_transfer
        skip = self._pages_skipped(source, len(pages))
        told = self.staging.grant(room, *source.slices, numbers, skip, mode, source.extents)
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
        """The room ended; a region that was not scattered is quarantined until all ranks that were
        contacted have acknowledged the abort, which some may have done before."""
        if self.staging is not None:
            expected = self.expected.get(room)
            self.staging.release(room, expected.contacted if expected else frozenset())
            self._free_if_drained(room)
        self.verifier.forget(room)

    @override(MooncakeKVManager)
    def note_abort_ack(self, bootstrap_room: int, prefill_rank: int, generation: int) -> None:
        """As stock; what the room held of the staging buffer is free with the last one."""
        super().note_abort_ack(bootstrap_room, prefill_rank, generation)
        self._free_if_drained(bootstrap_room)

    def _free_if_drained(self, room: int) -> None:
        state = self._deferred_abort_ack_tracker.get(room)
        if state is not None and self.staging is not None:
            self.staging.drained(room, state.prefill_ranks)
            self.count_staging()

    @property
    def draft_window(self) -> int:
        """The drafter's reach in tokens; 0, everything, where pages become a shared prefix."""
        window: int = getattr(self.kv_args, "draft_window", 0)
        return 0 if get_disagg().disaggregation_decode_enable_radix_cache else window
