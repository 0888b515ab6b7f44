"""What both sides of the manager use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_device, get_parallel

from sglang_mixkv.config import config_of
from sglang_mixkv.core.errors import MixKVError
from sglang_mixkv.core.topology import Kind
from sglang_mixkv.core.wire import Grant
from sglang_mixkv.managers import facts as handshake
from sglang_mixkv.managers import kv_args as geometry
from sglang_mixkv.managers.aside import override
from sglang_mixkv.managers.metrics import metrics_for
from sglang_mixkv.managers.peer import Peer
from sglang_mixkv.managers.sent import Sent
from sglang_mixkv.managers.staging import rows_for
from sglang_mixkv.managers.stats import Stats, TimedRows
from sglang_mixkv.transfer.digest import Sums
from sglang_mixkv.transfer.rows import Rows

logger = logging.getLogger(__name__)

Recv = Callable[[], list[bytes] | None]


@dataclass
class Expected:
    """What a decode rank expects for a room, by stock's unique numbers of prefill ranks.

    `senders`: whose success counts; `contacted`: who may say that it failed; `aux_row`: where
    the room's aux data may be written to.
    """

    senders: frozenset[int]
    contacted: frozenset[int]
    aux_row: int | None = None


class Shared(MooncakeKVManager):
    """State and derived values of one rank's manager."""

    mixkv_ready = False  # until the constructor has made all state; see aside.py
    last_registration: list[bytes] | None = None
    next_reap = 0.0

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False
    ) -> None:
        """Everything that threads share is made here, before SGLang's constructor starts them.

        `grants`, `sums`: by room and session id. `open_rooms`: with a sender; `rooms_seen`: when
        their metadata came before it; `rejected_rooms`: when they were refused before it, and
        why. `expected`: who sends to a room. `refusals`: bootstrap address -> why that prefill
        server is not used.
        """
        side = disaggregation_mode.value
        self.config = config_of(server_args)
        self.stats = Stats(side, self.config.stats_dir, metrics_for(side))
        self.caches = geometry.caches(args, is_mla_backend, get_parallel().attn_tp_size)
        self.facts = handshake.local_facts(args, self.caches)
        rows = rows_for(get_device().device, getattr(args, "gpu_id", 0))
        self.rows: Rows = TimedRows(rows, self.stats)
        self.peers: dict[str, Peer] = {}
        self.grants: dict[tuple[int, str], Grant] = {}
        self.sums: dict[tuple[int, str], Sums] = {}
        self.open_rooms: dict[int, Sent] = {}
        self.rooms_seen: dict[int, float] = {}
        self.rejected_rooms: dict[int, tuple[float, str]] = {}
        self.expected: dict[int, Expected] = {}
        self.refusals: dict[str, str] = {}
        self.mixkv_ready = True
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)

    @property
    def sharded_state(self) -> bool:
        """State that every contacted rank sends: stock's rule for hybrid MLA and MHA targets."""
        types: list[Any] = getattr(self.kv_args, "state_types", [])
        replicated = self.is_mla_backend and not self.is_hybrid_mla_backend
        return bool(types) and not replicated

    @property
    def target_kind(self) -> Kind:
        return self.caches.target.component.spread.kind

    @override(MooncakeKVManager)
    def _make_worker_recv(self, socket: Any, timeout_ms: int = 500) -> Recv:
        """Stock's receive of both control threads, giving only messages that stock may read."""
        recv: Recv = super()._make_worker_recv(socket, timeout_ms)
        prefill = self.disaggregation_mode == DisaggregationMode.PREFILL
        check = self._check_prefill if prefill else self._check_decode

        def checked() -> list[bytes] | None:
            frames = recv()
            return frames if frames and self._may_pass(check, frames) else None

        return checked

    def _may_pass(self, check: Callable[[list[bytes]], bool], frames: list[bytes]) -> bool:
        """Whether stock may read this message. An exception would end SGLang's thread: none."""
        try:
            return check(frames)
        except MixKVError as error:
            logger.warning("sglang-mixkv drops a message: %s", error)
        except Exception:
            logger.exception("sglang-mixkv drops a message that it could not check")
        self.stats.add(messages_dropped=1)
        return False

    def _check_prefill(self, frames: list[bytes]) -> bool:
        raise NotImplementedError

    def _check_decode(self, frames: list[bytes]) -> bool:
        raise NotImplementedError

    def check_integrity(self) -> list[str]:
        """What is wrong with an idle manager: dead threads, and anything left of a room.

        For tests, and for production when no request is running. Empty when all is well.
        """
        found = [f"thread {t.name} has ended" for t in self._worker_threads if not t.is_alive()]
        tables = (
            "request_status",
            "transfer_infos",
            "req_to_decode_prefix_len",
            "prefill_response_tracker",
            "required_prefill_response_num_table",
            "grants",
            "sums",
            "open_rooms",
            "rooms_seen",
            "expected",
            "failure_records",
        )
        for name in tables:
            left = getattr(self, name, None)
            if isinstance(left, (dict, set)) and left:
                found.append(f"{name} holds {sorted(left, key=str)[:5]}")
        waiting = vars(self).get("verifier")
        if waiting is not None and waiting.rooms:
            found.append(f"checksums are waited for by rooms {sorted(waiting.rooms)[:5]}")
        staging = getattr(self, "staging", None)
        if staging is not None:
            found += staging.problems()
        return found
