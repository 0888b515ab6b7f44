"""What a prefill rank sent for one room, for SGLang's own sglang:kv_transfer_* series.

Stock multiplies a page of this rank's pools, the drafter's included, by the number of decode
ranks (CommonKVSender.get_transfer_metric). That is right for rows that every decode rank gets
whole; a sharded drafter's heads go out once, and a rank that sends heads only sends no target.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_mixkv.prefill.peer import Peer
from sglang_mixkv.prefill.writer import Written


@dataclass
class Sent:
    """One room's bytes; written by its transfer thread, read when it has concluded.

    `state_to`: sessions of the peers that get model state from this rank.
    """

    bytes: int = 0
    state_to: set[str] = field(default_factory=set)

    def add(self, peer: Peer, written: Written) -> None:
        self.bytes += written.target_bytes + written.draft_bytes
        if peer.route.sends_state:
            self.state_to.add(peer.session)

    def total(self, state_bytes: int, *, sharded: bool) -> int:
        """With `state_bytes` of model state: cut between the peers (sharded), or a copy each."""
        copies = len(self.state_to)
        return self.bytes + state_bytes * (min(1, copies) if sharded else copies)
