"""The KV manager: SGLang's own, with this rank's side beside it.

A process has one side, a prefill rank or a decode rank. Overrides translate what SGLang hands
over and ask the side; they decide nothing. Those of CommonKVManager stand here, what transfer
threads do in transfers.py, and what only one backend has in its own module (mooncake.py, nixl.py).

SGLang's unit tests, and tools, build managers piecemeal (`__new__`, mocks). Such a manager has
no side, and every override then does what SGLang's method does.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo
from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_mixkv.decode.background import Background
from sglang_mixkv.decode.rank import DecodeRank
from sglang_mixkv.decode.source import Sizes
from sglang_mixkv.decode.sources import Next
from sglang_mixkv.engine import handshake, sides
from sglang_mixkv.engine.banner import banner, speaks
from sglang_mixkv.engine.farewell import Farewells
from sglang_mixkv.errors import MixKVError, refuse
from sglang_mixkv.prefill.rank import PrefillRank
from sglang_mixkv.protocol.announcement import announcement

logger = logging.getLogger(__name__)


class SidedManager(CommonKVManager):
    """`prefill`, `decode`: the one of them that this process is; None without a side. `backend`:
    SGLang's name of the transfer backend. `has_dcp_with_draft`: it sends a drafter's KV to decode
    ranks that are DCP ranks."""

    backend = ""
    has_dcp_with_draft = False
    prefill: PrefillRank | None = None
    decode: DecodeRank | None = None

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False
    ) -> None:
        """Raises MixKVError, and the server does not start, for a drafter that cannot be cut
        into heads, and where rows cannot be copied on this rank's device. The side comes first:
        SGLang's constructor registers this rank and starts its threads."""
        # What SGLang's methods do not carry on: `worker`, of a transfer thread, and `resolving`,
        # from _resolve to _resolve_rank_mapping, of the thread that asks a prefill server.
        self._thread = threading.local()
        rank = sides.Rank(self, args, server_args, disaggregation_mode.value, is_mla_backend)
        rank.rows.warm_up()
        if disaggregation_mode == DisaggregationMode.PREFILL:
            self.prefill = rank.prefill()
        else:
            self.decode = rank.decode()
            self._background = Background()
            self._farewells = Farewells(self._background)
        # A prefill's reason for a failure travels to the decode side; stock parses it too.
        self.kv_status_msg_carries_reason = True
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        level = logging.INFO if speaks(self) else logging.DEBUG
        logger.log(level, "%s", banner(self))

    @property
    def side(self) -> PrefillRank | DecodeRank | None:
        return self.prefill or self.decode

    def may_pass(self, message: list[bytes]) -> bool:
        """Whether SGLang may read this control message. An exception would end its thread."""
        side = self.side
        assert side is not None
        try:
            return side.gate.may_pass(message)
        except MixKVError as error:
            logger.warning("sglang-mixkv drops a message: %s", error)
        except Exception:
            logger.exception("[MIXKV-SELF-01] sglang-mixkv drops a message that it could not check")
        side.stats.add(messages_dropped=1)
        return False

    def check_status(self, bootstrap_room: int) -> Any:
        """As stock; a room that is gone has failed. Stock's transfer thread asks after it looked
        whether the room is there, and ends with a KeyError if it was cleared in between."""
        if self.side is None:
            return super().check_status(bootstrap_room)
        return self.request_status.get(bootstrap_room, KVPoll.Failed)

    def conclude_transfer(self, **kwargs: Any) -> Any:
        status = super().conclude_transfer(**kwargs)
        if self.side is not None:
            self.side.stats.publish()
        return status

    def takes_back(self, session: str) -> bool:
        """Whether a peer that a write failed to is there all the same, and is to be served."""
        raise NotImplementedError

    # -- a prefill rank introduces itself

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        """As stock, with this rank's facts in the row; then see that somebody keeps them."""
        if self.prefill is None:
            super()._register_topology_row(url, payload)
            return
        row = {**payload, handshake.KEY: announcement(self.prefill.local.facts)}
        super()._register_topology_row(url, row)
        handshake.check_is_kept(url)

    def _room_notify_targets(self, bootstrap_room: int) -> list[tuple[str, int]]:
        """As stock, of the room here: SGLang's table gets a decode rank a moment later."""
        if self.prefill is None:
            return list(super()._room_notify_targets(bootstrap_room))
        room = self.prefill.rooms.get(bootstrap_room)
        return room.served() if room is not None else []

    # -- a decode rank learns of prefill servers, in the scheduler

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """As stock, once per prefill server. One that does not fit is kept with a reason; it is
        asked again outside of the scheduler's loop, and not known meanwhile."""
        side = self.decode
        if side is None:
            return bool(super().try_ensure_parallel_info(bootstrap_addr))
        if bootstrap_addr in self.prefill_info_table:
            return True
        step = side.sources.next(bootstrap_addr)
        if step is Next.RESOLVE:
            return self._ask(side, bootstrap_addr)
        if step is Next.REFUSE:
            self.prefill_info_table[bootstrap_addr] = _stand_in()
        elif step is Next.ASK and not self._background.submit(
            self._ask_again, side, bootstrap_addr
        ):
            side.sources.asked(bootstrap_addr)
        return step is Next.REFUSE

    def _ask(self, side: DecodeRank, address: str) -> bool:
        """Resolve a prefill server that nothing is known of. Whether that is done."""
        try:
            return self._resolve(side, address)
        except Exception as error:
            side.sources.refuse(address, error)
            return self.try_ensure_parallel_info(address)

    def _ask_again(self, side: DecodeRank, address: str) -> None:
        """Resolve a refused server: it may have been restarted."""
        error: Exception | None = None
        try:
            self._resolve(side, address)
        except Exception as found:
            error = found
        side.sources.asked(address, error)

    def _resolve(self, side: DecodeRank, address: str) -> bool:
        """Whether the server could be asked. Raises why it does not fit."""
        facts = handshake.fetch(address)
        if facts is None:
            return False
        self._thread.resolving = address, facts, side.is_cold(address, facts)
        return bool(super().try_ensure_parallel_info(address))

    def _resolve_rank_mapping(self, info: PrefillServerInfo) -> None:
        """As stock, for sizes that a server can have. Stock publishes `info` next: its Source is
        there before."""
        side = self.decode
        if side is None:
            super()._resolve_rank_mapping(info)
            return
        sizes = Sizes(info.attn_tp_size, info.attn_cp_size, info.dp_size, info.pp_size)
        sizes.check(with_draft=side.local.has_draft)
        super()._resolve_rank_mapping(info)
        address, facts, cold = self._thread.resolving
        source = side.learn(address, sizes, facts, cold=cold)
        if side.local.has_draft:
            info.required_prefill_response_num = source.required

    def check_is_the_same(self, address: str) -> None:
        """A prefill server that was resolved before, and of which SGLang asks addresses now. Raises
        MixKVError where another was started in its place, which SGLang knows only if its heartbeat
        failed meanwhile; the next request resolves that one."""
        side = self.decode
        known = side.sources.get(address) if side is not None else None
        if side is None or known is None or side.sources.is_current(address):
            return
        self.prefill_info_table.pop(address, None)
        try:
            answers = self._resolve(side, address)
        except Exception as error:
            side.sources.refuse(address, error)
            self._handle_node_failure(address)
            raise
        if not answers:
            raise MixKVError("MIXKV-MSG-02", f"prefill server {address} does not answer.")
        now = side.sources.get(address)
        if now is None or (now.facts, now.sizes) != (known.facts, known.sizes):
            self._handle_node_failure(address)
            raise refuse(
                "MIXKV-PAIR-03",
                f"prefill server {address} as it was resolved",
                "another in its place",
                "KV would be sent as that one's was",
                "Send the request again: it resolves this one",
            )

    def dismiss(self, address: str, room: int, dp_rank: int) -> None:
        """Let a prefill server's half of a refused request end now rather than by timeout. The
        stand-in of a refused server goes, so that the next request may have it asked."""
        assert self.decode is not None
        if self.decode.sources.is_refused(address):
            self.prefill_info_table.pop(address, None)
        self._farewells.tell(address, room, dp_rank)

    # -- a decode rank lands rooms, in SGLang's decode thread

    def update_status(self, bootstrap_room: int, status: Any) -> None:
        """As stock; before a room succeeds, its slices land and its KV is verified."""
        if self.decode is not None and status == KVPoll.Success:
            problem = self.decode.land(bootstrap_room)
            if problem is not None:
                logger.error("sglang-mixkv fails room %s: %s", bootstrap_room, problem)
                self.record_failure(bootstrap_room, f"sglang-mixkv: {problem}")
                status = KVPoll.Failed
        super().update_status(bootstrap_room, status)

    def note_abort_ack(self, bootstrap_room: int, prefill_rank: int, generation: int) -> None:
        """As stock; what a failed room held is free once all ranks have acknowledged."""
        super().note_abort_ack(bootstrap_room, prefill_rank, generation)
        if self.decode is not None:
            self.decode.drained(bootstrap_room)

    # -- what must hold

    def check_integrity(self) -> list[str]:
        """What is wrong with an idle manager: dead threads, and anything left of a room.

        For tests, and for production when no request is running. Empty when all is well.
        """
        found = [f"thread {t.name} has ended" for t in self._worker_threads if not t.is_alive()]
        found += self.side.problems() if self.side is not None else []
        for name in (
            "request_status", "transfer_infos", "req_to_decode_prefix_len", "failure_records",
            "prefill_response_tracker", "required_prefill_response_num_table",
        ):  # fmt: skip
            left = getattr(self, name, None)
            if isinstance(left, dict) and left:
                found.append(f"{name} holds {sorted(left, key=str)[:5]}")
        return found


def _stand_in() -> PrefillServerInfo:
    """In the place of a refused server's sizes, so that SGLang resolves its requests without
    asking it anything: with one DP rank the number of that is known."""
    return PrefillServerInfo(
        attn_tp_size=1, attn_cp_size=1, dp_size=1, pp_size=1, page_size=None,
        kv_cache_dtype=None, follow_bootstrap_room=True,
    )  # fmt: skip
