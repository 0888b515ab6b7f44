"""Decode context parallelism (DCP): a request's tokens are dealt out to the ranks of decode.

target    each rank has every so-many-th token; SGLang sends it so, token by token
drafter   each rank has all tokens of its heads, in pages so many times as large; by our plan
"""

from __future__ import annotations

import copy
from typing import Any


class TargetAlone:
    """SGLang's manager, with KV args that end before the drafter's entries."""

    def __init__(self, manager: Any) -> None:
        args = copy.copy(manager.kv_args)
        first = len(args.kv_data_ptrs) - args.num_draft_entries
        for name in ("kv_data_ptrs", "kv_data_lens", "kv_item_lens", "kv_layer_ids"):
            setattr(args, name, getattr(args, name)[:first])
        args.num_draft_entries = 0
        self._manager, self.kv_args = manager, args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def tokens_of(rank: int, size: int, first: int, count: int | None) -> int:
    """How many of so many tokens of a request, from its `first` on, are this DCP rank's."""
    return len(range((rank - first) % size, count or 0, size))
