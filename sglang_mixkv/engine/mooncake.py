"""SGLang's Mooncake classes with this rank's side: what only this backend has.

One chunk, in a transfer thread:

    transfer_worker -> (SGLang's loop) -> send_kvcache -> PrefillRank.send -> ChunkWriter.write
                    -> Mooncake.write
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import partial
from typing import Any

from sglang.srt.disaggregation.mooncake.conn import (
    MooncakeKVBootstrapServer,
    MooncakeKVManager,
    MooncakeKVReceiver,
    MooncakeKVSender,
)
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)

from sglang_mixkv.engine.bootstrap import AnnouncingBootstrapServer
from sglang_mixkv.engine.dcp import TargetAlone, tokens_of
from sglang_mixkv.engine.rdma import over_rdma
from sglang_mixkv.engine.receiver import RoomReceiver
from sglang_mixkv.engine.sender import RoomSender
from sglang_mixkv.engine.transfers import TransferInfos, TransferringManager, WorkerQueue
from sglang_mixkv.prefill.peer import Peer
from sglang_mixkv.prefill.rank import AuxFrom, PrefillRank
from sglang_mixkv.prefill.worker import Worker
from sglang_mixkv.protocol.messages import Abort
from sglang_mixkv.transport.mooncake import Engines, InFlight, Mooncake, SharedEngine

logger = logging.getLogger(__name__)

Send = Callable[[], int]


class WorkerExecutor:
    """SGLang's executor of one transfer thread, with its writes kept for that thread's worker."""

    def __init__(self, executor: ThreadPoolExecutor, worker: Worker) -> None:
        self._executor, self._worker = executor, worker

    def submit(self, write: Callable[..., int], *args: Any) -> Future[int]:
        future = self._executor.submit(write, *args)
        self._worker.writes.append(future)
        return future


class MixKVManager(TransferringManager, MooncakeKVManager):
    """SGLang's MooncakeKVManager with separate target and draft components."""

    backend = "mooncake"
    has_dcp_with_draft = True

    def init_engine(self) -> None:
        """As stock; what the side writes goes by the same engine. On prefill ranks, and unless it
        certainly uses RDMA, within the limits of Mooncake's TCP transport."""
        super().init_engine()
        if self.side is None:
            return
        engines = Engines(self.engine, partial(_like, self.engine))
        bounded = self.prefill is not None and not over_rdma(self.engine)
        in_flight = InFlight() if bounded else None
        transport = Mooncake(engines, in_flight)
        if in_flight is not None:
            self.engine: Any = SharedEngine(engines, transport, in_flight)
        self.side.connect(transport)

    # -- chunks, in SGLang's transfer threads

    def transfer_worker(self, queue: Any, executor: Any, *args: Any, **kwargs: Any) -> None:
        """As stock, over a queue and an executor that tell this thread's worker what goes on."""
        if self.prefill is not None:
            worker = self.make_worker(self.prefill, self.max_transfer_batch_indices)
            queue, executor = WorkerQueue(queue, worker), WorkerExecutor(executor, worker)
        super().transfer_worker(queue, executor, *args, **kwargs)

    def send_kvcache(
        self, mooncake_session_id: str, prefill_kv_indices: Any, dst_kv_ptrs: list[int],
        dst_kv_indices: Any, *args: Any, **kwargs: Any,
    ) -> int:  # fmt: skip
        stock = partial(
            super().send_kvcache, mooncake_session_id, prefill_kv_indices, dst_kv_ptrs,
            dst_kv_indices, *args, **kwargs,
        )  # fmt: skip
        return self._send(stock, mooncake_session_id, prefill_kv_indices, dst_kv_indices)

    def send_kvcache_slice(
        self, mooncake_session_id: str, prefill_kv_indices: Any, dst_kv_ptrs: list[int],
        dst_kv_indices: Any, *args: Any, **kwargs: Any,
    ) -> int:  # fmt: skip
        stock = partial(
            super().send_kvcache_slice, mooncake_session_id, prefill_kv_indices, dst_kv_ptrs,
            dst_kv_indices, *args, **kwargs,
        )  # fmt: skip
        return self._send(stock, mooncake_session_id, prefill_kv_indices, dst_kv_indices)

    def _send(self, as_stock: Send, session: str, src_pages: Any, dst_pages: Any) -> int:
        """By the peer's plan, or as stock where there is no drafter."""
        side = self.prefill
        if side is None:
            return as_stock()
        peer, worker = side.planned(session), self._worker
        send = as_stock
        if peer is not None:
            send = partial(side.send, worker, peer, src_pages, dst_pages)
        return side.guarded(worker, session, send)

    def _transfer_data(self, mooncake_session_id: str, transfer_blocks: Any) -> int:
        """As stock; what it returns is kept, since stock loses it where it raises afterwards."""
        code = int(super()._transfer_data(mooncake_session_id, transfer_blocks))
        worker = self._worker if self.prefill is not None else None
        if worker is not None:
            worker.code = worker.code or code
        return code

    def send_kvcache_dcp(
        self, mooncake_session_id: str, prefill_kv_indices: Any, *args: Any, **kwargs: Any
    ) -> int:
        """The target as stock, from one sender per decode rank; the drafter by the peer's plan."""
        said = (mooncake_session_id, prefill_kv_indices, *args)
        stock = partial(super().send_kvcache_dcp, *said, **kwargs)
        side = self.prefill
        peer = side.planned(mooncake_session_id) if side is not None else None
        if side is None or peer is None:
            return self._guarded(mooncake_session_id, stock)

        def send() -> int:
            code = self._send_target_dcp(side, peer, *said, **kwargs)
            return code or side.send(self._worker, peer, prefill_kv_indices)

        return side.guarded(self._worker, mooncake_session_id, send)

    def _send_target_dcp(
        self, side: PrefillRank, peer: Peer, session: str, src_pages: Any, dst_ptrs: list[int],
        dst_pages: Any, *, dst_layer_ids: list[int], dst_kv_item_lens: list[int] | None = None,
        **dcp: Any,
    ) -> int:  # fmt: skip
        if not peer.route.is_send_target:
            return 0
        count = peer.target_entries
        send = partial(
            MooncakeKVManager.send_kvcache_dcp, TargetAlone(self), session, src_pages,
            dst_ptrs[:count], dst_pages, dst_layer_ids=dst_layer_ids[:count],
            dst_kv_item_lens=(dst_kv_item_lens or [])[:count], **dcp,
        )  # fmt: skip
        first = dcp["decode_prefix_len"] + dcp["src_page_offset"] * self.kv_args.page_size
        tokens = tokens_of(dcp["dst_dcp_rank"], dcp["dst_dcp_size"], first, dcp["num_kv_tokens"])
        return side.send_target(self._worker, peer, tokens, send)

    def maybe_send_extra(self, req: Any, *args: Any, **kwargs: Any) -> int:
        """State, as stock, which raises where it is laid out otherwise than it expects."""
        stock = partial(super().maybe_send_extra, req, *args, **kwargs)
        return self._guarded(req.mooncake_session_id, stock)

    def _guarded(self, session: str, stock: Send) -> int:
        return (
            stock() if self.prefill is None else self.prefill.guarded(self._worker, session, stock)
        )

    def _get_dsa_cache_transfer_skip_flags(self, info: Any) -> tuple[bool, bool]:
        """Let the plan decide on KV, and the route on state."""
        skip_kv, skip_state = super()._get_dsa_cache_transfer_skip_flags(info)
        side = self.prefill
        peer = side.planned(info.mooncake_session_id) if side and info is not None else None
        if peer is None:
            return skip_kv, skip_state
        return False, skip_state or not peer.route.sends_state

    def send_aux(self, req: Any, prefill_aux_index: int, dst_aux_ptrs: list[int]) -> int:
        """Metadata, from one sender per decode rank; to a cold one without the drafter's."""
        stock = partial(super().send_aux, req, prefill_aux_index, dst_aux_ptrs)
        side = self.prefill
        if side is None:
            return stock()
        send = partial(self._send_aux, side, stock, req, prefill_aux_index, dst_aux_ptrs)
        return side.guarded(self._worker, req.mooncake_session_id, send)

    def _send_aux(
        self, side: PrefillRank, stock: Send, req: Any, row: int, dst_ptrs: list[int]
    ) -> int:
        session, worker = req.mooncake_session_id, self._worker
        if worker is not None and worker.task is not None:
            self.send_digest(side, session, worker.task.room)
        source = side.aux_from(session)
        if source is AuxFrom.NOBODY:
            return 0
        return stock() if source is AuxFrom.STOCK else self._send_cold_aux(req, row, dst_ptrs)

    def _send_cold_aux(self, req: Any, row: int, dst_ptrs: list[int]) -> int:
        """Stock's send_aux without the drafter's rows."""
        assert self.prefill is not None
        left_out = self.prefill.local.facts.draft_aux
        blocks = self.aux_blocks(row, dst_ptrs, req.dst_aux_index, left_out)
        ranges = list(zip(*blocks.lists(), strict=True))
        return int(self._transfer_data(req.mooncake_session_id, ranges))

    # -- control threads

    def start_prefill_thread(self) -> None:
        """As stock, over a table in which no room is missing."""
        if self.prefill is not None:
            self.transfer_infos = TransferInfos()
        super().start_prefill_thread()

    def _make_worker_recv(self, socket: Any, timeout_ms: int = 500) -> Callable[[], Any]:
        """Stock's receive of both control threads, giving only messages that stock may read."""
        recv = super()._make_worker_recv(socket, timeout_ms)

        def admitted() -> list[bytes] | None:
            message = recv()
            return message if message and self.may_pass(message) else None

        return recv if self.side is None else admitted

    def _validate_peer_state_layout(self, registration_info: Any) -> tuple[bool, str | None]:
        """As stock, about a peer that was admitted at the door. Item lengths of a peer with a plan
        are left out: an SGLang that compares them (upstream/) would refuse what the plan serves."""
        shown = registration_info
        if self.prefill is not None and self.prefill.planned(shown.mooncake_session_id) is not None:
            shown = copy(shown)
            shown.dst_kv_item_lens = []
        checked, mismatch = super()._validate_peer_state_layout(shown)
        if mismatch is not None and self.prefill is not None:
            self.prefill.refused_by_sglang(registration_info.mooncake_session_id, mismatch)
        return checked, mismatch

    def _handle_deferred_abort_notification(self, notification: Any, room_active: bool) -> None:
        """As stock, which acknowledges; only the request that was given up ends."""
        if self.prefill is not None:
            said = Abort(
                notification.room,
                notification.decode_ip or "",
                notification.decode_port or 0,
                notification.generation,
            )
            room_active = room_active and not self.prefill.gate.is_of_last_request(said)
        super()._handle_deferred_abort_notification(notification, room_active)

    def takes_back(self, session: str) -> bool:
        """Whether the peer answers a probe; SGLang's own takes it back by that, where it is on."""
        transport = self.prefill.transport if self.prefill is not None else None
        assert transport is not None, "a failed write without a transport"
        return transport.probe(session)


def _like(engine: MooncakeTransferEngine) -> MooncakeTransferEngine:
    """A new engine with the same settings."""
    return MooncakeTransferEngine(engine.hostname, engine.gpu_id, engine.ib_device)


class MixKVSender(RoomSender, MooncakeKVSender):
    """SGLang's Mooncake sender with its room."""


class MixKVReceiver(RoomReceiver, MooncakeKVReceiver):
    """SGLang's Mooncake receiver with its room."""


class MixKVBootstrapServer(AnnouncingBootstrapServer, MooncakeKVBootstrapServer):
    """SGLang's Mooncake bootstrap server, which passes facts on."""


CLASSES = {
    "manager": MixKVManager,
    "sender": MixKVSender,
    "receiver": MixKVReceiver,
    "bootstrap_server": MixKVBootstrapServer,
}
