"""One line per server that says what the plugin does there."""

from __future__ import annotations

from typing import Any

from sglang_mixkv.protocol.extension import PROTOCOL


def speaks(manager: Any) -> bool:
    """Whether this rank's banner stands for the server: the first of the drafter's stage."""
    ranks = (
        manager.attn_tp_rank, manager.attn_cp_rank, manager.attn_dp_rank, manager.system_dp_rank,
    )  # fmt: skip
    return not any(ranks) and (manager.pp_rank or 0) == (manager.pp_size or 1) - 1


def banner(manager: Any) -> str:
    """Versions, protocol and this rank's part in one line."""
    side = manager.side
    facts, caches = side.local.facts, side.local.caches
    drafter = "no drafter" if facts.draft is None else f"drafter {facts.draft.kind}"
    if facts.draft is not None and facts.draft.total_heads:
        heads = caches.draft.heads if caches.draft else range(0)
        drafter += f" heads {heads.start}-{heads.stop - 1} of {facts.draft.total_heads}"
    return (
        f"sglang-mixkv {facts.plugin} (protocol {PROTOCOL}, SGLang {facts.engine}): "
        f"{manager.disaggregation_mode.value} attention-TP rank {caches.target.rank} of "
        f"{caches.target.tp}, target {caches.target.component.spread.kind.value}, {drafter}, "
        f"draft transfer {side.config.draft_transfer}"
    )
