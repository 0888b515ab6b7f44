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
from sglang_mixkv.draft.targets import Target
from sglang_mixkv.engine.releases import sglang_version
from sglang_mixkv.errors import refuse
from sglang_mixkv.next.engine import draft_pool, handover
from sglang_mixkv.next.engine.metrics import metrics_for
from sglang_mixkv.next.engine.notes import Notes

SLOTS = 64
# What a slot costs (a message each way, a copy on both sides, a read) is some 0.3 ms of CPU, so
# slots are large: 4 MiB with the default of 256 MiB.
SLOT_ALIGNMENT = 4096
PATIENCE_ENV, PORT_ENV = "SGLANG_MIXKV_PATIENCE", "SGLANG_MIXKV_PORT"
DATA_PLANE_ENV = "SGLANG_MIXKV_DATA_PLANE"
PLANES = ("mooncake", "nixl")
RDMA_DEVICES = "/sys/class/infiniband"


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
        self.notes = Notes(mode, self.config.stats_dir, metrics_for(mode))

    def slots(self) -> SlotPool:
        self.notes.slots = SlotPool(SLOTS, self.times)
        return self.notes.slots

    @property
    def slot_bytes(self) -> int:
        return (self.config.staging_mb << 20) // SLOTS // SLOT_ALIGNMENT * SLOT_ALIGNMENT

    def staging(self, slots: SlotPool) -> Staging:
        assert self.draft is not None
        return Staging(slots.count, self.slot_bytes, self.draft.rows.device, self.draft.mem_pool)

    def plane(self, staging: Staging, host: str) -> DataPlane:
        """Registered, so that its endpoint is valid."""
        plane = _plane_of(self.backend, host, self.ib_device)
        spare = staging.address + 8  # behind the stamp of slot 0, where nothing is
        plane.register(Memory(staging.address, staging.size, _index(staging.device)), spare)
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


def _plane_of(backend: str, host: str, devices: str) -> DataPlane:
    """As SGLANG_MIXKV_DATA_PLANE says; else the backend's own, but for UCX without RDMA: there a
    reader that dies can end the process it reads from (docs/protocol.md).

    Raises MixKVError for another value, and where Mooncake would have to be and is not installed.
    """
    asked = os.environ.get(DATA_PLANE_ENV)
    if asked and asked not in PLANES:
        raise refuse(
            "MIXKV-START-04", f"{DATA_PLANE_ENV}={' or '.join(PLANES)}", asked,
            "draft KV would be read in a way that nobody chose",
            "Correct it, or unset it: the plugin chooses",
        )  # fmt: skip
    if (asked or _default_plane(backend)) == "nixl":
        from sglang_mixkv.channel.nixl import Nixl

        return Nixl(*_nixl_backend(devices))
    from sglang_mixkv.channel.mooncake import Mooncake

    try:
        return Mooncake(host, devices)
    except ImportError as error:
        raise refuse(
            "MIXKV-START-06", "Mooncake, to read draft KV without RDMA", str(error),
            "with NIXL's UCX over TCP a decode process that dies can end the prefill process",
            "Install mooncake-transfer-engine, or accept it: SGLANG_MIXKV_DATA_PLANE=nixl",
        ) from error  # fmt: skip


def _default_plane(backend: str) -> str:
    if backend != "nixl":
        return "mooncake"
    kind = envs.SGLANG_DISAGGREGATION_NIXL_BACKEND.get()
    return "mooncake" if kind == "UCX" and not _has_rdma() else "nixl"


def _has_rdma() -> bool:
    return os.path.isdir(RDMA_DEVICES) and bool(os.listdir(RDMA_DEVICES))


def _nixl_backend(devices: str) -> tuple[str, dict[str, str]]:
    """As NixlKVManager makes its agent (disaggregation/nixl/conn.py)."""
    backend = envs.SGLANG_DISAGGREGATION_NIXL_BACKEND.get()
    parameters = dict(json.loads(envs.SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS.get() or "{}"))
    if devices and backend == "UCX":
        parameters.setdefault("device_list", devices)
    return backend, parameters


def _index(device: torch.device) -> int | None:
    return (device.index or 0) if device.type == "cuda" else None
