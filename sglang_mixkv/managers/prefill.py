"""The prefill side: send each peer what its plan says.

All of it runs in SGLang's transfer threads and scheduler, which an exception would end
without a word: nothing here raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import requests
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.utils.network import NetworkAddress

from sglang_mixkv.core.announcement import announcement
from sglang_mixkv.core.errors import MixKVError, refuse
from sglang_mixkv.core.pages import pages_to_send, window_start
from sglang_mixkv.core.wire import Digest, encode
from sglang_mixkv.managers.aside import override
from sglang_mixkv.managers.engine import within_limits
from sglang_mixkv.managers.facts import KEY, PATH, TIMEOUT_S
from sglang_mixkv.managers.gate import PrefillGate
from sglang_mixkv.managers.handover import Current, TappedExecutor, TappedQueue
from sglang_mixkv.managers.peer import Peer
from sglang_mixkv.managers.staging import pack_buffer
from sglang_mixkv.transfer.bounded import BoundedEngine
from sglang_mixkv.transfer.digest import Digester, Sums, pairs
from sglang_mixkv.transfer.writer import Chunk, ChunkWriter, Unfinished

logger = logging.getLogger(__name__)


class PrefillSide(PrefillGate):
    """Overrides of MooncakeKVManager that act on prefill ranks.

    `peers`: session id -> Peer; written by the bootstrap thread, read by transfer threads.
    `grants`: (room, session id) -> grant, from metadata to the end of the room's sender.
    """

    engine: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """`current`: what each transfer thread works on."""
        self.current = Current()
        super().__init__(*args, **kwargs)

    @override(MooncakeKVManager)
    def init_engine(self) -> None:
        """As stock; on prefill ranks that may use TCP, within that transport's limits."""
        super().init_engine()
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.engine = within_limits(self.engine)

    @property
    def transport(self) -> str:
        """What the banner says of a prefill rank's engine."""
        if self.disaggregation_mode != DisaggregationMode.PREFILL:
            return ""
        bounded = isinstance(self.engine, BoundedEngine)
        return ", within the limits of TCP" if bounded else ", over RDMA"

    @override(MooncakeKVManager)
    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        """As stock, with this rank's facts in the row; then see that somebody keeps them."""
        row = {**payload, KEY: announcement(self.facts)}
        super()._register_topology_row(url, row)
        try:
            answer = requests.get(url.removesuffix("/route") + PATH, timeout=TIMEOUT_S)
        except requests.RequestException:
            return  # stock has logged that the bootstrap server is away
        if answer.status_code == requests.codes.not_found:
            raise RuntimeError(
                f"sglang-mixkv: the bootstrap server at {url} is SGLang's own, not the plugin's, "
                "so decode servers could not see this prefill's drafter. Start every process of "
                "the prefill server with --enable-mixkv and without SGLANG_PLUGINS excluding it."
            )

    @override(MooncakeKVManager)
    def _get_dsa_cache_transfer_skip_flags(self, info: Any) -> tuple[bool, bool]:
        """Let the plan decide on KV, and the route on state."""
        peer = self.peers.get(info.mooncake_session_id) if info is not None else None
        skip_kv, skip_state = super()._get_dsa_cache_transfer_skip_flags(info)
        if peer is None or peer.plan is None:
            return skip_kv, skip_state
        return False, skip_state or not peer.route.sends_state

    @override(MooncakeKVManager)
    def send_kvcache(
        self, mooncake_session_id: str, prefill_kv_indices: Any, dst_kv_ptrs: list[int],
        dst_kv_indices: Any, *args: Any, **kwargs: Any,
    ) -> int:  # fmt: skip
        return self._send(
            super().send_kvcache, mooncake_session_id, prefill_kv_indices, dst_kv_ptrs,
            dst_kv_indices, *args, **kwargs,
        )  # fmt: skip

    @override(MooncakeKVManager)
    def send_kvcache_slice(
        self, mooncake_session_id: str, prefill_kv_indices: Any, dst_kv_ptrs: list[int],
        dst_kv_indices: Any, *args: Any, **kwargs: Any,
    ) -> int:  # fmt: skip
        return self._send(
            super().send_kvcache_slice, mooncake_session_id, prefill_kv_indices, dst_kv_ptrs,
            dst_kv_indices, *args, **kwargs,
        )  # fmt: skip

    def _send(
        self, stock: Callable[..., int], session: str, src_pages: Any, dst_ptrs: list[int],
        dst_pages: Any, *args: Any, **kwargs: Any,
    ) -> int:  # fmt: skip
        """Send one chunk: by the peer's plan, or as stock where there is no drafter."""
        peer = self.peers.get(session)
        if peer is not None and peer.plan is not None:
            return self._guarded(session, self._send_planned, peer, src_pages, dst_pages)
        return self._guarded(
            session, stock, session, src_pages, dst_ptrs, dst_pages, *args, **kwargs
        )

    def _guarded(self, session: str, send: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        """What `send` returns. Nothing is sent for a room that has ended.

        Where `send` raises, this thread's room fails with the reason. It fails alone (0) unless a
        write of it failed or may go on: another code is stock's word for a peer that is dead.
        """
        chunk = self.current.chunk
        if chunk is not None and self._has_failed(chunk.room):
            return 0
        self.current.begin()
        try:
            return int(send(*args, **kwargs))
        except Exception as error:
            room = "" if chunk is None else f"room {chunk.room} "
            ours = isinstance(error, MixKVError)
            why = str(error) if ours else repr(error)
            reason = f"sglang-mixkv could not send {room}to {session}: {why}"
            logger.error("%s", reason, exc_info=not ours)
            if chunk is None:
                return -1
            code = self.current.settle() or (-1 if isinstance(error, Unfinished) else 0)
            self.conclude_failure(bootstrap_room=chunk.room, failure_reason=reason)
            return code

    def _has_failed(self, room: int) -> bool:
        """Whether the room has failed, or the scheduler has cleared it already."""
        return bool(self.request_status.get(room, KVPoll.Failed) == KVPoll.Failed)

    @override(MooncakeKVManager)
    def _transfer_data(self, mooncake_session_id: str, transfer_blocks: Any) -> int:
        """As stock; what it returns is kept, since stock loses it where it raises afterwards."""
        code = int(super()._transfer_data(mooncake_session_id, transfer_blocks))
        self.current.code = self.current.code or code
        return code

    @override(MooncakeKVManager)
    def send_kvcache_dcp(self, mooncake_session_id: str, *args: Any, **kwargs: Any) -> int:
        stock = super().send_kvcache_dcp
        return self._guarded(mooncake_session_id, stock, mooncake_session_id, *args, **kwargs)

    @override(MooncakeKVManager)
    def maybe_send_extra(self, req: Any, *args: Any, **kwargs: Any) -> int:
        """State, as stock, which raises where it is laid out otherwise than it expects."""
        stock = super().maybe_send_extra
        return self._guarded(req.mooncake_session_id, stock, req, *args, **kwargs)

    @override(MooncakeKVManager)
    def transfer_worker(self, queue: Any, executor: Any, *args: Any, **kwargs: Any) -> None:
        """As stock, over a queue and an executor that note what this thread works on."""
        taps = TappedQueue(queue, self.current), TappedExecutor(executor, self.current)
        super().transfer_worker(*taps, *args, **kwargs)

    @override(MooncakeKVManager)
    def check_status(self, bootstrap_room: int) -> Any:
        """As stock; a room that is gone has failed. Stock's transfer thread asks after it looked
        whether the room is there, and ends with a KeyError if it was cleared in between."""
        return self.request_status.get(bootstrap_room, KVPoll.Failed)

    @override(MooncakeKVManager)
    def add_transfer_request(
        self, bootstrap_room: int, kv_indices: Any, index_slice: slice, is_last_chunk: bool,
        aux_index: int | None = None, state_indices: Any = None, num_kv_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Cut lookahead pages; refuse a chunk that does not line up. In the scheduler's loop."""
        try:
            count = self._pages_to_send(
                bootstrap_room, len(kv_indices), index_slice.start, num_kv_tokens, is_last_chunk
            )
        except MixKVError as error:
            reason = f"sglang-mixkv refuses to send room {bootstrap_room}: {error}"
            self.fail_room(bootstrap_room, reason)
            return
        super().add_transfer_request(
            bootstrap_room, kv_indices[:count],
            slice(index_slice.start, index_slice.start + count), is_last_chunk, aux_index,
            state_indices, num_kv_tokens, **kwargs,
        )  # fmt: skip

    def _pages_to_send(
        self, room: int, offered: int, start: int, tokens: int | None, last: bool
    ) -> int:
        """Pages of this chunk to send, the same for every planned peer of the room."""
        count = offered
        for session, info in list(self.transfer_infos.get(room, {}).items()):
            peer = self.peers.get(session)
            if peer is None or peer.plan is None or info.is_dummy:
                continue
            total = len(info.dst_kv_indices)
            count = pages_to_send(offered, tokens, peer.plan.page_size, start, total, last=last)
        return count

    def _send_planned(self, peer: Peer, src_pages: Any, dst_pages: Any) -> int:
        """Write one chunk of this thread's room. Raises MixKVError for one that does not fit."""
        plan, taken = peer.plan, self.current.chunk
        assert plan is not None
        src, dst = np.asarray(src_pages, np.int64), np.asarray(dst_pages, np.int64)
        plan.check_pages(src, dst)
        chunk, grant = Chunk(src, dst), None
        if taken is not None:
            grant = self.grants.get((taken.room, peer.session))
            info = self.transfer_infos.get(taken.room, {}).get(peer.session)
            if info is None or self._has_failed(taken.room):
                return 0  # given up, and its grant may be gone: nobody reads what would be sent
            skip = self._before_window(peer, taken, len(info.dst_kv_indices))
            chunk = Chunk(src, dst, taken.index_slice.start, skip)
        elif peer.staging[1] or peer.draft_window:
            raise refuse(
                "to know which room this chunk belongs to",
                "a thread that took none from SGLang's queue",
                "draft heads would land outside the region that the decode rank reads",
                "Report this; it is not expected from a supported SGLang",
            )
        started = time.perf_counter()
        written = self._writer().write(peer.session, plan, chunk, grant)
        if written.code == 0:
            self.stats.written(written, time.perf_counter() - started)
            sent = self.open_rooms.get(taken.room) if taken is not None else None
            if sent is not None:
                sent.add(peer, written)
            if peer.verify and taken is not None:
                sums = self.sums.setdefault((taken.room, peer.session), Sums())
                self._digester().add_chunk(sums, plan, src, chunk.skip)
        return written.code

    @property
    def has_plans(self) -> bool:
        """Whether this rank's decode ranks have a drafter: then plans say what is sent."""
        return any(peer.plan is not None for peer in list(self.peers.values()))

    def _digester(self) -> Digester:
        """This thread's reader for checksums."""
        self.current.digester = self.current.digester or Digester(self.rows)
        return self.current.digester

    def _send_digest(self, peer: Peer, req: Any) -> None:
        """Tell the decode rank what was sent; it concludes without one if this is lost."""
        sums = self.sums.pop((req.room, peer.session), None)
        if sums is None or peer.plan is None:
            return
        digest = Digest(
            req.room, self._prefill_unique_rank(),
            pairs(peer.plan.target, sums.target), pairs(peer.plan.draft, sums.draft),
        )  # fmt: skip
        address = NetworkAddress(req.endpoint, req.dst_port)
        try:
            self._send_multipart_locked(address.to_tcp(), [encode(digest)], is_ipv6=address.is_ipv6)
        except Exception as error:
            logger.warning("sglang-mixkv: no checksums to %s: %s", peer.session, error)

    def _writer(self) -> ChunkWriter:
        """This thread's writer."""
        if self.current.writer is None:
            threads = max(1, len(getattr(self, "transfer_queues", ())))
            size = (self.config.staging_mb << 20) // threads
            self.current.writer = ChunkWriter(
                self.engine,
                self.rows,
                lambda: pack_buffer(self.engine, self.rows, size),
                self.config.draft_transfer,
                self.max_transfer_batch_indices,
            )
        return self.current.writer

    def _before_window(self, peer: Peer, taken: Any, total: int) -> int:
        """Pages at this chunk's front, of `total` in all, that the drafter cannot reach."""
        if not peer.draft_window:
            return 0
        assert peer.plan is not None
        first = window_start(total, peer.plan.page_size, peer.draft_window)
        return min(len(taken.prefill_kv_indices), max(0, first - taken.index_slice.start))

    @override(MooncakeKVManager)
    def send_aux(self, req: Any, prefill_aux_index: int, dst_aux_ptrs: list[int]) -> int:
        """Aux data comes from one sender a decode rank; to a cold one without the drafter's."""
        stock = super().send_aux
        return self._guarded(
            req.mooncake_session_id, self._send_aux, stock, req, prefill_aux_index, dst_aux_ptrs
        )

    def _send_aux(self, stock: Callable[..., int], req: Any, row: int, dst_ptrs: list[int]) -> int:
        peer = self.peers.get(req.mooncake_session_id)
        if peer is None or peer.plan is None:
            return stock(req, row, dst_ptrs)
        if peer.verify:
            self._send_digest(peer, req)
        if not peer.route.sends_aux:
            return 0
        return self._send_cold_aux(req, row, dst_ptrs) if peer.cold else stock(req, row, dst_ptrs)

    def _send_cold_aux(self, req: Any, row: int, dst_ptrs: list[int]) -> int:
        """Stock's send_aux without the drafter's rows, whose length may differ on that side."""
        lens = self.kv_args.aux_item_lens
        ranges = [
            (src + lens[i] * row, dst + lens[i] * req.dst_aux_index, lens[i])
            for i, (src, dst) in enumerate(zip(self.kv_args.aux_data_ptrs, dst_ptrs, strict=True))
            if i not in self.facts.draft_aux
        ]
        return int(self._transfer_data(req.mooncake_session_id, ranges))

    @override(MooncakeKVManager)
    def conclude_transfer(self, **kwargs: Any) -> Any:
        status = super().conclude_transfer(**kwargs)
        self.stats.publish()
        return status
