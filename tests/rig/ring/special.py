"""Settings that few cases of the ring use, and objects shared by the processes of a case."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, int]  # side, rank
Inject = Callable[[Any], None]


@dataclass
class Special:
    """Settings that few cases use. `before` and `faults` are called with the Rank in its process:
    `before` before its manager is made, `faults` afterwards."""

    faults: Mapping[Key, Inject] = field(default_factory=dict)
    before: Mapping[Key, Inject] = field(default_factory=dict)
    send: Callable[..., Any] | None = None  # passes a chunk to SGLang's sender
    rooms: Sequence[int] = ()  # the requests' room numbers
    pause: float = 0.0  # seconds between rounds
    stock_ranks: Collection[Key] = ()  # ranks that have not opted in
    hosts: Mapping[str, str] = field(default_factory=dict)  # by side
    ib_devices: Mapping[str, str] = field(default_factory=dict)  # by side, as SGLang's argument
    metrics: bool = True
    draft_args: Mapping[str, str] = field(default_factory=dict)  # by side (Memory.draft_args)
    draft_on: Mapping[str, bool] = field(default_factory=dict)  # by side
    draft_is_state: bool = False  # a drafter whose KV SGLang sends as state only
    draft_stays: bool = False  # no draft KV arrives
    surplus: Mapping[str, int] = field(default_factory=dict)  # by side (model.surplus_pages)
    stage_layers: Sequence[int] = ()  # the target's layers on each prefill stage
    failed_rooms_stay_clean: bool = False
    state_dtype: str = "float32"  # torch's dtype of a hybrid target's temporal state


@dataclass
class Shared:
    """Objects shared by a case's processes. `injected`: a barrier for all ranks. `pp_groups`: by
    rank within a stage."""

    bootstrap_up: Sequence[Any] = ()  # by prefill server
    all_sent: Any = None
    injected: Any = None
    pp_groups: Mapping[int, Any] = field(default_factory=dict)
