"""SGLang's manager, for any backend, with this rank's side of the draft channel.

prefill: `prefill_channel` is made while SGLang registers the rank, since the registration carries
         the rank's row; it is None without draft KV. `aborted` notifies decode of aborts.
decode:  `decode_channel` and `servers` are made once SGLang knows this rank's address.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_mixkv.channel.messages import draws
from sglang_mixkv.decode import machine as decode_machine
from sglang_mixkv.decode.transfer import server_of
from sglang_mixkv.decode.worker import DecodeWorker
from sglang_mixkv.engine import draft_pool
from sglang_mixkv.engine.bootstrap import KEY, SIZES, DraftBootstrapServer
from sglang_mixkv.engine.prefill_http import check_sizes
from sglang_mixkv.engine.prefill_servers import PrefillServers
from sglang_mixkv.engine.rank import RankContext
from sglang_mixkv.engine.receiver import DraftReceiver
from sglang_mixkv.engine.releases import sglang_version
from sglang_mixkv.engine.sender import DraftSender
from sglang_mixkv.guards.aborts import AbortedRequests
from sglang_mixkv.guards.early_sends import EarlySends, switch_off_early_sends
from sglang_mixkv.prefill import machine as prefill_machine
from sglang_mixkv.prefill.worker import PrefillWorker
from sglang_mixkv.series import ABORTED

logger = logging.getLogger(f"sglang.{__name__}")


class DraftManager:
    """Mixed into CommonKVManager. Raises MixKVError, so that the server does not start, if the
    drafter's rows cannot be cut by heads or the channel cannot be made."""

    backend = ""
    local: RankContext
    aborted: AbortedRequests
    prefill_channel: PrefillWorker | None = None
    decode_channel: DecodeWorker
    servers: PrefillServers
    early: Any  # the event after which a chunk may be sent (EarlySends)
    _agent: Any = None  # NIXL's, with which SGLang's memory is registered
    # SGLang's
    connection_lock: Any
    connection_pool: dict[str, Any]
    enable_deferred_decode_kv_release: bool
    failure_records: dict[int, str]
    kv_args: Any
    local_ip: str
    pp_rank: int | None
    pp_size: int
    prefill_info_table: dict[str, Any]
    record_failure: Callable[[int, str], None]

    def __init__(
        self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool = False, **more: Any
    ) -> None:
        self.local = RankContext(args, server_args, mode.value, self.backend)
        draft_pool.check_appended(args, is_mla_backend)
        self.kv_status_msg_carries_reason = True  # prefill's reason reaches decode over Mooncake
        if is_prefill := mode == DisaggregationMode.PREFILL:
            self.aborted = AbortedRequests(self)
        super().__init__(args, mode, server_args, is_mla_backend, **more)  # type: ignore[call-arg]
        note = switch_off_early_sends(self, sglang_version()) if is_prefill else ""
        if mode == DisaggregationMode.DECODE:
            self._make_decode_channel()
        names = ("attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "system_dp_rank")
        is_last_stage = (self.pp_rank or 0) == (self.pp_size or 1) - 1
        stands_for_server = is_last_stage and not any(getattr(self, name) for name in names)
        level = logging.INFO if stands_for_server else logging.DEBUG
        logger.log(level, "%s%s", self.local.banner(), note)

    def register_buffer_to_engine(self) -> None:
        """Make requests cold if SGLang's memory gets a new NIXL agent. This happens when Dynamo has
        restored the process from a snapshot; no connection of the data plane works then."""
        former, self._agent = self._agent, getattr(self, "agent", None)
        channel = getattr(self, f"{self.local.mode}_channel", None)
        if channel is not None and former not in (None, self._agent):
            logger.warning(
                "[MIXKV-PAIR-06] expected the NIXL agent that SGLang started with; got another, as "
                "after a restore from a snapshot. As it is, drafters start cold. Restart the server"
            )
            channel.restored()
        super().register_buffer_to_engine()  # type: ignore[misc]

    # -- prefill

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        local, address = self.local, ""
        if (store := local.store(self.local_ip)) is not None:
            machine = prefill_machine.Machine(
                local.instance, store.rows.heads, local.segment_tokens, local.slots, local.times,
                draws().__next__,
            )  # fmt: skip
            self.prefill_channel = PrefillWorker(
                machine, store, local.times, local.reporter, self.local_ip, local.port
            )
            address = self.prefill_channel.address
        row = msgspec.to_builtins(local.row(self, address, store))
        super()._register_topology_row(url, {**payload, KEY: row})  # type: ignore[misc]

    # -- decode

    def _make_decode_channel(self) -> None:
        local, store = self.local, self.local.store(self.local_ip)
        machine = decode_machine.Machine(local.instance, local.slots, local.slot_bytes, local.times)
        self.decode_channel = DecodeWorker(
            machine,
            store,
            local.times,
            local.reporter,
            forget_peer=lambda peer: servers.forget(server_of(peer)),
            check_peer=lambda peer: servers.check(server_of(peer)),
        )
        self.servers = servers = PrefillServers(self, local.row(self, "", store))
        local.reporter.breaker, local.reporter.name_of = machine.breaker, server_of

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        return self.servers.ensure(bootstrap_addr)

    def resolve(self, address: str) -> Any:
        """Return SGLang's entry for a server, in any thread. SGLang adds the entry to the table
        of a copy of the manager, since the scheduler treats servers in the real table as ready."""
        asking = copy.copy(self)
        asking.prefill_info_table = {}
        super(DraftManager, asking).try_ensure_parallel_info(address)  # type: ignore[misc]
        return asking.prefill_info_table.get(address)

    def _resolve_rank_mapping(self, info: Any) -> None:
        """Refuse a server that claims to have too many ranks, before SGLang lists them."""
        check_sizes([getattr(info, name) for name in SIZES])
        super()._resolve_rank_mapping(info)  # type: ignore[misc]

    def apply_prefill_status(self, *, failure_reason: str | None = None, **status: Any) -> None:
        """Ignore an abort on prefill if deferred release is off: the pages would be freed while
        SGLang may still write to them, and the bytes could land in another request's pages."""
        if failure_reason == ABORTED and not self.enable_deferred_decode_kv_release:
            return
        super().apply_prefill_status(failure_reason=failure_reason, **status)  # type: ignore[misc]


MIXINS = {
    "manager": DraftManager,
    "sender": DraftSender,
    "receiver": DraftReceiver,
    "bootstrap_server": DraftBootstrapServer,
}


@cache
def mixed(stock: type, backend: str, kind: str) -> type:
    """Return the result of get_kv_class: SGLang's class, for any backend, with its mixin. The class
    stays stock for a kind without a mixin, and for `fake`, the backend of warm-up requests."""
    mixin = MIXINS.get(kind)
    if mixin is None or backend == "fake":
        return stock
    body = {"__module__": mixin.__module__, "backend": backend}
    guards = (EarlySends,) if (backend, kind) == ("nixl", "manager") else ()
    return type(f"Draft{stock.__name__}", (*guards, mixin, stock), body)
