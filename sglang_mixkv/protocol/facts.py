"""What the two sides must agree on before the first byte, and what each difference means.

Deliberately not compared, since they cannot hurt:

* `--speculative-num-steps` and `--speculative-num-draft-tokens`: they decide how far
  the decode side drafts, not how KV looks. They are reported.
* total pages, `--mem-fraction-static`, `--max-total-tokens`: destinations are
  addressed, and bounds-checked, by what the decode side registered.
* the plugin's own version: the wire's protocol number says whether two versions fit.
* the DCP size here, but with the attention-TP sizes (kv/routes.py check_dcp).
* the target's weights or name: SGLang does not compare them either, and two names can
  hold one model; geometry is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, TypeVar

import msgspec

T = TypeVar("T")

# What a peer says is decoded into these: no negative sizes, nothing beyond int64, no long lists.
Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Room = Annotated[int, msgspec.Meta(ge=0)]  # a uint64, which msgpack bounds
Word = Annotated[str, msgspec.Meta(max_length=256)]
Several = Annotated[tuple[T, ...], msgspec.Meta(max_length=4096)]


BLOCK_ALGORITHMS = ("DFLASH", "DSPARK")
"""Their drafters' K and V are projections of the target's hidden rows, layer by layer: no window
of prefill's shows in them, and decode reads as far as its own goes."""


def compared_window(algorithm: str, window: int) -> int:
    """What both sides must agree on of a drafter's window."""
    return 0 if algorithm.upper() in BLOCK_ALGORITHMS else window


class DraftFacts(msgspec.Struct, frozen=True):
    """The drafter as one server has it. `head_bytes`: bytes per token and head, per entry."""

    kind: Word
    architecture: Word
    total_heads: Size
    head_bytes: Several[Size]
    window: Size = 0


class Facts(msgspec.Struct, frozen=True):
    """One server's side of the handshake; equal on all its ranks that hold the drafter.

    `draft_aux`: numbers of the metadata rows that only the drafter reads. `extents`: it can write
    slices by extent (kv/extents.py). `backend`: SGLang's transfer backend; a side that does not say
    runs Mooncake's. `dcp`: its decode context parallelism; a side that does not say, 1. `memory`:
    with a drafter, the kind of Mooncake's allocator whose memory its KV is; "" for the usual.
    """

    plugin: Word
    engine: Word
    page_size: Size
    kv_cache_dtype: Word
    aux_item_lens: Several[Size]
    state_types: Several[Word] = ()
    speculative_algorithm: Word = ""
    topk: Size = 0
    steps: Size = 0
    draft: DraftFacts | None = None
    draft_aux: Several[Size] = ()
    extents: bool = False
    backend: Word = "mooncake"
    dcp: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    memory: Word = ""


def _sentence(what: str, prefill: object, decode: object, effect: str, remedy: str) -> str:
    return f"{what}: prefill has {prefill}, decode has {decode}; {effect}. {remedy}."


_SAME_FLAG = "Start both sides with the same {}"

# field, name in words, what a difference would have caused, remedy
_COMPARED = (
    (
        "engine",
        "SGLang version",
        "stock frames may have moved between releases",
        "Run the same SGLang release on both sides",
    ),
    (
        "backend",
        "transfer backend",
        "neither side reads the other's messages, and no byte would arrive",
        _SAME_FLAG.format("--disaggregation-transfer-backend"),
    ),
    (
        "page_size",
        "page size",
        "pages would not line up",
        _SAME_FLAG.format("--page-size"),
    ),
    (
        "kv_cache_dtype",
        "KV cache dtype",
        "the target's KV would be read as another type",
        _SAME_FLAG.format("--kv-cache-dtype"),
    ),
    (
        "speculative_algorithm",
        "speculative algorithm",
        "the drafter's KV and hidden states mean something else",
        _SAME_FLAG.format("--speculative-algorithm"),
    ),
    (
        "topk",
        "speculative top-k",
        "the rows of top-k data that travel with each request differ",
        _SAME_FLAG.format("--speculative-eagle-topk"),
    ),
    (
        "state_types",
        "kinds of model state",
        "state would land in another component",
        _SAME_FLAG.format("--model-path"),
    ),
    (
        "aux_item_lens",
        "sizes of the metadata rows",
        "first tokens and hidden states would land at wrong offsets",
        "Enable speculation, --disaggregation-enable-kv-checksum and sampling masks on both "
        "sides or on neither",
    ),
)

_DRAFT_COMPARED = (
    ("kind", "kind of drafter KV", "its rows are laid out differently"),
    ("architecture", "drafter architecture", "it is another model"),
    ("total_heads", "drafter KV heads", "its heads would be cut at wrong offsets"),
    ("head_bytes", "drafter bytes per token and head, per entry", "its layers, head size or "
     "dtype differ"),
    ("window", "drafter window", "pages that one side needs would never be sent"),
)  # fmt: skip


def differences(prefill: Facts, decode: Facts) -> list[str]:
    """One sentence for each difference that would do harm; empty when both sides fit."""
    return [*_server_differences(prefill, decode), *draft_differences(prefill, decode)]


def _server_differences(prefill: Facts, decode: Facts) -> Iterator[str]:
    for name, words, effect, remedy in _COMPARED:
        left, right = getattr(prefill, name), getattr(decode, name)
        if left != right:
            yield _sentence(words, left or "none", right or "none", effect, remedy)


def cold_differences(prefill: Facts, decode: Facts) -> list[str]:
    """The differences that remain when no draft KV travels: the target's alone must fit."""
    return differences(_without_draft(prefill), _without_draft(decode))


def _without_draft(facts: Facts) -> Facts:
    rows = enumerate(facts.aux_item_lens)
    return msgspec.structs.replace(
        facts,
        speculative_algorithm="",
        topk=0,
        draft=None,
        aux_item_lens=tuple(length for i, length in rows if i not in facts.draft_aux),
    )


def draft_differences(prefill: Facts, decode: Facts) -> list[str]:
    """The differences that concern the drafter alone."""
    if prefill.draft is None and decode.draft is None:
        return []
    if prefill.draft is None or decode.draft is None:
        return [
            _sentence(
                "drafter KV",
                "some" if prefill.draft else "none",
                "some" if decode.draft else "none",
                "draft KV would stay unwritten or land in the target's pages",
                "Give both sides the same --speculative-draft-model-path",
            )
        ]
    remedy = "Give both sides the same --speculative-draft-model-path and draft dtype"
    found = [
        _sentence(words, getattr(prefill.draft, name), getattr(decode.draft, name), effect, remedy)
        for name, words, effect in _DRAFT_COMPARED
        if getattr(prefill.draft, name) != getattr(decode.draft, name)
    ]
    if prefill.memory != decode.memory:
        found.append(_memory_difference(prefill.memory, decode.memory))
    return found


def _memory_difference(prefill: str, decode: str) -> str:
    return _sentence(
        "custom memory pool", prefill or "none", decode or "none",
        "one side's transport may not reach the other's memory",
        "Start both with the same SGLANG_MOONCAKE_CUSTOM_MEM_POOL and with mooncake.allocator",
    )  # fmt: skip
