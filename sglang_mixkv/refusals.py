"""Combinations of flags with which an opted-in server refuses to start.

A feature is listed if it moves or lays out draft KV in an unsupported way, or if it replaces a part
of SGLang that the plugin extends. Neither would raise an error later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sglang_mixkv.config import truth

# Not UNO, which has no draft model, nor FROZEN_KV_MTP, whose drafter reads the target's KV.
SPECULATIVE = ("NONE", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK")
DEVICES = ("cuda", "cpu")
BACKENDS = ("mooncake", "nixl")
_OFF = (None, False, "", "none", "null")


class Rule(NamedTuple):
    """A combination to refuse. `name`: its description in flags. `applies`: true if resolved server
    arguments contain it. `remedy`: the reason, if not obvious, and what to do instead."""

    name: str
    applies: Callable[[Any], Any]
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} is not supported: {self.remedy}"


def _flag(name: str, remedy: str) -> Rule:
    """Make a Rule against a flag, or some of its values, perhaps only with a drafter."""
    flag, _, with_drafter = name.partition(" with ")
    attribute, *values = flag.removeprefix("--").replace("-", "_").split()

    def applies(args: Any) -> bool:
        given = getattr(args, attribute, None)
        is_given = given in values if values else given not in _OFF
        return is_given and (not with_drafter or has_drafter(args))

    return Rule(name, applies, remedy)


def has_drafter(args: Any) -> bool:
    return (args.speculative_algorithm or "NONE").upper() not in ("NONE", "NGRAM")


SINGLE_SERVER = Rule(
    "--disaggregation-mode null",
    lambda a: a.disaggregation_mode not in ("prefill", "decode"),
    "set --disaggregation-mode to prefill or decode, or drop --enable-mixkv",
)
OTHER_BACKEND = Rule(
    "--disaggregation-transfer-backend other than mooncake and nixl",
    lambda a: a.disaggregation_transfer_backend not in BACKENDS,
    "use mooncake or nixl on both sides; mori and ascend are not supported",
)

# Caches of SGLang 0.5.23, in srt/mem_cache/. The host tier works: a slot there never has the
# target's KV without the drafter's (_build_sidecar_transfers in unified_radix_cache.py, or packed
# into the target's pages), and both are restored before the forward that reads them.
# Storage: with an MLA target only rank 0 writes (is_storage_writer in hicache_storage.py), so every
# rank reads back rank 0's heads. With Mooncake's store, all ranks write their draft heads
# (should_backup in hybrid_cache/hybrid_cache_controller.py); engine/storage.py fixes its keys.
# FlexKV: FlexKVConnector.__init__ (storage/flexkv/flexkv_connector.py) registers only the target
# pool's buffers, so a restored page has the target's KV but stale draft KV. SGLang accepts this
# combination. `--radix-cache-backend flexkv` selects the same cache.
# External linker: a drafter's pages are stored under the TP rank without the TP size
# (_storage_suffix in storage/mooncake_store/mooncake_direct_linker.py, shared by storage/umbp/),
# so a server with a different TP size reads the wrong heads. A `dynamic` linker is unknown.
STORED = "mooncake"
STORAGE = Rule(
    "--hicache-storage-backend other than mooncake with a drafter",
    lambda a: getattr(a, "hicache_storage_backend", None) not in (*_OFF, STORED) and has_drafter(a),
    "a prefix restored from there may have the draft heads of another rank; use Mooncake's store "
    "(--hicache-storage-backend mooncake)",
)
_LACKS = "a prefix restored from FlexKV lacks its draft KV; drop the flag"
_FLAGS = {
    "--use-ray": "start without Ray",
    "--enable-pd-role-switch": "drop the flag",
    "--disaggregation-decode-allocation-policy prefill_complete": "use the default policy, early",
    "--enable-hisparse": "drop the flag",
    "--enable-unified-memory": "KV fused into shared pages cannot be cut by heads; drop the flag",
    "--kv-canary with a drafter": "its rows in the KV pool would be mistaken for heads; drop the "
    "flag",
    "--enable-kv-cache-sharding": "drop the flag",
    "--disaggregation-decode-draft-bootstrap": "decode would make draft KV itself; drop it",
    "--enable-multi-layer-eagle": "drop the flag",
    "--decoupled-spec-role": "draft in the same server",
    "--enable-flexkv with a drafter": _LACKS,
    "--radix-cache-backend flexkv with a drafter": _LACKS,
    "--enable-unified-cache-external-linker with a drafter": "a prefix restored from the external "
    "store may have the wrong draft heads, or none; use Mooncake's store "
    "(--hicache-storage-backend mooncake)",
}
ARGUMENT_RULES: tuple[Rule, ...] = (
    SINGLE_SERVER,
    OTHER_BACKEND,
    Rule(
        "--device other than cuda and cpu",
        lambda a: (getattr(a, "device", None) or "cuda").partition(":")[0] not in DEVICES,
        "the plugin would treat its memory as host memory; use --device cuda, or start both sides "
        "without --enable-mixkv",
    ),
    Rule(
        "--smg-grpc-mode",  # --grpc-mode is its old name
        lambda a: getattr(a, "smg_grpc_mode", False) or getattr(a, "grpc_mode", False),
        "its requests do not pass SGLang's tokenizer, where the plugin looks for room numbers in "
        "use; serve HTTP, or start without --enable-mixkv",
    ),
    # Unlike Mooncake's manager, NixlKVManager (disaggregation/nixl/conn.py) has no
    # deregister_buffer_to_engine: peers could write to memory that was released.
    Rule(
        "--enable-memory-saver with --disaggregation-transfer-backend nixl",
        lambda a: (
            getattr(a, "enable_memory_saver", False) and a.disaggregation_transfer_backend == "nixl"
        ),
        "SGLang does not deregister the target's pool from NIXL when it releases the memory; use "
        "mooncake, or drop the flag",
    ),
    Rule(
        f"--speculative-algorithm other than {', '.join(SPECULATIVE[1:])}",
        lambda a: (a.speculative_algorithm or "NONE").upper() not in SPECULATIVE,
        "it has no draft KV to move (UNO, FROZEN_KV_MTP), or is unknown; use one of those, or "
        "start both sides without --enable-mixkv",
    ),
    STORAGE,
    Rule(
        "attention context parallelism (--attn-cp-size above 1) with a drafter",
        lambda a: (getattr(a, "attn_cp_size", 1) or 1) > 1 and has_drafter(a),
        "use tensor or DP attention on the prefill side",
    ),
    *(_flag(name, remedy) for name, remedy in _FLAGS.items()),
)

_HEAD = re.compile("eagle3|eagle|dflash|dspark", re.IGNORECASE)


def other_head(architecture: str, algorithm: str) -> str:
    """Return why a drafter does not suit --speculative-algorithm `algorithm`; "" if it does. SGLang
    accepts any drafter: an EAGLE3 head run as EAGLE gets one hidden state instead of three, and all
    its drafts are rejected."""
    found = _HEAD.search(architecture)
    expected = found[0].upper() if found else algorithm
    if not algorithm or expected == ("EAGLE" if algorithm == "NEXTN" else algorithm):
        return ""
    return (
        f"{architecture} is a drafter for --speculative-algorithm {expected}, not {algorithm}: its "
        f"accept length would be 1. Set {expected} on both sides."
    )


def broken(
    rules: tuple[Rule, ...], args: Any, environ: Mapping[str, str], given: Any = None
) -> list[str]:
    """Return a message for each rule that the resolved arguments break, and for a refused variable.
    `given`: the arguments before SGLang resolved them, since it may set some itself."""
    found = list[str]()
    for rule in (one for one in rules if one.applies(args)):
        its_own = "SGLang sets it itself here: start both sides without --enable-mixkv"
        is_given = given is None or rule.applies(given)
        found.append(str(rule) if is_given else f"{rule.name} is not supported, and {its_own}")
    if truth("SGLANG_RUST_SERVER", environ):
        found.append("SGLANG_RUST_SERVER=1 is not supported: unset it")
    return found
