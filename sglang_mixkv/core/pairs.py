"""Which entry of a prefill rank goes to which entry of a decode rank, by position."""

from __future__ import annotations

from sglang_mixkv.core.errors import refuse

Pairs = list[tuple[int, int]]


def positional_pairs(n_src: int, n_dst: int, start_layer: int, *, halves: bool) -> Pairs:
    """Pair entries by position, as stock does for pools without layer ids.

    A prefill PP stage holds layers start_layer.. of the decode side's. `halves`: entries are
    all K, then all V (sglang: common/conn.py get_mha_kv_ptrs_with_pp, get_mla_kv_ptrs_with_pp).
    """
    if n_src == n_dst:
        return [(i, i) for i in range(n_src)]
    groups = 2 if halves else 1
    src_layers, dst_layers = n_src // groups, n_dst // groups
    if start_layer + src_layers > dst_layers:
        raise refuse(
            f"a decode rank with layers {start_layer}..{start_layer + src_layers - 1}",
            f"{dst_layers} layers",
            "this stage's KV would have no destination",
            "Use a decode --pp-size of 1, or the prefill's",
        )
    return [
        (group * src_layers + layer, group * dst_layers + start_layer + layer)
        for group in range(groups)
        for layer in range(src_layers)
    ]
