"""The number of ranges that a transfer engine moves for the drafter's KV of one chunk."""

from __future__ import annotations

from typing import NamedTuple

from sglang_mixkv.draft.layout import DraftFacts


class Descriptors(NamedTuple):
    """Counts for a decode rank. `stock`: ranges that SGLang sends. `channel`: slots to read; 0 if a
    slot holds no token."""

    stock: int
    channel: int


def descriptors(
    facts: DraftFacts, tokens: int, page_size: int, slot_bytes: int, heads: int, sources: int = 1
) -> Descriptors:
    """Count the descriptors of a chunk of `tokens`, with `heads` from each of `sources` ranks.

    SGLang's NIXL backend has a descriptor per page and entry. Mooncake's joins neighbouring pages;
    after a long run, few pages are neighbours on both sides, so it needs almost as many. The
    channel's number does not depend on pages."""
    pages, per_slot = -(-tokens // page_size), facts.tokens_in(slot_bytes, heads)
    segments = -(-tokens // per_slot) if per_slot else 0
    return Descriptors(len(facts.head_bytes) * pages, sources * segments)
