"""One rank of either side: its drafter, what its channel is made of, and the facts it publishes."""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    get_ib_devices_for_gpu,
)
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_spec

from sglang_mixkv import __version__
from sglang_mixkv.channel import planes
from sglang_mixkv.channel.data_plane import DataPlane, Memory
from sglang_mixkv.channel.messages import PROTOCOL, draw_instance
from sglang_mixkv.channel.slots import SLOTS, SlotPool, slot_bytes
from sglang_mixkv.channel.times import Times
from sglang_mixkv.config import config_of
from sglang_mixkv.draft.facts import Row, StagingFacts
from sglang_mixkv.draft.layout import DraftLayout
from sglang_mixkv.draft.rows import Staging
from sglang_mixkv.draft.slot_format import SPARE
from sglang_mixkv.draft.targets import Target
from sglang_mixkv.engine import draft_pool, handover
from sglang_mixkv.engine.metrics import reporter
from sglang_mixkv.engine.releases import check_once, sglang_version
from sglang_mixkv.errors import refuse


class RankContext:
    """What the manager builds its channel of. `draft`: None on a rank without draft KV of its own.

    Raises MixKVError for a drafter whose rows cannot be cut, or do not fit a slot.
    """

    def __init__(self, kv_args: Any, server_args: Any, mode: str, backend: str) -> None:
        self.config = config_of(server_args)
        if self.config.enabled:
            check_once(server_args)
        self.handed = handover.take()
        pool = self.handed.pool
        self.draft = draft_pool.of_pool(pool) if pool is not None else draft_pool.of_args(kv_args)
        if self.draft is not None:
            check_slots(self.draft.layout, self.slot_bytes)
        self.aux_item_lens = tuple(kv_args.aux_item_lens)
        self.kv_args = kv_args
        self.backend, self.mode = backend, mode
        self.choice = planes.choose(backend, self.config.data_plane)
        self.times = times(self.config.patience)
        self.instance = draw_instance()
        self.copying = "copied on the host"
        self.reporter = reporter(mode)

    def slots(self) -> SlotPool:
        self.reporter.slots = SlotPool(SLOTS, self.times)
        return self.reporter.slots

    @property
    def slot_bytes(self) -> int:
        return slot_bytes(self.config.staging_mb)

    def staging(self, slots: SlotPool) -> Staging:
        assert self.draft is not None
        return Staging(slots.count, self.slot_bytes, self.draft.rows.device, self.draft.mem_pool)

    def device(self, staging: Staging) -> Any:
        """GpuRows where kernels copy; None where a thread does. `copying` says so and why."""
        assert self.draft is not None
        if self.draft.rows.device.type != "cuda":
            return None
        from sglang_mixkv.draft.rows_gpu import gpu_rows

        found = gpu_rows(self.draft.rows, self.draft.page_size, staging)
        self.copying = f"copied by torch ({found})" if isinstance(found, str) else "kernels"
        return None if isinstance(found, str) else found

    def plane(self, staging: Staging, host: str) -> DataPlane:
        """Registered, so that its endpoint is valid."""
        devices = rdma_devices(self.kv_args)
        plane = planes.make(self.choice.name, host, devices, self.config.nixl_params)
        memory = Memory(staging.address, staging.size, _index(staging.device))
        plane.register(memory, staging.address + SPARE)  # of slot 0
        return plane

    def segment_tokens(self, heads: int, slot_bytes: int) -> int:
        assert self.draft is not None
        return self.draft.layout.facts.tokens_in(min(self.slot_bytes, slot_bytes), heads)

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
            backend=self.backend,
            target=_target(manager),
            topk=get_spec().speculative_eagle_topk or 0,
            draft=self.draft.layout if self.draft else None,
            staging=facts,
            patience=self.config.patience,
        )

    def port(self, manager: Any) -> int:
        """The operator's port plus this rank's GPU on its node; 0: any free one."""
        base = self.config.port
        return base and base + int(getattr(manager.kv_args, "gpu_id", 0) or 0)


def rdma_devices(kv_args: Any) -> str:
    """This rank's RDMA devices, joined by commas: --disaggregation-ib-device may name them by GPU,
    as JSON or in a file. Without RDMA SGLang does not look at it (MooncakeTransferEngine.__init__).
    """
    if os.environ.get("MC_FORCE_TCP") == "1":
        return ""
    given = getattr(kv_args, "ib_device", None)
    return get_ib_devices_for_gpu(given, int(getattr(kv_args, "gpu_id", 0) or 0)) or ""


def times(patience: float) -> Times:
    """SGLang's own DeferredBootstrap knows a request that is not here yet for as long
    (disaggregation/common/conn.py, CommonKVManager.__init__)."""
    waiting = envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()
    bootstrap = envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()
    return Times(patience, float(waiting + bootstrap))


def check_slots(layout: DraftLayout, size: int) -> None:
    """What one rank sends another is less than a token of either's heads, so where this fits the
    slots of both, every request can be served."""
    heads = len(layout.heads)
    if not layout.facts.tokens_in(size, heads):
        fits = (mb for mb in itertools.count(1) if layout.facts.tokens_in(slot_bytes(mb), heads))
        raise refuse(
            "MIXKV-START-04", f"--mixkv-staging-mb to be {next(fits)} or more",
            f"slots of {size} bytes for tokens of {layout.facts.bytes_per_token(heads)}",
            "every request would start with a cold drafter", "Raise it on both sides",
        )  # fmt: skip


def forward_event(scheduler: Any) -> Any:
    """An event behind all that is queued on SGLang's forward stream; None without a GPU."""
    stream = getattr(scheduler, "forward_stream", None)
    if not isinstance(stream, torch.cuda.Stream):
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _target(manager: Any) -> Target:
    """From the KV args, which have the target and, behind it, a drafter that SGLang moves."""
    args = manager.kv_args
    lens = list(args.kv_item_lens)
    lens = lens[: len(lens) - (getattr(args, "num_draft_entries", 0) or 0)]
    mla, half = manager.is_mla_backend or manager.is_hybrid_mla_backend, len(lens) // 2
    heads = getattr(args, "total_kv_head_num", 1)  # decode has it with SGLang's staging alone
    return Target(
        heads=0 if mla else heads,
        entries=len(lens),
        layer_ids=bool(getattr(args, "kv_layer_ids", None)),
        even=mla or lens[:half] == lens[half:],
        stages=manager.pp_size or 1,
        dcp=getattr(manager, "dcp_size", 1) or 1,
    )


def _index(device: torch.device) -> int | None:
    return (device.index or 0) if device.type == "cuda" else None
