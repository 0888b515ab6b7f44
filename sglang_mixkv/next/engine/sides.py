"""What a rank needs of the channel, built once: slots, data plane, state machine, threads, row."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_spec

from sglang_mixkv import __version__
from sglang_mixkv.channel.data_plane import DataPlane, Memory
from sglang_mixkv.channel.messages import PROTOCOL, draw_instance
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.config import config_of
from sglang_mixkv.draft.facts import Row
from sglang_mixkv.draft.facts import Staging as StagingFacts
from sglang_mixkv.draft.rows import Staging
from sglang_mixkv.engine.releases import sglang_version
from sglang_mixkv.next.engine import draft_pool, handover
from sglang_mixkv.next.engine.notes import Notes

SLOT_BYTES = 1 << 20
PATIENCE_ENV, PORT_ENV = "SGLANG_MIXKV_PATIENCE", "SGLANG_MIXKV_PORT"


class Local:
    """This rank before it knows its own address. `draft`: None without draft KV of its own.

    Raises MixKVError for a drafter whose rows cannot be cut.
    """

    def __init__(self, kv_args: Any, server_args: Any, mode: str, backend: str) -> None:
        self.config = config_of(server_args)
        self.handed = handover.take()
        pool = self.handed.pool
        self.draft = (
            draft_pool.of_pool(kv_args, pool) if pool is not None else draft_pool.of_args(kv_args)
        )
        self.aux_item_lens = tuple(kv_args.aux_item_lens)
        self.ib_device = getattr(kv_args, "ib_device", None) or ""
        self.backend, self.mode = backend, mode
        self.times = Times(float(os.environ.get(PATIENCE_ENV) or 1))
        self.instance = draw_instance()
        self.notes = Notes(mode, self.config)

    def slots(self) -> SlotPool:
        return SlotPool(max(2, self.config.staging_mb), self.times)

    def staging(self, slots: SlotPool) -> Staging:
        assert self.draft is not None
        return Staging(slots.count, SLOT_BYTES, self.draft.rows.device, self.draft.mem_pool)

    def plane(self, staging: Staging, host: str) -> DataPlane:
        """Registered, so that its endpoint is valid."""
        plane = _plane_of(self.backend, host, self.ib_device)
        spare = staging.address + 8  # behind the stamp of slot 0, where nothing is
        plane.register(Memory(staging.address, staging.size, _index(staging.device)), spare)
        return plane

    def segment_tokens(self, heads: int, slot_bytes: int) -> int:
        assert self.draft is not None
        return self.draft.layout.facts.tokens_in(min(SLOT_BYTES, slot_bytes), heads)

    def row(
        self, manager: Any, address: str, staging: Staging | None, plane: DataPlane | None
    ) -> Row:
        """What this rank publishes, or compares with what a peer has published."""
        facts = None
        if staging is not None and plane is not None:
            device = _index(staging.device)
            facts = StagingFacts(
                plane.name, plane.endpoint, staging.address, staging.slot_bytes, staging.count,
                -1 if device is None else device,
            )  # fmt: skip
        return Row(
            protocol=PROTOCOL,
            plugin=__version__,
            engine=sglang_version(),
            instance=self.instance,
            rank_ip=manager.local_ip,
            rank_port=manager.rank_port,
            address=address,
            attn_tp=manager.attn_tp_size,
            attn_tp_rank=manager.attn_tp_rank,
            pp_rank=manager.pp_rank or 0,
            aux_item_lens=self.aux_item_lens,
            topk=get_spec().speculative_eagle_topk or 0,
            draft=self.draft.layout if self.draft else None,
            staging=facts,
        )

    def port(self, manager: Any) -> int:
        """SGLANG_MIXKV_PORT plus this rank's number on its node; 0: any free one."""
        base = int(os.environ.get(PORT_ENV) or 0)
        return base and base + int(getattr(manager.kv_args, "gpu_id", 0) or 0)


def forward_event(scheduler: Any) -> Any:
    """An event behind all that is queued on SGLang's forward stream; None without a GPU."""
    stream = getattr(scheduler, "forward_stream", None)
    if stream is None or get_device().device != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _plane_of(backend: str, host: str, devices: str) -> DataPlane:
    if backend == "nixl":
        from sglang_mixkv.channel.nixl import Nixl

        return Nixl(*_nixl_backend(devices))
    from sglang_mixkv.channel.mooncake import Mooncake

    return Mooncake(host, devices)


def _nixl_backend(devices: str) -> tuple[str, dict[str, str]]:
    """As NixlKVManager makes its agent (disaggregation/nixl/conn.py)."""
    backend = envs.SGLANG_DISAGGREGATION_NIXL_BACKEND.get()
    parameters = dict(json.loads(envs.SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS.get() or "{}"))
    if devices and backend == "UCX":
        parameters.setdefault("device_list", devices)
    return backend, parameters


def _index(device: torch.device) -> int | None:
    return (device.index or 0) if device.type == "cuda" else None
