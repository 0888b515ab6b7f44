r"""Which heads a decode rank reads from which prefill rank.

Which ranks meet is SGLang's rule, `CommonKVManager._resolve_rank_mapping`
(sglang/srt/disaggregation/common/conn.py); the decode rank takes them from its receiver's
`bootstrap_infos`. One attention-TP size divides the other:

    prefill TP 4       0   1   2   3          prefill TP 2      0       1
                        \ /     \ /                            / \     / \
    decode  TP 2         0       1            decode  TP 4     0   1   2   3

Each head that the decode rank holds is read once, from the first of its prefill ranks that holds
it. Where heads are replicated, some prefill ranks are read by nobody; they are opened all the same,
with no heads, since they cannot tell "not needed" from "not yet".
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_mixkv.errors import refuse

NO_HEADS = range(0)


def routes(held: Sequence[range], needed: range) -> tuple[range, ...]:
    """For each contacted prefill rank, in order, the heads to read from it.

    `held`: the heads on each of them; `needed`: those of the decode rank. Global numbers.
    Raises MixKVError where a needed head is on none of them.
    """
    covered, table = needed.start, []
    for heads in held:
        fresh = range(max(heads.start, covered), min(heads.stop, needed.stop))
        covered = fresh.stop if fresh else covered
        table.append(fresh or NO_HEADS)
    if sum(map(len, table)) != len(needed):
        raise refuse(
            "MIXKV-PAIR-04",
            f"prefill ranks that together hold the drafter's KV heads {list(needed)}",
            f"{[list(heads) for heads in held]}",
            "part of the drafter's cache would never be written",
            "Use attention-TP sizes of which one divides the other",
        )
    return tuple(table)


def readers_of(prefill_tp: int, decode_tp: int) -> int:
    """How many decode ranks open one prefill rank for a request."""
    if min(prefill_tp, decode_tp) < 1 or (prefill_tp % decode_tp and decode_tp % prefill_tp):
        raise refuse(
            "MIXKV-PAIR-04",
            "attention-TP sizes of which one divides the other",
            f"prefill {prefill_tp}, decode {decode_tp}",
            "some decode ranks would find no whole set of prefill ranks",
            "Change --tp or --attn-dp-size on one side",
        )
    return max(1, decode_tp // prefill_tp)
