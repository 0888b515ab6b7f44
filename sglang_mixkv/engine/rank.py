"""A rank on either side: its drafter, the parts of its channel, and its published facts."""

from __future__ import annotations

from typing import Any
from zlib import crc32

from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_serving, get_spec

from sglang_mixkv import __version__
from sglang_mixkv.channel import planes
from sglang_mixkv.channel.data_plane import Memory
from sglang_mixkv.channel.handshake import Row, StagingFacts, Target
from sglang_mixkv.channel.messages import PROTOCOL, draw_instance
from sglang_mixkv.channel.slots import SlotPool, slots_of
from sglang_mixkv.channel.times import Times
from sglang_mixkv.config import config_of
from sglang_mixkv.draft.copier import Store
from sglang_mixkv.draft.layout import DraftLayout
from sglang_mixkv.draft.rows import Staging
from sglang_mixkv.engine import draft_pool, gpu, pool_hooks
from sglang_mixkv.engine.metrics import reporter
from sglang_mixkv.engine.releases import check_once, sglang_version
from sglang_mixkv.errors import refuse


class RankContext:
    """The parts of a manager's channel. `draft`: None on a rank without its own draft KV. Raises
    MixKVError if the draft rows cannot be split by heads, or do not fit a slot."""

    def __init__(self, kv_args: Any, server_args: Any, mode: str, backend: str) -> None:
        self.config = config = config_of(server_args)
        check_once(server_args)
        self.pool_context = pool_hooks.current()
        count, self.slot_bytes = slots_of(config.staging_mb)
        pool = self.pool_context.pool
        self.draft = draft_pool.of_pool(pool) if pool is not None else None
        if self.draft is not None:
            check_slots(self.draft.layout, self.slot_bytes)
        self.kv_args, self.mode, self.backend = kv_args, mode, backend
        self.choice = planes.choose(backend, config.data_plane)
        self.times = times(config.patience)
        self.instance = draw_instance()
        self.copying = "copied on the host"
        self.port = config.port and config.port + gpu.gpu_of(kv_args)  # 0: any free one
        self.reporter = reporter(mode)
        self.reporter.weights = lambda: crc32(get_serving().weight_version.encode())
        self.reporter.slots = self.slots = SlotPool(count, self.times)

    def store(self, host: str) -> Store | None:
        """Make the staging buffer, registered with the data plane, and the kernels (if usable) that
        copy between it and the pool. Return None without draft KV."""
        if (draft := self.draft) is None:
            return None
        rows, devices = draft.rows, gpu.rdma_devices(self.kv_args)
        staging = Staging(self.slots.count, self.slot_bytes, rows.device, draft.mem_pool)
        plane = planes.make(self.choice.name, host, devices, self.config.nixl_params)
        device = (staging.device.index or 0) if staging.device.type == "cuda" else None
        plane.register(Memory(staging.address, staging.size, device))
        if rows.device.type != "cuda":
            return Store(rows, staging, plane)
        kernels = gpu.kernels_of(rows, draft.page_size, staging, self.config.gpu_copies)
        used = not isinstance(kernels, str)
        self.copying = "kernels" if used else f"copied by torch ({kernels})"
        if self.config.gpu_copies != "torch":  # an explicit choice is not a fault
            self.reporter.kernels(used)
        return Store(rows, staging, plane, kernels if used else None)

    def segment_tokens(self, heads: int, slot_bytes: int) -> int:
        assert self.draft is not None
        return self.draft.layout.facts.tokens_in(min(self.slot_bytes, slot_bytes), heads)

    def row(self, manager: Any, address: str, store: Store | None) -> Row:
        """Make the row that prefill publishes, and that decode compares with prefill's."""
        facts = None
        if store is not None:
            staging, plane = store.staging, store.plane
            facts = StagingFacts(
                plane.name, plane.endpoint, staging.address, staging.slot_bytes, staging.count
            )
        return Row(
            protocol=PROTOCOL, plugin=__version__, engine=sglang_version(), instance=self.instance,
            rank_ip=manager.local_ip, rank_port=manager.rank_port, address=address,
            attn_tp=manager.attn_tp_size, attn_tp_rank=manager.attn_tp_rank,
            pp_rank=manager.pp_rank or 0, aux_item_lens=tuple(self.kv_args.aux_item_lens),
            backend=self.backend, target=_target(manager),
            topk=get_spec().speculative_eagle_topk or 0,
            draft=self.draft.layout if self.draft else None, staging=facts,
            patience=self.config.patience,
        )  # fmt: skip

    def banner(self) -> str:
        whose = f"sglang-mixkv {__version__} (SGLang {sglang_version()}): {self.mode}"
        if self.draft is None:
            return f"{whose} rank without draft KV of its own"
        layout, plane = self.draft.layout, self.choice
        heads = f"{layout.heads.start}-{layout.heads.stop - 1} of {layout.facts.total_heads}"
        return (
            f"{whose} attention-TP rank {layout.rank} of {layout.tp}, draft heads {heads}, "
            f"data plane {plane.name} ({plane.why}), {self.copying}"
        )


def times(patience: float) -> Times:
    """Make the channel's times. An OPEN waits for its request as long as SGLang's DeferredBootstrap
    waits (disaggregation/common/conn.py, CommonKVManager.__init__)."""
    waiting = envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()
    bootstrap = envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()
    return Times(patience, float(waiting + bootstrap))


def check_slots(layout: DraftLayout, size: int) -> None:
    """Refuse slots too small for a token with all heads of this rank. A rank never reads more heads
    from another than either has, so every request can be served if both sides pass this check."""
    heads = len(layout.heads)
    if not layout.facts.tokens_in(size, heads):
        fits = [mb for mb in range(1, 257) if layout.facts.tokens_in(slots_of(mb)[1], heads)]
        expected = "a token of 4 MiB at most"
        if fits:
            expected = f"--mixkv-staging-mb to be {fits[0]} or more"
        got = f"slots of {size} bytes for tokens of {layout.facts.bytes_per_token(heads)}"
        consequence = "every request would start with a cold drafter"
        raise refuse("MIXKV-START-04", expected, got, consequence, "Raise it on both sides")


def _target(manager: Any) -> Target:
    """Describe the target from the KV args, which list it before any drafter that SGLang moves."""
    args = manager.kv_args
    lens = list(args.kv_item_lens)
    lens = lens[: len(lens) - args.num_draft_entries]
    mla, half = manager.is_mla_backend or manager.is_hybrid_mla_backend, len(lens) // 2
    heads = getattr(args, "total_kv_head_num", 1)  # on decode only with SGLang's staging
    widths, units, states = {*lens}, set[int](), [state.value for state in args.state_types]
    parts = states, args.state_item_lens, args.state_dim_per_tensor
    for state, sizes, dims in zip(*parts, strict=True):
        widths.update(sizes if state == "swa" else ())
        units.update(size // max(1, dim) for size, dim in zip(sizes, dims, strict=state == "mamba"))
    return Target(
        heads=0 if mla else heads, entries=len(lens), layer_ids=bool(args.kv_layer_ids),
        even=mla or lens[:half] == lens[half:], stages=manager.pp_size or 1, dcp=manager.dcp_size,
        states=tuple(dict.fromkeys(states)), drafts=args.num_draft_entries,
        widths=tuple(sorted({n // args.page_size for n in widths})), units=tuple(sorted(units)),
    )  # fmt: skip
