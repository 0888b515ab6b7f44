"""What both sides of the manager use. Defaults stand on the class, so that a manager built
piecemeal (as SGLang's own unit tests build them) behaves as stock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_device

from sglang_mixkv.config import Config, config_of
from sglang_mixkv.core.errors import MixKVError
from sglang_mixkv.core.facts import Facts
from sglang_mixkv.core.topology import Kind
from sglang_mixkv.core.wire import Grant
from sglang_mixkv.managers import facts as handshake
from sglang_mixkv.managers import kv_args as geometry
from sglang_mixkv.managers.aside import override
from sglang_mixkv.managers.kv_args import Caches
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

    # Set by MixKVManager's constructor; see aside.py.
    mixkv_ready = False

    # Decode side: room -> who sends to it. Made by DecodeGate's constructor.
    expected: dict[int, Expected]

    last_registration: list[bytes] | None = None

    @cached_property
    def peers(self) -> dict[str, Peer]:
        return {}

    next_reap = 0.0

    @cached_property
    def grants(self) -> dict[tuple[int, str], Grant]:
        return {}

    @cached_property
    def sums(self) -> dict[tuple[int, str], Sums]:
        """Prefill side: (room, session id) -> checksums of what was sent so far."""
        return {}

    @cached_property
    def open_rooms(self) -> dict[int, Sent]:
        """Prefill side: rooms with a sender, and what was sent for them."""
        return {}

    @cached_property
    def rooms_seen(self) -> dict[int, float]:
        """Prefill side: rooms whose metadata came before their sender, and when."""
        return {}

    @cached_property
    def rejected_rooms(self) -> dict[int, tuple[float, str]]:
        """Prefill side: rooms refused before their sender was made: when, and why."""
        return {}

    @cached_property
    def config(self) -> Config:
        return config_of(getattr(self, "server_args", None))

    @cached_property
    def rows(self) -> Rows:
        rows = rows_for(get_device().device, getattr(self.kv_args, "gpu_id", 0))
        return TimedRows(rows, self.stats)

    @cached_property
    def current(self) -> threading.local:
        """Prefill side: `.chunk`, what this transfer thread works on."""
        return threading.local()

    @cached_property
    def stats(self) -> Stats:
        return Stats("none")

    @cached_property
    def caches(self) -> Caches:
        return geometry.caches(self.kv_args, self.is_mla_backend, self.attn_tp_size)

    @cached_property
    def facts(self) -> Facts:
        return handshake.local_facts(self.kv_args, self.caches)

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
        waiting = getattr(self, "verifier", None)
        if waiting is not None and waiting.rooms:
            found.append(f"checksums are waited for by rooms {sorted(waiting.rooms)[:5]}")
        staging = getattr(self, "staging", None)
        if staging is not None:
            found += staging.problems()
        return found
