"""Settings that few cases of the ring use, and what the processes of a running case share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, int]  # side, rank
Inject = Callable[[Any], None]


@dataclass
class Special:
    """`faults`, `before`: called in a rank's process with the Rank, after its manager runs and
    before it is made."""

    faults: Mapping[Key, Inject] = field(default_factory=dict)
    before: Mapping[Key, Inject] = field(default_factory=dict)
    send: Callable[..., Any] | None = None  # hands a chunk to SGLang's sender
    rooms: Sequence[int] = ()  # the requests' numbers
    pause: float = 0.0  # seconds between rounds
    stock_ranks: Collection[Key] = ()  # that have not opted in
    hosts: Mapping[str, str] = field(default_factory=dict)  # by side
    ib_devices: Mapping[str, str] = field(default_factory=dict)  # by side, as SGLang's argument
    metrics: bool = True
    draft_args: Mapping[str, str] = field(default_factory=dict)  # by side (Memory.draft_args)
    draft_on: Mapping[str, bool] = field(default_factory=dict)  # by side
    draft_is_state: bool = False  # a drafter whose KV is SGLang's state alone
    draft_stays: bool = False  # no draft KV arrives
    surplus: Mapping[str, int] = field(default_factory=dict)  # by side (model.surplus_pages)
    stage_layers: Sequence[int] = ()  # of the target, of each of prefill's stages
    failed_rooms_stay_clean: bool = False
    state_dtype: str = "float32"  # of a hybrid target's larger states, torch's name


@dataclass
class Shared:
    """`injected`: a barrier of all ranks. `pp_groups`: by rank of a stage."""

    bootstrap_up: Sequence[Any] = ()  # by prefill server
    all_sent: Any = None
    injected: Any = None
    pp_groups: Mapping[int, Any] = field(default_factory=dict)
