r"""Which rank holds which heads, and which ranks talk to each other.

The two rules here restate SGLang's own:

* heads: `QKVParallelLinear` (sglang/srt/layers/linear.py). With at least as many
  heads as ranks each rank owns total/tp of them; with fewer, each head lives on
  tp/total neighbouring ranks.
* pairing: `CommonKVManager._resolve_rank_mapping`
  (sglang/srt/disaggregation/common/conn.py). One TP size divides the other.

      prefill TP 4       0   1   2   3          prefill TP 2      0       1
                          \ /     \ /                            / \     / \
      decode  TP 2         0       1            decode  TP 4     0   1   2   3
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from sglang_mixkv.core.errors import refuse


class Kind(StrEnum):
    """How a component is spread over the attention-TP ranks."""

    MLA = "mla"  # one latent row a token, equal on every rank
    MHA = "mha"  # rows of heads, sharded; MHA, GQA and MQA alike


class Spread(msgspec.Struct, frozen=True):
    """A component's kind and the KV heads of the whole model (0 for MLA).

    The total is a number of its own: heads per rank x TP is wrong with replicas.
    """

    kind: Kind
    total_heads: int = 0

    def on_rank(self, tp: int, rank: int) -> range:
        """Global numbers of the heads on `rank` of `tp`. MLA counts as one head, head 0."""
        return range(1) if self.kind is Kind.MLA else heads_on_rank(self.total_heads, tp, rank)


def heads_on_rank(total_heads: int, tp: int, rank: int) -> range:
    """Global KV heads on `rank` of `tp`, a half-open range of at least one head.

    Raises MixKVError where neither of heads and ranks divides the other.
    """
    if total_heads <= 0 or (total_heads % tp and tp % total_heads):
        raise refuse(
            f"a number of KV heads that divides, or is divided by, the attention-TP size {tp}",
            f"{total_heads} heads",
            "SGLang could not load the model so, and no rank's heads would be known",
            "Choose another --tp or --dp size on this side",
            "topology",
        )
    if total_heads >= tp:
        per_rank = total_heads // tp
        return range(rank * per_rank, (rank + 1) * per_rank)
    head = rank // (tp // total_heads)
    return range(head, head + 1)


def check_pairing(prefill_tp: int, decode_tp: int) -> None:
    """Raise MixKVError unless one attention-TP size divides the other."""
    if min(prefill_tp, decode_tp) < 1 or (prefill_tp % decode_tp and decode_tp % prefill_tp):
        raise refuse(
            "attention-TP sizes of which one divides the other",
            f"prefill {prefill_tp}, decode {decode_tp}",
            "some decode ranks would find no whole set of prefill ranks",
            "Change --tp or --attn-dp-size on one side",
            "topology",
        )


def contacted_ranks(prefill_tp: int, decode_tp: int, decode_rank: int) -> range:
    """Attention-TP ranks of the prefill side that a decode rank registers with."""
    check_pairing(prefill_tp, decode_tp)
    if prefill_tp >= decode_tp:
        fan_in = prefill_tp // decode_tp
        return range(decode_rank * fan_in, (decode_rank + 1) * fan_in)
    prefill_rank = decode_rank // (decode_tp // prefill_tp)
    return range(prefill_rank, prefill_rank + 1)


def overlap(left: range, right: range) -> range:
    """Common part of two half-open ranges of step 1; empty when they do not meet."""
    start = max(left.start, right.start)
    return range(start, max(start, min(left.stop, right.stop)))
