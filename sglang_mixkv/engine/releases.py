"""Everything inside SGLang that the plugin touches, per release, and the check that it is so.

Nobody but `plugin.py`, `engine/` and `cpu/support.py` uses SGLang. What they override of its KV
classes, or call of SGLang, is listed here (`tests/protocol/test_seams.py`). A release is an entry
of RELEASES: its seams, and where its control messages have what. `preflight` runs before an
opted-in server starts.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_mixkv.config import ALLOW_UNTESTED_ENV, Config
from sglang_mixkv.protocol.messages import MetadataPositions
from sglang_mixkv.protocol.registration import Positions

_CONN = "sglang.srt.disaggregation.mooncake.conn"
_COMMON = "sglang.srt.disaggregation.common.conn"
_UTILS = "sglang.srt.disaggregation.utils"
_ENGINE = "sglang.srt.distributed.device_communicators.mooncake_transfer_engine"

# Dotted name -> parameter names that the plugin relies on, in order. A seam with more
# parameters than these is another seam: what the new one means is unknown.
# fmt: off
SEAMS: dict[str, tuple[str, ...]] = {
    "sglang.srt.server_args:ServerArgs.add_cli_args": ("parser",),
    "sglang.srt.server_args:ServerArgs.from_cli_args": ("args",),
    "sglang.srt.configs.model_config:ModelConfig.from_server_args": (
        "server_args", "model_path", "model_revision", "is_draft_model", "context_length", "kwargs",
    ),
    "sglang.srt.plugins.hook_registry:HookRegistry.register": (
        "target", "hook", "hook_type", "source",
    ),
    "sglang.srt.arg_groups.resolution_hooks:register_resolution_hook": ("name",),
    "sglang.srt.arg_groups.overrides:resolved_view": ("server_args",),
    "sglang.srt.runtime_context:get_device": (),
    "sglang.srt.runtime_context:get_disagg": (),
    "sglang.srt.runtime_context:get_observability": (),
    "sglang.srt.runtime_context:get_parallel": (),
    "sglang.srt.runtime_context:get_server_args": (),
    "sglang.srt.runtime_context:get_serving": (),
    "sglang.srt.runtime_context:get_spec": (),
    f"{_ENGINE}:MooncakeTransferEngine.__init__": ("self", "hostname", "gpu_id", "ib_device"),
    f"{_ENGINE}:MooncakeTransferEngine.batch_transfer_sync": (
        "self", "session_id", "buffers", "peer_buffer_addresses", "lengths",
    ),
    f"{_ENGINE}:MooncakeTransferEngine.send_probe": ("self", "peer_session_id"),
    "sglang.srt.mem_cache.allocation:get_last_loc_torch": (
        "req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor",
    ),
    f"{_UTILS}:get_kv_class": ("transfer_backend", "class_type"),
    f"{_UTILS}:DisaggregationMode.to_engine_type": ("mode",),
    f"{_UTILS}:is_mla_backend": ("target_kv_pool",),
    f"{_UTILS}:setup_state_kv_args": (
        "kv_args", "token_to_kv_pool", "draft_token_to_kv_pool", "total_kv_layers",
        "req_to_token_pool",
    ),
    f"{_UTILS}:build_transfer_entry_pairs": (
        "src_layer_ids", "dst_layer_ids", "n_src", "n_dst", "allow_positional_fallback",
    ),
    f"{_CONN}:MooncakeKVManager.__init__": (
        "self", "args", "disaggregation_mode", "server_args", "is_mla_backend",
    ),
    f"{_CONN}:MooncakeKVManager.add_transfer_request": (
        "self", "bootstrap_room", "kv_indices", "index_slice", "is_last_chunk", "aux_index",
        "state_indices", "num_kv_tokens", "wait_event", "indices_event", "trace_ctx",
    ),
    f"{_CONN}:MooncakeKVManager.transfer_worker": (
        "self", "queue", "executor", "staging_buffer", "worker_index",
    ),
    f"{_CONN}:MooncakeKVManager.init_engine": ("self",),
    f"{_CONN}:MooncakeKVManager.start_prefill_thread": ("self",),
    f"{_CONN}:MooncakeKVManager.send_kvcache": (
        "self", "mooncake_session_id", "prefill_kv_indices", "dst_kv_ptrs", "dst_kv_indices",
        "executor", "dst_layer_ids", "dst_device_kv_indices", "dst_kv_item_len", "dst_attn_tp_size",
    ),
    f"{_CONN}:MooncakeKVManager.send_kvcache_slice": (
        "self", "mooncake_session_id", "prefill_kv_indices", "dst_kv_ptrs", "dst_kv_indices",
        "dst_tp_rank", "dst_attn_tp_size", "dst_kv_item_len", "executor", "dst_layer_ids",
    ),
    f"{_CONN}:MooncakeKVManager.send_aux": ("self", "req", "prefill_aux_index", "dst_aux_ptrs"),
    f"{_CONN}:MooncakeKVManager._transfer_data": ("self", "mooncake_session_id", "transfer_blocks"),
    f"{_CONN}:MooncakeKVManager._poison_unsettled_send": ("self", "room"),
    f"{_CONN}:MooncakeKVManager._send_probe": ("self", "session_id"),
    f"{_CONN}:MooncakeKVManager.maybe_send_extra": (
        "self", "req", "prefill_state_indices", "executor", "target_rank_registration_info",
    ),
    f"{_CONN}:MooncakeKVManager._get_dsa_cache_transfer_skip_flags": ("self", "info"),
    f"{_CONN}:MooncakeKVManager._validate_peer_state_layout": ("self", "registration_info"),
    f"{_CONN}:MooncakeKVManager.send_kvcache_dcp": (
        "self", "mooncake_session_id", "prefill_kv_indices", "dst_kv_ptrs", "dst_kv_indices",
        "dcp_token_item_lens", "dst_dcp_size", "dst_dcp_rank", "src_page_offset",
        "decode_prefix_len", "num_kv_tokens", "executor", "dst_layer_ids", "pack_buffer",
        "dst_kv_item_lens", "dst_tp_rank", "dst_attn_tp_size",
    ),
    f"{_COMMON}:CommonKVManager.note_abort_ack": (
        "self", "bootstrap_room", "prefill_rank", "generation",
    ),
    f"{_COMMON}:CommonKVManager._prefill_unique_rank": ("self",),
    f"{_COMMON}:CommonKVManager._send_multipart_locked": ("self", "endpoint", "parts", "is_ipv6"),
    f"{_CONN}:MooncakeKVManager._handle_deferred_abort_notification": (
        "self",
        "notification",
        "room_active",
    ),
    f"{_COMMON}:CommonKVManager._make_worker_recv": ("self", "socket", "timeout_ms"),
    f"{_COMMON}:CommonKVManager._resolve_rank_mapping": ("self", "info"),
    f"{_COMMON}:CommonKVManager._register_topology_row": ("self", "url", "payload"),
    f"{_COMMON}:CommonKVManager.check_status": ("self", "bootstrap_room"),
    f"{_COMMON}:CommonKVManager.conclude_failure": (
        "self", "bootstrap_room", "failure_reason", "targets",
    ),
    f"{_COMMON}:CommonKVManager.conclude_transfer": (
        "self", "bootstrap_room", "status", "targets", "failure_reason",
    ),
    f"{_COMMON}:CommonKVManager.record_failure": ("self", "bootstrap_room", "failure_reason"),
    f"{_COMMON}:CommonKVManager.requires_dcp_relayout": ("self", "dst_dcp_size", "dst_dcp_rank"),
    f"{_COMMON}:CommonKVManager.try_ensure_parallel_info": ("self", "bootstrap_addr"),
    f"{_COMMON}:CommonKVManager.prepare_dcp_token_item_lens": (
        "self", "dst_page_item_lens", "dst_dcp_size",
    ),
    f"{_COMMON}:CommonKVManager.update_status": ("self", "bootstrap_room", "status"),
    f"{_COMMON}:CommonKVManager._encode_kv_status_message": (
        "self", "bootstrap_room", "status", "failure_reason",
    ),
    f"{_COMMON}:CommonKVManager._room_notify_targets": ("self", "bootstrap_room"),
    f"{_COMMON}:CommonKVManager._init_dcp_pack_buffers_once": ("self", "dcp_size", "include_draft"),
    f"{_COMMON}:CommonKVSender.__init__": (
        "self", "mgr", "bootstrap_addr", "bootstrap_room", "req_has_disagg_prefill_dp_rank",
    ),
    f"{_COMMON}:CommonKVSender.clear": ("self",),
    f"{_COMMON}:CommonKVSender.init": ("self", "num_kv_indices", "aux_index"),
    f"{_COMMON}:CommonKVSender.abort": ("self",),
    f"{_COMMON}:CommonKVSender.get_transfer_metric": ("self",),
    f"{_COMMON}:CommonKVReceiver.__init__": ("self", "mgr", "bootstrap_addr", "bootstrap_room"),
    f"{_COMMON}:CommonKVReceiver.abort": ("self",),
    f"{_COMMON}:CommonKVReceiver.clear": ("self",),
    f"{_COMMON}:CommonKVReceiver.init": ("self", "prefill_dp_rank"),
    f"{_COMMON}:CommonKVReceiver.invalidate_cached_bootstrap_infos": ("self",),
    f"{_COMMON}:CommonKVReceiver.send_metadata": (
        "self", "kv_indices", "aux_index", "state_indices", "decode_prefix_len", "destination",
        "device_kv_indices",
    ),
    f"{_COMMON}:CommonKVReceiver._get_bootstrap_info_from_server": (
        "self", "prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank",
    ),
    f"{_COMMON}:CommonKVReceiver._register_kv_args": ("self",),
    f"{_COMMON}:CommonKVReceiver._send_bootstrap_message": (
        "self", "bootstrap_info", "message", "operation",
    ),
    f"{_COMMON}:CommonKVBootstrapServer.__init__": ("self", "host", "port"),
    f"{_COMMON}:CommonKVBootstrapServer._setup_routes": ("self",),
    f"{_COMMON}:CommonKVBootstrapServer._handle_route_put": ("self", "request"),
    f"{_COMMON}:CommonKVBootstrapServer._is_ready": ("self",),
}
# fmt: on


@dataclass(frozen=True)
class Release:
    """One release of SGLang. `seams`: see SEAMS; `registration`, `metadata`: where its Mooncake
    messages have what."""

    version: str
    seams: Mapping[str, tuple[str, ...]]
    registration: Positions
    metadata: MetadataPositions


RELEASES = (Release("0.5.23", SEAMS, Positions(), MetadataPositions()),)
"""The newest last."""

SUPPORTED_SGLANG = tuple(release.version for release in RELEASES)


def here() -> Release:
    """The installed release; an untested one is taken for the newest that is known."""
    version = sglang_version()
    return next((known for known in RELEASES if known.version == version), RELEASES[-1])


def sglang_version() -> str:
    """Version of the installed SGLang, `none` without one."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sglang")
    except PackageNotFoundError:
        return "none"


def _resolve(path: str) -> Any:
    module, _, attributes = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in attributes.split("."):
        found = inspect.getattr_static(found, name)
    return getattr(found, "__func__", found)


def _parameters(function: Any) -> tuple[str, ...]:
    names = tuple(inspect.signature(function).parameters)
    return names[1:] if names[:1] == ("cls",) else names


def seam_problem(path: str, expected: tuple[str, ...]) -> str | None:
    """What is wrong with one seam, None when it is as expected."""
    try:
        found = _parameters(_resolve(path))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"{path}: expected it with parameters {expected}; found none ({error})"
    if found != expected:
        return f"{path}: expected parameters {expected}; found {found}"
    return None


def _is_replaced(path: str) -> bool:
    """Whether a function that is not SGLang's stands there in this process."""
    try:
        owner = getattr(_resolve(path), "__module__", None) or ""
    except (ImportError, AttributeError):
        return False
    return not owner.startswith("sglang.")


def problems(config: Config, *, replaced_is_fine: bool = False) -> Iterator[str]:
    """Why the installed engine cannot carry the plugin; nothing when it can.

    `replaced_is_fine`: a function that a test or tool has put in the place of SGLang's is not
    compared.
    """
    version = sglang_version()
    if version not in SUPPORTED_SGLANG and not config.allow_untested_sglang:
        yield (
            f"SGLang version: expected one of {SUPPORTED_SGLANG}, found {version}. Install a "
            f"supported SGLang, or set {ALLOW_UNTESTED_ENV}=1 to try this one at your own risk"
        )
    for path, expected in here().seams.items():
        problem = seam_problem(path, expected)
        if problem and not (replaced_is_fine and _is_replaced(path)):
            yield problem


def preflight(config: Config, *, replaced_is_fine: bool = False) -> None:
    """Stop the process unless every seam is as expected. SystemExit, since SGLang swallows less."""
    found = list(problems(config, replaced_is_fine=replaced_is_fine))
    if found:
        stop(
            "MIXKV-START-01",
            "the installed SGLang does not fit this version of the plugin",
            found,
            "Install the SGLang and sglang-mixkv releases of one row of docs/operate.md, "
            "or start without --enable-mixkv",
        )


def stop(code: str, headline: str, details: list[str], remedy: str) -> None:
    """End the process with one message. Raises SystemExit (exit status 1)."""
    lines = "\n".join(f"  - {detail}" for detail in details)
    raise SystemExit(
        f"[{code}] sglang-mixkv (pid {os.getpid()}): --enable-mixkv is set, but {headline}; the "
        "server does not start, since it would silently transfer the drafter's KV wrongly.\n"
        f"{lines}\n{remedy}."
    )
