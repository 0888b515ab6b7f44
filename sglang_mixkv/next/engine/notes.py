"""Where the state machines' notes go: counters, and one log line per peer and kind."""

from __future__ import annotations

import logging
from typing import Any

from sglang_mixkv.engine.metrics import metrics_for
from sglang_mixkv.stats import Stats

logger = logging.getLogger(__name__)

MAX_LOGGED = 1024  # pairs of peer and kind; beyond them nothing new is logged
QUIET = ("warm", "cold", "closed", "early", "doubled", "unknown_ack", "aborted")  # counted only


class Notes:
    """Called by the channel's thread. Never raises."""

    def __init__(self, mode: str, config: Any) -> None:
        self.stats = Stats(mode, config.stats_dir, metrics_for(mode))
        self._bytes = "draft_bytes_sent" if mode == "prefill" else "draft_bytes_needed"
        self._logged: set[tuple[str, bytes]] = set()

    def __call__(self, note: Any) -> None:
        peer = getattr(note, "peer", b"") or getattr(note, "reader", b"")
        self.stats.add(**{f"channel_{note.what}": 1})
        if note.what in QUIET or (note.what, peer) in self._logged:
            return
        if len(self._logged) < MAX_LOGGED:
            self._logged.add((note.what, peer))
            logger.warning(
                "[MIXKV-PAIR-06] draft KV: %s (%s), peer %s. From now on counted, not logged",
                note.what, note.detail or "no detail", peer.hex() or "-",
            )  # fmt: skip

    def moved(self, size: int) -> None:
        """Bytes of draft KV that were packed here, or are in place here."""
        self.stats.add(**{self._bytes: size})

    def publish(self) -> None:
        self.stats.publish()
