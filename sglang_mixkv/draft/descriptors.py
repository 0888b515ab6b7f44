"""How many ranges a transfer engine is asked to move for the drafter's KV of one chunk."""

from __future__ import annotations

from typing import NamedTuple

from sglang_mixkv.draft.layout import DraftFacts


class Descriptors(NamedTuple):
    """For one decode rank. `stock`: as SGLang sends it. `channel`: slots that the plugin reads."""

    stock: int
    channel: int


def descriptors(
    facts: DraftFacts, tokens: int, page_size: int, slot_bytes: int, heads: int, sources: int = 1
) -> Descriptors:
    """Count the descriptors of a chunk of `tokens`, with `heads` from each of `sources` ranks.

    SGLang's NIXL backend names each page of each entry; Mooncake's joins neighbouring pages, so it
    needs as many where no two are neighbours on both sides, as in a server that has run for long.
    The channel's do not depend on pages. Raises ZeroDivisionError if a slot holds no token."""
    pages = -(-tokens // page_size)
    segments = -(-tokens // facts.tokens_in(slot_bytes, heads))
    return Descriptors(len(facts.head_bytes) * pages, sources * segments)
