"""What SGLang 0.5.23 itself refuses, whatever the plugin does: a drafter's flags, and two kinds
of data parallelism at once.

Restated from srt/arg_groups/: speculative_hook.py (_handle_dflash, _handle_dspark,
handle_speculative_decoding), validation_hook.py (check_pipeline_parallel_compat) and
parallel_hook.py (handle_data_parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sglang_mixkv.protocol.facts import BLOCK_ALGORITHMS
from sglang_mixkv.tools.plan_flags import Server


def _pipeline(server: Server) -> bool:
    allowed = ("NONE", *(("EAGLE", "DSPARK") if server.role == "prefill" else ()))
    return server.args.pp_size > 1 and server.algorithm not in allowed


def _radix(server: Server) -> bool:
    on = server.args.disaggregation_decode_enable_radix_cache and server.role == "decode"
    return on and server.algorithm not in ("NONE", "DSPARK", "EAGLE", "EAGLE3")


def _lm_head(server: Server) -> bool:
    needed = server.algorithm in BLOCK_ALGORITHMS and server.dp_groups > 1
    return needed and not server.args.enable_dp_lm_head


def _block_size(server: Server) -> bool:
    sizes = {server.args.speculative_dflash_block_size, server.args.speculative_num_draft_tokens}
    return server.algorithm == "DFLASH" and len(sizes - {None}) > 1


def _no_drafter(server: Server) -> bool:
    return server.algorithm == "DFLASH" and not server.args.speculative_draft_model_path


def _two_kinds_of_dp(server: Server) -> bool:
    return server.dp_groups > 1 and server.replicas > 1


# When, SGLang's reason, what to do.
_RULES: tuple[tuple[Callable[[Server], bool], str, str], ...] = (
    (
        _pipeline,
        "--pp-size above 1 goes with EAGLE and DSPARK, on a prefill server",
        "Use --pp-size 1",
    ),
    (
        _radix,
        "--disaggregation-decode-enable-radix-cache goes with EAGLE, EAGLE3 and DSPARK",
        "Drop the flag",
    ),
    (
        _lm_head,
        "DP-attention with DFLASH and DSPARK needs --enable-dp-lm-head",
        "Add the flag",
    ),
    (
        _block_size,
        "--speculative-dflash-block-size and --speculative-num-draft-tokens differ",
        "Give one of them",
    ),
    (
        _no_drafter,
        "DFLASH needs --speculative-draft-model-path",
        "Add the flag",
    ),
    (
        _two_kinds_of_dp,
        "--dp-size above 1 does not go with --attn-dp-size above 1",
        "Drop --dp-size",
    ),
)


def stock_refusals(server: Server) -> Iterator[str]:
    """What SGLang would say at this server's start."""
    drafter = "" if server.algorithm == "NONE" else f" with {server.algorithm}"
    for applies, reason, remedy in _RULES:
        if applies(server):
            yield f"{server.role}{drafter}: SGLang 0.5.23 does not start it: {reason}. {remedy}."
