"""What SGLang's backends have in common on a prefill rank: chunks from the scheduler to the
transfer threads, and what follows the last one.

Each backend's own module says which of SGLang's methods send what (mooncake.py, nixl.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sglang.srt.utils.network import NetworkAddress

from sglang_mixkv.engine.manager import SidedManager
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.kv.ranges import Blocks, row_blocks
from sglang_mixkv.prefill.rank import PrefillRank
from sglang_mixkv.prefill.rooms import Room
from sglang_mixkv.prefill.worker import Task, Worker
from sglang_mixkv.protocol.extension import encode

logger = logging.getLogger(__name__)


class Ended(dict[str, Any]):
    """The decode ranks of a room that has ended: none, and none of them is the last."""

    def __missing__(self, session: str) -> Any:
        return SimpleNamespace(required_dst_info_num=-1)


class TransferInfos(dict[int, Any]):
    """SGLang's table of decode ranks by room. Its control thread looks a room up several times
    while it reads metadata, and would end with a KeyError when the scheduler clears the room in
    between."""

    def __missing__(self, room: int) -> dict[str, Any]:
        return Ended()


@dataclass(frozen=True)
class Queued:
    """A chunk in SGLang's transfer queue. `room`: whose it is, whoever has the number when a thread
    takes it. `written`: what it waits for where SGLang's own thread does not."""

    chunk: Any
    room: Room
    written: Any = None


class SchedulerQueue:
    """SGLang's transfer queue as the scheduler sees it. `queued`: what a chunk is put in."""

    def __init__(self, queue: Any, queued: Callable[[Any], Queued]) -> None:
        self._queue, self._queued = queue, queued

    def put(self, chunk: Any) -> None:
        self._queue.put(None if chunk is None else self._queued(chunk))


class WorkerQueue:
    """SGLang's transfer queue as a thread sees it: what it takes is what its worker works on.
    Chunks of a request that has ended are passed over. SGLang looks for its number alone."""

    def __init__(self, queue: Any, worker: Worker) -> None:
        self._queue, self._worker = queue, worker

    def get(self) -> Any:
        self._worker.rest()
        while (queued := self._queue.get()) is not None:
            start = queued.chunk.index_slice.start or 0
            if self._worker.take(Task(queued.room, start, queued.written)):
                return queued.chunk
        return None


class TransferringManager(SidedManager):
    """A manager whose transfer threads have a Worker each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.prefill is not None:
            queues = [SchedulerQueue(queue, self._queued) for queue in self.transfer_queues]
            self.transfer_queues: list[Any] = queues

    def _queued(self, chunk: Any) -> Queued:
        room, written = self._thread.adding
        return Queued(chunk, room, written)

    def make_worker(self, side: PrefillRank, most_pages: int) -> Worker:
        """For the transfer thread that calls this. `most_pages`: see ChunkWriter."""
        threads = max(1, len(self.transfer_queues))
        self._thread.worker = worker = side.worker(threads, most_pages)
        return worker

    @property
    def _worker(self) -> Worker | None:
        """This thread's. SGLang passes no room to send_kvcache, so its chunk is kept per
        thread; a side that finds none refuses the chunk."""
        worker: Worker | None = getattr(self._thread, "worker", None)
        return worker

    def add_transfer_request(
        self, bootstrap_room: int, kv_indices: Any, index_slice: slice, is_last_chunk: bool,
        aux_index: int | None = None, state_indices: Any = None, num_kv_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Without lookahead pages; a chunk that does not line up fails its room."""
        if self.prefill is not None:
            room = self.prefill.rooms.open_room(bootstrap_room)
            if room is None:
                return
            try:
                count = self.prefill.pages_to_send(
                    room, len(kv_indices), index_slice.start, num_kv_tokens, last=is_last_chunk
                )
            except MixKVError as error:
                reason = f"sglang-mixkv refuses to send room {bootstrap_room}: {error}"
                self.prefill.fail(room, reason)
                return
            self._thread.adding = room, self.waits_for(kwargs.get("wait_event"))
            if count < len(kv_indices):
                kv_indices = kv_indices[:count]
                index_slice = slice(index_slice.start, index_slice.start + count)
        super().add_transfer_request(
            bootstrap_room, kv_indices, index_slice, is_last_chunk, aux_index, state_indices,
            num_kv_tokens, **kwargs,
        )  # fmt: skip

    def waits_for(self, event: Any) -> Any:
        """What this backend's own thread does not wait for, of a chunk with this event."""
        return None

    def send_digest(self, side: PrefillRank, session: str, room: Room) -> None:
        """To a decode rank that asked for checksums; it fails the request if they are lost."""
        peer = side.peers.get(session) if side.verifies(session) else None
        digest = side.digest(session, room, self._prefill_unique_rank()) if peer else None
        if peer is None or digest is None:
            return
        address = NetworkAddress(peer.address.endpoint, peer.address.port)
        try:
            self._send_multipart_locked(address.to_tcp(), [encode(digest)], is_ipv6=address.is_ipv6)
        except Exception as error:
            logger.warning(
                "[MIXKV-MSG-02] sglang-mixkv: no checksums to %s: %s", address.to_tcp(), error
            )

    def aux_blocks(
        self, row: int, dst_ptrs: list[int], dst_row: int, left_out: tuple[int, ...]
    ) -> Blocks:
        """Ranges for one row of metadata without these of its buffers, whose length may differ
        on the decode side."""
        lens, ptrs = self.kv_args.aux_item_lens, self.kv_args.aux_data_ptrs
        kept = [i for i in range(len(lens)) if i not in left_out]
        return row_blocks(
            [ptrs[i] for i in kept], [dst_ptrs[i] for i in kept], [lens[i] for i in kept],
            row, dst_row,
        )  # fmt: skip

    def _init_dcp_pack_buffers_once(self, dcp_size: int, *, include_draft: bool = False) -> None:
        """As stock, with no room for a drafter, which goes by the peer's plan; without the memory,
        each token is sent as a range of its own."""
        try:
            room_for_draft = include_draft and self.side is None
            super()._init_dcp_pack_buffers_once(dcp_size, include_draft=room_for_draft)
        except Exception:
            if self.side is None:
                raise
            logger.warning(
                "[MIXKV-MEM-01] sglang-mixkv: no buffers to pack for decode context parallelism",
                exc_info=True,
            )
            self._dcp_pack_buffers: list[Any] | None = []
