"""One prefill server as a decode rank sees it: worked out when it is resolved, frozen after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_mixkv.core.geometry import Shard
from sglang_mixkv.core.routes import Route
from sglang_mixkv.managers.shared import Expected
from sglang_mixkv.managers.staging import Sender, Slices


@dataclass(frozen=True)
class Source:
    """What holds for all requests from that server.

    `routes`: this rank's table, by (prefill rank, stage). `contacted`: stock's unique numbers of
    these ranks; `senders`, `kv_senders`: of those that send anything, and KV. `stages`: pipeline
    stages that are contacted. `draft`: the drafter as far as that server's KV serves it; `slices`:
    the target's and the drafter's heads, None without that. `draft_window`: tokens that the
    drafter can reach, 0: all. `cold`: no draft KV comes. `verify`: its KV is compared. `extents`:
    it can write by extent. `page_bytes`: of the target's and of the drafter's pages.
    """

    routes: Mapping[Sender, Route]
    stages: tuple[int, ...]
    contacted: frozenset[int]
    senders: frozenset[int]
    kv_senders: Mapping[int, Route]
    draft: Shard | None
    slices: tuple[Slices, Slices] | None
    draft_window: int
    cold: bool
    verify: bool
    extents: bool
    page_bytes: tuple[int, int]

    def expected(self) -> Expected:
        """Who answers for one of its rooms."""
        return Expected(self.senders, self.contacted)


def unique_number(route: Route, pp_size: int) -> int:
    """Stock's CommonKVManager._prefill_unique_rank, without context parallelism."""
    return route.prefill_rank * pp_size + route.stage
