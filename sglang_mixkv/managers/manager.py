"""The KV manager of both roles. It only composes; see prefill.py and decode.py."""

from __future__ import annotations

from typing import Any

from sglang_mixkv.config import config_of
from sglang_mixkv.managers.decode import DecodeSide
from sglang_mixkv.managers.kv_args import split_draft
from sglang_mixkv.managers.prefill import PrefillSide
from sglang_mixkv.managers.stats import Stats


class MixKVManager(PrefillSide, DecodeSide):
    """SGLang's MooncakeKVManager with separate target and draft components.

    Raises MixKVError, and the server does not start, when the KV args do not describe a
    drafter that can be cut into heads.
    """

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False
    ) -> None:
        split_draft(args)
        self.config = config_of(server_args)
        self.stats = Stats(disaggregation_mode.value, self.config.stats_dir)
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        _ = self.facts  # raise here, not in a thread
