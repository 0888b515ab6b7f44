"""The KV manager of both roles. It only composes; see prefill.py and decode.py."""

from __future__ import annotations

import logging
from typing import Any

from sglang_mixkv import startup
from sglang_mixkv.config import config_of
from sglang_mixkv.core.wire import PROTOCOL
from sglang_mixkv.managers.decode import DecodeSide
from sglang_mixkv.managers.kv_args import split_draft
from sglang_mixkv.managers.metrics import metrics_for
from sglang_mixkv.managers.prefill import PrefillSide
from sglang_mixkv.managers.stats import Stats

logger = logging.getLogger(__name__)


class MixKVManager(PrefillSide, DecodeSide):
    """SGLang's MooncakeKVManager with separate target and draft components.

    Raises MixKVError, and the server does not start, when the KV args do not describe a
    drafter that can be cut into heads.
    """

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False
    ) -> None:
        startup.check_once(server_args)
        if getattr(args, "num_draft_entries", 0):
            split_draft(args)
        self.config = config_of(server_args)
        side = disaggregation_mode.value
        self.stats = Stats(side, self.config.stats_dir, metrics_for(side))
        # A prefill's reason for a failure travels to the decode side; stock parses it too.
        self.kv_status_msg_carries_reason = True
        self.mixkv_ready = True
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        banner = self.banner()  # reads the facts: what does not fit raises here
        logger.log(logging.INFO if self.speaks else logging.DEBUG, "%s", banner)

    @property
    def speaks(self) -> bool:
        """Whether this rank's banner stands for the server: the first of the drafter's stage."""
        ranks = (self.attn_tp_rank, self.attn_cp_rank, self.attn_dp_rank, self.system_dp_rank)
        return not any(ranks) and (self.pp_rank or 0) == (self.pp_size or 1) - 1

    def banner(self) -> str:
        """Versions, protocol and this rank's part in one line."""
        draft = self.facts.draft
        drafter = "no drafter" if draft is None else f"drafter {draft.kind}"
        if draft is not None and draft.total_heads:
            heads = self.caches.draft.heads if self.caches.draft else range(0)
            drafter += f" heads {heads.start}-{heads.stop - 1} of {draft.total_heads}"
        return (
            f"sglang-mixkv {self.facts.plugin} (protocol {PROTOCOL}, SGLang {self.facts.engine}): "
            f"{self.disaggregation_mode.value} attention-TP rank {self.caches.target.rank} of "
            f"{self.caches.target.tp}, target {self.target_kind.value}, {drafter}, "
            f"draft transfer {self.config.draft_transfer}"
        )
