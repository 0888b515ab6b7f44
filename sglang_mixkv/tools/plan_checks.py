"""What is refused for a pair of launch lines, and what they cannot say."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_mixkv import __version__
from sglang_mixkv import refusals as startup
from sglang_mixkv.config import resolve
from sglang_mixkv.engine.releases import rules
from sglang_mixkv.protocol.facts import DraftFacts, Facts, compared_window, differences
from sglang_mixkv.tools.plan_flags import Server, about
from sglang_mixkv.tools.plan_model import Cache

Caches = tuple[Cache, Cache | None]


def own_refusals(server: Server) -> Iterator[str]:
    """What an opted-in server would refuse at its start."""
    with about(server.role):
        config = resolve(server.args, server.environ)
        reasons = startup.broken(rules(), server.args, server.environ, config)
    for reason in reasons:
        yield f"[MIXKV-START-03] {server.role}: {reason}"
    if server.args.disaggregation_mode != server.role:
        yield (
            f"[MIXKV-START-03] {server.role}: expected --disaggregation-mode {server.role}; got "
            f"{server.args.disaggregation_mode}. Are the two launch lines swapped?"
        )


def mismatches(prefill: Server, decode: Server, mine: Caches, other: Caches) -> list[str]:
    """What the handshake would refuse. `mine`: (target, draft) of prefill, `other`: of decode."""
    found = differences(_facts(prefill, decode, mine[1]), _facts(decode, prefill, other[1]))
    if mine[0] != other[0] and prefill.args.kv_cache_dtype == decode.args.kv_cache_dtype:
        found.append(
            f"target cache: prefill has {_words(mine[0])}, decode has {_words(other[0])}. Start "
            "both sides with the same --model-path and --dtype."
        )
    different = [f"[MIXKV-PAIR-03] {sentence}" for sentence in found]
    return [*different, *_flag_mismatches(prefill, decode)]


def unknown_state(server: Server, target: Cache) -> Iterator[str]:
    """What an opted-in server would refuse once it has its pools."""
    if startup.has_dcp(server.args) and target.state == "replicated":
        yield (
            f"[MIXKV-START-05] {server.role}: --dcp-size above 1 with a drafter and a target with "
            "sparse attention (index_topk) is not supported: use --dcp-size 1"
        )


def _flag_mismatches(prefill: Server, decode: Server) -> Iterator[str]:
    if {prefill.enabled, decode.enabled} == {True, False}:
        missing = prefill if decode.enabled else decode
        yield (
            f"[MIXKV-PAIR-01] --enable-mixkv: the {missing.role} server does not have it. Start "
            "both with it, or both without."
        )
    name = "disaggregation_enable_kv_checksum"
    if getattr(prefill.args, name) != getattr(decode.args, name):
        yield (
            "[MIXKV-PAIR-03] --disaggregation-enable-kv-checksum: on one side only. Set it on both "
            "or on neither."
        )
    if decode.args.pp_size not in (1, prefill.args.pp_size):
        yield (
            f"[MIXKV-PAIR-04] --pp-size: expected 1 or the prefill's {prefill.args.pp_size} on the "
            f"decode side; got {decode.args.pp_size}. Change one of them."
        )


def _words(cache: Cache) -> str:
    heads = f" {cache.spread.total_heads} KV heads," if cache.spread.total_heads else ""
    return (
        f"{cache.spread.kind.value.upper()},{heads} {cache.layers} layers, rows of {cache.widths} "
        f"{cache.dtype} elements"
    )


def _facts(server: Server, other: Server, draft: Cache | None) -> Facts:
    """The handshake's record, with nothing where one of the two sides leaves it to SGLang."""
    args = server.args
    pages = (server.page_size, other.page_size)
    topk = (args.speculative_eagle_topk, other.args.speculative_eagle_topk)
    return Facts(
        plugin=__version__, engine="", aux_item_lens=(),
        page_size=0 if None in pages else pages[0] or 0,
        kv_cache_dtype=args.kv_cache_dtype,
        speculative_algorithm=(args.speculative_algorithm or "").upper(),
        topk=0 if None in topk else topk[0] or 0,
        steps=args.speculative_num_steps or 0,
        backend=args.disaggregation_transfer_backend, dcp=args.dcp_size,
        draft=None if draft is None else DraftFacts(
            draft.spread.kind.value, draft.architecture, draft.spread.total_heads,
            draft.head_bytes(draft.layers),
            compared_window(server.algorithm, args.speculative_draft_window_size or 0),
        ),
    )  # fmt: skip


def unseen(prefill: Server, decode: Server) -> Iterator[str]:
    """What the two descriptions leave open."""
    for server in (prefill, decode):
        yield from _unseen_of(server)
    if not prefill.has_drafter and not decode.has_drafter:
        yield "no drafter on either side: the plugin leaves such transfers to SGLang"
    whole = (
        decode.args.disaggregation_decode_enable_radix_cache
        or decode.args.disaggregation_enable_kv_checksum
    )
    window = decode.args.speculative_draft_window_size
    if window and decode.algorithm != "DSPARK" and not whole:
        yield (
            "draft window: of a long prompt only its last pages are sent to a DFLASH drafter, and "
            "to a Llama EAGLE3 one whose attention backend keeps to it (fa3, fa4, trtllm_mha)"
        )
    yield "environment variables of the servers, other than assignments in the launch line"
    yield "plugin and SGLang versions on the two hosts, sizes of metadata rows, bytes of state"
    yield "how many pages of a request are neighbours: descriptors lie between the two figures"
    yield "whether slices are packed (--mixkv-draft-transfer): that takes fewer descriptors"


def _unseen_of(server: Server) -> Iterator[str]:
    if server.page_size is None:
        yield (
            f"{server.role}: no --page-size on the launch line; SGLang takes 1, or what its "
            "attention backend needs. Set it on both sides"
        )
    if server.enabled is None:
        yield f"{server.role}: /server_info does not say whether SGLANG_ENABLE_MIXKV is set"
    elif not server.enabled:
        yield f"{server.role}: --enable-mixkv is not set; the plan shows what it would do"
