"""SGLang's NIXL classes with this rank's side: what only this backend has.

One chunk, in a transfer thread:

    transfer_worker -> (SGLang's loop) -> send_kvcache -> PrefillRank.send -> ChunkWriter.write
                    -> Nixl.write

SGLang's loop waits for the handles that its methods return; what is written by a plan is over
when the method returns, so that it returns none. A write that failed is raised as SGLang's own
_NixlPostError, after which the loop fails the room, never acknowledges its abort, and reloads the
peer: bytes of that write may still arrive. A connection that breaks under a write of SGLang's own
ends the same way; the peer is taken anew when it registers again, as it does when it hears of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import AbortNotification
from sglang.srt.disaggregation.nixl.conn import (
    NixlKVBootstrapServer,
    NixlKVManager,
    NixlKVReceiver,
    NixlKVSender,
    _NixlPostError,
)

from sglang_mixkv.engine.bootstrap import AnnouncingBootstrapServer
from sglang_mixkv.engine.manager import SidedManager
from sglang_mixkv.engine.nixl_writes import StockWrites, explained
from sglang_mixkv.engine.receiver import RoomReceiver
from sglang_mixkv.engine.sender import RoomSender
from sglang_mixkv.engine.transfers import (
    TransferInfos,
    TransferringManager,
    WorkerQueue,
)
from sglang_mixkv.prefill import failures
from sglang_mixkv.prefill.rank import AuxFrom, PrefillRank
from sglang_mixkv.protocol.messages import ABORT, read_abort
from sglang_mixkv.transport.nixl import Memory, Nixl

logger = logging.getLogger(__name__)


class GatedSocket:
    """SGLang's control socket; its thread gets only messages that the manager's gate lets pass.
    `threads`: where that thread enters itself."""

    def __init__(self, socket: Any, manager: SidedManager, threads: list[threading.Thread]) -> None:
        self._socket, self._manager, self._threads = socket, manager, threads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv_multipart(self) -> list[bytes]:
        if threading.current_thread() not in self._threads:
            self._threads.append(threading.current_thread())
        while True:
            message: list[bytes] = self._socket.recv_multipart()
            if self._manager.may_pass(message):
                return message


class MixNixlManager(TransferringManager, NixlKVManager):
    """SGLang's NixlKVManager with separate target and draft components.

    `written`, `metadata`: how KV and metadata rows get to peers. They lie in memory of different
    kinds. `stock`: what SGLang's own code writes.
    """

    backend = "nixl"
    written: Nixl
    metadata: Nixl
    stock: StockWrites

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._worker_threads: list[threading.Thread] = []
        super().__init__(*args, **kwargs)

    def register_buffer_to_engine(self) -> None:
        """As stock; what the side writes goes by the same agent. SGLang registers again when a
        server takes its memory back: what is known of peers stays."""
        super().register_buffer_to_engine()
        if self.side is None or self.side.transport is not None:
            return
        kv, rows = Memory("VRAM", self.kv_args.gpu_id), Memory("DRAM", 0)
        self.written = Nixl(self.agent, kv, self._device_of)
        self.metadata = Nixl(self.agent, rows, lambda _: 0, self.written.lost)
        if self.prefill is not None:
            self.stock = StockWrites(self.written, self.prefill.why_unsent)
        self.side.connect(self.written)

    def _device_of(self, session: str) -> int:
        return int(self.decode_kv_args_table[session].gpu_id)

    # -- chunks, in the scheduler, then in SGLang's transfer threads

    def waits_for(self, event: Any) -> Any:
        """Stock does not wait for the forward that writes a prefix sent early."""
        return event

    def transfer_worker(self, queue: Any, *args: Any, **kwargs: Any) -> None:
        """As stock, over a queue that tells this thread's worker what goes on."""
        if self.prefill is not None:
            self._worker_threads.append(threading.current_thread())
            queue = WorkerQueue(queue, self.make_worker(self.prefill, most_pages=0))
        super().transfer_worker(queue, *args, **kwargs)

    def send_kvcache(
        self, peer_name: str, prefill_kv_indices: Any, dst_kv_ptrs: list[int],
        dst_kv_indices: Any, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        stock = partial(
            super().send_kvcache, peer_name, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices,
            *args, **kwargs,
        )  # fmt: skip
        return self._send(stock, peer_name, prefill_kv_indices, dst_kv_indices)

    def send_kvcache_slice(
        self, peer_name: str, prefill_kv_indices: Any, dst_kv_indices: Any
    ) -> Any:
        stock = partial(super().send_kvcache_slice, peer_name, prefill_kv_indices, dst_kv_indices)
        return self._send(stock, peer_name, prefill_kv_indices, dst_kv_indices)

    def _send(
        self, as_stock: Callable[[], Any], session: str, src_pages: Any, dst_pages: Any
    ) -> Any:
        """By the peer's plan, or as stock where there is no drafter."""
        side = self.prefill
        if side is None:
            return as_stock()
        peer, worker = side.planned(session), self._worker
        if worker is not None and worker.task is not None:
            if worker.task.written is not None:
                worker.task.written.synchronize()
            if peer is None:
                side.check_still_fits(worker.task.room, session)
        if peer is None:
            return self.stock.post(worker, session, as_stock)
        self._write(session, partial(side.send, worker, peer, src_pages, dst_pages))
        return None

    def _write(self, session: str, write: Callable[[], int]) -> None:
        """One write of the side. Raises _NixlPostError where its end is not known."""
        side, worker = self.prefill, self._worker
        assert side is not None
        code = side.guarded(worker, session, write)
        if code:
            room = worker.task.room if worker is not None and worker.task is not None else None
            raise _NixlPostError(side.why_unsent(session, room, code))

    def maybe_send_extra(self, peer_name: str, *args: Any, **kwargs: Any) -> Iterable[Any]:
        """State, as stock, by the ranks whose route it is."""
        side, worker = self.prefill, self._worker
        stock = super().maybe_send_extra(peer_name, *args, **kwargs)
        if side is None or worker is None or worker.task is None:
            return stock
        peer = side.planned(peer_name)
        if peer is not None and (side.has_failed(worker.task.room) or not peer.route.sends_state):
            return ()
        handles = explained(stock, partial(failures.raised, peer_name, worker.task.room))
        return iter(partial(self.stock.post, worker, peer_name, partial(next, handles, None)), None)

    def send_aux(
        self, peer_name: str, prefill_aux_index: int, dst_aux_ptrs: list[int], dst_aux_index: int
    ) -> Any:
        """Metadata, from one sender per decode rank; to a cold one without the drafter's."""
        side = self.prefill
        if side is None or side.planned(peer_name) is None:
            stock = partial(
                super().send_aux, peer_name, prefill_aux_index, dst_aux_ptrs, dst_aux_index
            )
            return stock() if side is None else self.stock.post(self._worker, peer_name, stock)
        write = partial(
            self._send_aux, side, peer_name, prefill_aux_index, dst_aux_ptrs, dst_aux_index
        )
        self._write(peer_name, write)
        return None

    def _send_aux(
        self, side: PrefillRank, session: str, row: int, dst_ptrs: list[int], dst_row: int
    ) -> int:
        worker = self._worker
        if worker is not None and worker.task is not None:
            self.send_digest(side, session, worker.task.room)
        source = side.aux_from(session)
        if source is AuxFrom.NOBODY:
            return 0
        left_out = side.local.facts.draft_aux if source is AuxFrom.COLD else ()
        blocks = self.aux_blocks(row, dst_ptrs, dst_row, left_out)
        return self.metadata.wait(self.metadata.write(session, blocks))

    def _await_handles(
        self, handles: list[Any], *, failure_seen: bool, **kwargs: Any
    ) -> tuple[bool, bool]:
        """As stock, which adds what send_aux returns in any case, and takes a write whose
        connection broke for one that goes on for ever. Raises _NixlPostError for such a one, once:
        SGLang's loop then waits for the others of a batch that has failed."""
        wait = partial(super()._await_handles, failure_seen=failure_seen, **kwargs)
        handles = [handle for handle in handles if handle is not None]
        settled, failed = wait(handles)
        if not settled and self.prefill is not None:
            ended = self.stock.ended(self._worker, failure_seen=failure_seen)
            if ended:
                settled, failed = wait([handle for handle in handles if handle not in ended])
        return bool(settled), bool(failed)

    def takes_back(self, session: str) -> bool:
        """SGLang keeps from no peer after a failed write: the room fails, as it would have it."""
        return False

    # -- control threads

    def _start_bootstrap_thread(self) -> None:
        """As stock, over a table in which no room is missing, behind the gate."""
        if self.prefill is not None:
            self.transfer_infos = TransferInfos()
            self._gate_socket()
        super()._start_bootstrap_thread()

    def _start_decode_listener_thread(self) -> None:
        """As stock, behind the gate."""
        if self.decode is not None:
            self._gate_socket()
        super()._start_decode_listener_thread()

    def _gate_socket(self) -> None:
        self.server_socket: Any = GatedSocket(self.server_socket, self, self._worker_threads)

    def _add_remote_peer(self, decode_kv_args: Any) -> None:
        """As stock, which would end its thread for a peer that NIXL does not take; one that
        registers again is taken anew."""
        side, session = self.prefill, decode_kv_args.agent_name
        if side is None:
            super()._add_remote_peer(decode_kv_args)
            return
        try:
            if session in self.decode_kv_args_table:
                self._renew(decode_kv_args)
            else:
                super()._add_remote_peer(decode_kv_args)
        except Exception as error:
            logger.exception("[MIXKV-PAIR-07] sglang-mixkv refuses decode rank %s", session)
            side.refused_by_sglang(session, f"SGLang's NIXL backend does not take it: {error!r}")

    def _renew(self, info: Any) -> None:
        """What stock does with a new peer, without a moment in which a transfer thread could
        miss it. NIXL adds what is new to the metadata that it has, unless the connection broke."""
        session, dcp = info.agent_name, (info.dst_dcp_size, info.dst_dcp_rank)
        if session in self.written.lost:
            self.agent.remove_remote_agent(session)
        info.requires_dcp_relayout = self.requires_dcp_relayout(*dcp)
        self.agent.add_remote_agent(info.agent_metadata)
        self._prepare_payload_xfer(info)
        self._prepare_state_xfer(info)
        self.written.lost.discard(session)
        self.decode_kv_args_table[session] = info

    def _prepare_payload_xfer(self, peer_info: Any) -> None:
        """As stock, for peers without a plan of ours."""
        if self.prefill is None or self.prefill.planned(peer_info.agent_name) is None:
            super()._prepare_payload_xfer(peer_info)
            return
        # What stock's loop asks for before it calls send_kvcache.
        peer_info.dst_homogeneous_mem_kind = self.src_mem_kind

    def _handle_abort_notification(self, msg: list[bytes]) -> bool:
        """As stock, which acknowledges; only the request that was given up ends, with the reason
        that the gate has noted."""
        side = self.prefill
        if side is None or msg[0] != ABORT:
            return bool(super()._handle_abort_notification(msg))
        said = read_abort(msg)
        active = self.request_status.get(said.room) not in (None, KVPoll.Success)
        if active and not side.gate.is_of_last_request(said):
            self.update_status(said.room, KVPoll.Failed)
        notification = AbortNotification.from_zmq(msg)
        if notification is not None:
            self._handle_deferred_abort_ack(notification)
        return True


class MixNixlSender(RoomSender, NixlKVSender):
    """SGLang's NIXL sender with its room."""


class MixNixlReceiver(RoomReceiver, NixlKVReceiver):
    """SGLang's NIXL receiver with its room."""


class MixNixlBootstrapServer(AnnouncingBootstrapServer, NixlKVBootstrapServer):
    """SGLang's NIXL bootstrap server, which passes facts on."""


CLASSES = {
    "manager": MixNixlManager,
    "sender": MixNixlSender,
    "receiver": MixNixlReceiver,
    "bootstrap_server": MixNixlBootstrapServer,
}
