"""Everything inside SGLang that the plugin touches, and with which parameters, per release.

Nobody but `plugin.py`, `engine/` and `cpu/support.py` uses SGLang. What they override of its KV
classes, or call of SGLang, is listed here (`tests/protocol/test_seams.py`). What they hook is named
at the top of `plugin.py` and of `cpu/support.py`.
"""

from __future__ import annotations

_MOONCAKE = "sglang.srt.disaggregation.mooncake.conn"
_NIXL = "sglang.srt.disaggregation.nixl.conn"
_COMMON = "sglang.srt.disaggregation.common.conn"
_UTILS = "sglang.srt.disaggregation.utils"
_ENGINE = "sglang.srt.distributed.device_communicators.mooncake_transfer_engine"

# Dotted name -> parameter names that the plugin relies on, in order. A seam with more
# parameters than these is another seam: what the new one means is unknown.
# fmt: off
Seams = dict[str, tuple[str, ...]]

SEAMS_0_5_23: Seams = {
    "sglang.srt.server_args:ServerArgs.add_cli_args": ("parser",),
    "sglang.srt.server_args:ServerArgs.from_cli_args": ("args",),
    "sglang.srt.configs.model_config:ModelConfig.from_server_args": (
        "server_args", "model_path", "model_revision", "is_draft_model", "context_length", "kwargs",
    ),
    "sglang.srt.plugins.hook_registry:HookRegistry.apply_hooks": (),
    "sglang.srt.plugins.hook_registry:HookRegistry.register": (
        "target", "hook", "hook_type", "source",
    ),
    "sglang.srt.arg_groups.resolution_hooks:register_resolution_hook": ("name",),
    "sglang.srt.arg_groups.overrides:resolved_view": ("server_args",),
    "sglang.srt.runtime_context:attention_backends": (),
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
    "sglang.srt.speculative.dflash_utils:get_dflash_attention_sliding_window_size": ("config",),
    "sglang.srt.speculative.dflash_utils:get_dflash_layer_types": ("config",),
    "sglang.srt.managers.scheduler:Scheduler.attach_hicache_storage_wrapped": ("self", "recv_req"),
    # Not used: without these two a prefix that comes back from the host lacks its draft KV.
    "sglang.srt.speculative.base_spec_worker:BaseSpecWorker._build_hicache_draft_plan": (
        "self",
    ),
    "sglang.srt.mem_cache.kv_cache_builder:maybe_register_hicache_draft": (
        "tree_cache", "draft_plan",
    ),
    "sglang.srt.disaggregation.mooncake.utils:check_mooncake_custom_mem_pool_enabled": (),
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
    f"{_MOONCAKE}:MooncakeKVManager.__init__": (
        "self", "args", "disaggregation_mode", "server_args", "is_mla_backend",
    ),
    f"{_MOONCAKE}:MooncakeKVManager.add_transfer_request": (
        "self", "bootstrap_room", "kv_indices", "index_slice", "is_last_chunk", "aux_index",
        "state_indices", "num_kv_tokens", "wait_event", "indices_event", "trace_ctx",
    ),
    f"{_MOONCAKE}:MooncakeKVManager.transfer_worker": (
        "self", "queue", "executor", "staging_buffer", "worker_index",
    ),
    f"{_MOONCAKE}:MooncakeKVManager.init_engine": ("self",),
    f"{_MOONCAKE}:MooncakeKVManager.start_prefill_thread": ("self",),
    f"{_MOONCAKE}:MooncakeKVManager.send_kvcache": (
        "self", "mooncake_session_id", "prefill_kv_indices", "dst_kv_ptrs", "dst_kv_indices",
        "executor", "dst_layer_ids", "dst_device_kv_indices", "dst_kv_item_len", "dst_attn_tp_size",
    ),
    f"{_MOONCAKE}:MooncakeKVManager.send_kvcache_slice": (
        "self", "mooncake_session_id", "prefill_kv_indices", "dst_kv_ptrs", "dst_kv_indices",
        "dst_tp_rank", "dst_attn_tp_size", "dst_kv_item_len", "executor", "dst_layer_ids",
    ),
    f"{_MOONCAKE}:MooncakeKVManager.send_aux": ("self", "req", "prefill_aux_index", "dst_aux_ptrs"),
    f"{_MOONCAKE}:MooncakeKVManager._transfer_data": (
        "self", "mooncake_session_id", "transfer_blocks",
    ),
    f"{_MOONCAKE}:MooncakeKVManager.maybe_send_extra": (
        "self", "req", "prefill_state_indices", "executor", "target_rank_registration_info",
    ),
    f"{_MOONCAKE}:MooncakeKVManager._get_dsa_cache_transfer_skip_flags": ("self", "info"),
    f"{_MOONCAKE}:MooncakeKVManager._validate_peer_state_layout": ("self", "registration_info"),
    f"{_MOONCAKE}:MooncakeKVManager.send_kvcache_dcp": (
        "self", "mooncake_session_id", "prefill_kv_indices", "dst_kv_ptrs", "dst_kv_indices",
        "dcp_token_item_lens", "dst_dcp_size", "dst_dcp_rank", "src_page_offset",
        "decode_prefix_len", "num_kv_tokens", "executor", "dst_layer_ids", "pack_buffer",
        "dst_kv_item_lens", "dst_tp_rank", "dst_attn_tp_size",
    ),
    f"{_NIXL}:NixlKVManager.__init__": (
        "self", "args", "disaggregation_mode", "server_args", "is_mla_backend",
    ),
    f"{_NIXL}:NixlKVManager._add_remote_peer": ("self", "decode_kv_args"),
    f"{_NIXL}:NixlKVManager._await_handles": ("self", "handles", "failure_seen"),
    f"{_NIXL}:NixlKVManager._handle_abort_notification": ("self", "msg"),
    f"{_NIXL}:NixlKVManager._handle_deferred_abort_ack": ("self", "notification"),
    f"{_NIXL}:NixlKVManager._prepare_payload_xfer": ("self", "peer_info"),
    f"{_NIXL}:NixlKVManager._prepare_state_xfer": ("self", "peer_info"),
    f"{_NIXL}:NixlKVManager._start_bootstrap_thread": ("self",),
    f"{_NIXL}:NixlKVManager._start_decode_listener_thread": ("self",),
    f"{_NIXL}:NixlKVManager.add_transfer_request": (
        "self", "bootstrap_room", "kv_indices", "index_slice", "is_last_chunk", "aux_index",
        "state_indices", "num_kv_tokens", "wait_event", "indices_event", "trace_ctx",
    ),
    f"{_NIXL}:NixlKVManager.check_status": ("self", "bootstrap_room"),
    f"{_NIXL}:NixlKVManager.maybe_send_extra": (
        "self", "peer_name", "prefill_state_indices", "dst_state_data_ptrs", "dst_state_indices",
        "dst_gpu_id", "decode_tp_size", "decode_tp_rank", "dst_state_item_lens",
        "dst_state_dim_per_tensor", "dst_state_layer_ids",
    ),
    f"{_NIXL}:NixlKVManager.register_buffer_to_engine": ("self",),
    f"{_NIXL}:NixlKVManager.send_aux": (
        "self", "peer_name", "prefill_aux_index", "dst_aux_ptrs", "dst_aux_index",
    ),
    f"{_NIXL}:NixlKVManager.send_kvcache": (
        "self", "peer_name", "prefill_kv_indices", "dst_kv_ptrs", "dst_kv_indices", "dst_gpu_id",
        "dst_mem_kind",
    ),
    f"{_NIXL}:NixlKVManager.send_kvcache_slice": (
        "self", "peer_name", "prefill_kv_indices", "dst_kv_indices",
    ),
    f"{_NIXL}:NixlKVManager.transfer_worker": ("self", "queue", "staging_buffer", "worker_index"),
    f"{_COMMON}:AbortNotification.from_zmq": ("msg",),
    f"{_COMMON}:CommonKVManager.poison_deferred_ack_room": ("self", "room"),
    f"{_COMMON}:CommonKVManager.note_abort_ack": (
        "self", "bootstrap_room", "prefill_rank", "generation",
    ),
    f"{_COMMON}:CommonKVManager._prefill_unique_rank": ("self",),
    f"{_COMMON}:CommonKVManager._send_multipart_locked": ("self", "endpoint", "parts", "is_ipv6"),
    f"{_MOONCAKE}:MooncakeKVManager._handle_deferred_abort_notification": (
        "self",
        "notification",
        "room_active",
    ),
    f"{_COMMON}:CommonKVManager._handle_node_failure": ("self", "failed_bootstrap_addr"),
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

# What shims.py makes up for there, what only NIXL's classes need, and what Mooncake's classes have
# themselves.
_NOT_0_5_22 = (
    f"{_COMMON}:CommonKVReceiver._send_bootstrap_message",
    f"{_COMMON}:AbortNotification.from_zmq",
    f"{_COMMON}:CommonKVReceiver.__init__",
    f"{_COMMON}:CommonKVReceiver._register_kv_args",
    f"{_COMMON}:CommonKVReceiver.send_metadata",
    f"{_COMMON}:CommonKVSender.__init__",
    f"{_COMMON}:CommonKVSender.abort",
)
SEAMS_0_5_22: Seams = {
    path: parameters
    for path, parameters in SEAMS_0_5_23.items()
    if path not in _NOT_0_5_22 and not path.startswith(_NIXL)
} | {
    f"{_MOONCAKE}:MooncakeKVManager.add_transfer_request": (
        "self", "bootstrap_room", "kv_indices", "index_slice", "is_last_chunk", "aux_index",
        "state_indices", "num_kv_tokens", "trace_ctx", "wait_event",
    ),
    f"{_MOONCAKE}:MooncakeKVSender.__init__": (
        "self", "mgr", "bootstrap_addr", "bootstrap_room", "req_has_disagg_prefill_dp_rank",
    ),
    f"{_MOONCAKE}:MooncakeKVSender.abort": ("self",),
    f"{_MOONCAKE}:MooncakeKVReceiver.__init__": (
        "self", "mgr", "bootstrap_addr", "bootstrap_room",
    ),
    f"{_MOONCAKE}:MooncakeKVReceiver._register_kv_args": ("self",),
    f"{_MOONCAKE}:MooncakeKVReceiver.send_metadata": (
        "self", "kv_indices", "aux_index", "state_indices", "decode_prefix_len",
        "device_kv_indices",
    ),
    f"{_COMMON}:CommonKVReceiver._connect_to_bootstrap_server": ("bootstrap_info",),
}
# fmt: on

# Modules of SGLang whose rules are restated here, or may be, and that need have no seam;
# CONTRIBUTING.md says where.
RESTATED = (
    "sglang.srt.arg_groups.deepseek_v4_hook",
    "sglang.srt.arg_groups.model_overrides.deepseek_v2",
    "sglang.srt.arg_groups.model_overrides.deepseek_v4",
    "sglang.srt.arg_groups.overrides",
    "sglang.srt.arg_groups.parallel_hook",
    "sglang.srt.arg_groups.pd_disaggregation_hook",
    "sglang.srt.arg_groups.pipeline",
    "sglang.srt.arg_groups.speculative_hook",
    "sglang.srt.arg_groups.validation_hook",
    "sglang.srt.disaggregation.decode",
    "sglang.srt.disaggregation.prefill",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.environ",
    "sglang.srt.layers.linear",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.models.llama_eagle3",
    "sglang.srt.plugins",
)
