"""Combinations that are refused before an opted-in server starts, each by name.

Two reasons lead to this list: the feature moves or lays out KV in a way the plugin does
not know, or it replaces the part of SGLang that the plugin extends. Neither would show
as an error later.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from sglang_mixkv.config import Config, truth

SPECULATIVE = (None, "NONE", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")

_Rule = tuple[str, Callable[[Any], bool], str]


def _get(name: str) -> Callable[[Any], Any]:
    return lambda args: getattr(args, name, None)


def _has_drafter(args: Any) -> bool:
    algorithm = (args.speculative_algorithm or "NONE").upper()
    return algorithm not in ("NONE", "NGRAM")


# What it is called on the command line, when it applies, what to do instead.
ARGUMENT_RULES: tuple[_Rule, ...] = (
    (
        "--disaggregation-mode null",
        lambda a: a.disaggregation_mode not in ("prefill", "decode"),
        "give --disaggregation-mode prefill or decode, or drop --enable-mixkv",
    ),
    (
        "--disaggregation-transfer-backend other than mooncake",
        lambda a: a.disaggregation_transfer_backend != "mooncake",
        "use --disaggregation-transfer-backend mooncake",
    ),
    ("--use-ray", _get("use_ray"), "start without Ray"),
    ("--enable-pd-role-switch", _get("enable_pd_role_switch"), "drop the flag"),
    (
        "--disaggregation-decode-allocation-policy prefill_complete",
        lambda a: a.disaggregation_decode_allocation_policy == "prefill_complete",
        "use the default policy, early",
    ),
    ("--enable-hisparse", _get("enable_hisparse"), "drop the flag"),
    (
        "--disaggregation-decode-host-receive-threshold below 1",
        lambda a: a.disaggregation_decode_host_receive_threshold < 1,
        "leave it at 1",
    ),
    ("--enable-unified-memory", _get("enable_unified_memory"), "drop the flag"),
    ("--enable-kv-cache-sharding", _get("enable_kv_cache_sharding"), "drop the flag"),
    (
        "--speculative-algorithm other than EAGLE, EAGLE3, NEXTN, STANDALONE or NGRAM",
        lambda a: (a.speculative_algorithm or "NONE").upper() not in SPECULATIVE,
        "its draft KV is laid out in another way; use an EAGLE-style drafter",
    ),
    ("--enable-multi-layer-eagle", _get("enable_multi_layer_eagle"), "drop the flag"),
    (
        "--decoupled-spec-role",
        lambda a: getattr(a, "decoupled_spec_role", "null") != "null",
        "draft in the same server",
    ),
    (
        "--enable-hierarchical-cache with a drafter",
        lambda a: bool(getattr(a, "enable_hierarchical_cache", False)) and _has_drafter(a),
        "a prefix that comes back from the host cache may lack its draft KV; drop the flag",
    ),
    (
        "--dcp-size above 1 with a drafter",
        lambda a: (getattr(a, "dcp_size", 1) or 1) > 1 and _has_drafter(a),
        "use --dcp-size 1, or equal attention-TP sizes without --enable-mixkv",
    ),
    (
        "attention context parallelism (--attn-cp-size above 1) with a drafter",
        lambda a: (getattr(a, "attn_cp_size", 1) or 1) > 1 and _has_drafter(a),
        "use tensor or DP attention on the prefill side",
    ),
)


def _environment_rules(environ: Mapping[str, str]) -> list[str]:
    found = []
    for name in ("SGLANG_RUST_SERVER", "SGLANG_DISAGG_STAGING_BUFFER"):
        if truth(name, environ):
            found.append(f"{name}=1 is not supported: unset it")
    if environ.get("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "").lower() not in ("", "0", "false", "none"):
        found.append("SGLANG_MOONCAKE_CUSTOM_MEM_POOL is not supported: unset it")
    return found


def _cold_rules(args: Any, environ: Mapping[str, str]) -> list[str]:
    found = []
    if getattr(args, "disaggregation_decode_enable_radix_cache", False):
        found.append(
            "--mixkv-on-draft-mismatch cold with --disaggregation-decode-enable-radix-cache is not "
            "supported: pages without draft KV would become a prefix that other requests share; "
            "drop one of the two"
        )
    if truth("SGLANG_MOONCAKE_SEND_AUX_TCP", environ):
        found.append(
            "--mixkv-on-draft-mismatch cold with SGLANG_MOONCAKE_SEND_AUX_TCP=1 is not supported: "
            "the drafter's part of the metadata could not be left out; drop one of the two"
        )
    return found


def _verify_rules(args: Any) -> list[str]:
    """With a drafter these are refused in any case."""
    return [
        f"--mixkv-verify checksum with {flag} above 1 is not supported: no rank holds a request's "
        "tokens as they were sent; drop one of the two"
        for name, flag in (("dcp_size", "--dcp-size"), ("attn_cp_size", "--attn-cp-size"))
        if (getattr(args, name, 1) or 1) > 1
    ]


def refusals(
    args: Any, environ: Mapping[str, str] = os.environ, config: Config | None = None
) -> list[str]:
    """Unsupported choices among resolved server arguments and the environment."""
    found = [
        f"{name} is not supported: {remedy}" for name, applies, remedy in ARGUMENT_RULES
        if applies(args)
    ]  # fmt: skip
    if config is not None and config.on_draft_mismatch == "cold":
        found += _cold_rules(args, environ)
    if config is not None and config.verify == "checksum":
        found += _verify_rules(args)
    return found + _environment_rules(environ)


_metrics_folder: tempfile.TemporaryDirectory[str] | None = None


def set_metrics_folder(args: Any) -> None:
    """Set PROMETHEUS_MULTIPROC_DIR now; SGLang does, but after its arguments are resolved.

    prometheus_client decides for good when it is imported whether values go to that folder, and
    the check of the seams imports it (mooncake/conn.py has a counter): the API process would
    leave its own series out of /metrics. SGLang goes on as if the operator had set it (sglang:
    utils/common.py set_prometheus_multiproc_dir).
    """
    global _metrics_folder
    if getattr(args, "enable_metrics", False) and "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        _metrics_folder = tempfile.TemporaryDirectory()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = _metrics_folder.name
