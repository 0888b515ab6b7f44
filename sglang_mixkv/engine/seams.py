"""The plugin's dependencies on SGLang, with reasons. SEAMS: the functions that the plugin hooks,
overrides or calls. ATTRIBUTES: the attributes that the plugin reads or sets.

In this package, only `plugin.py`, `engine/`, `guards/` and `tools/plan_*.py` use SGLang. `check`
(releases.py) verifies each entry in every opted-in process, and tests/protocol/test_seams.py finds
uses that are not listed here. `doctor --against` (tools/against.py) reads further dependencies of
`plan` in that tool's source. Each function is listed with the parameters that the plugin passes or
reads by name (SGLang may have more) and, after an arrow, the plugin's function that wraps it.
"""

from __future__ import annotations

_SRT = "sglang.srt."
_ARGS, _PD = f"{_SRT}server_args:ServerArgs.", f"{_SRT}disaggregation."
_PREFILL, _DECODE = f"{_PD}prefill:PrefillBootstrapQueue.", f"{_PD}decode:DecodePreallocQueue."
_TOKENIZER = f"{_SRT}managers.tokenizer_manager:TokenizerManager."
_SCHEDULER = f"{_SRT}managers.scheduler:Scheduler."
_DISPATCH = f"{_SRT}managers.data_parallel_controller:DataParallelController."
_CONN, _CONTEXT, _POOL = f"{_PD}common.conn:", f"{_SRT}runtime_context:", f"{_SRT}mem_cache."
_STORE = f"{_POOL}storage.mooncake_store.mooncake_store:MooncakeStore."
_MANAGER, _SENDER, _RECEIVER, _SERVER = (
    f"{_CONN}CommonKV{kind}." for kind in ("Manager", "Sender", "Receiver", "BootstrapServer")
)

_FUNCTIONS = {
    f"{_ARGS}add_cli_args": "parser -> plugin.add_flags",
    f"{_ARGS}from_cli_args": "args -> plugin.attach_config",  # attaches flags and variables
    # adds a mixin to SGLang's classes
    f"{_PD}utils:get_kv_class": "transfer_backend class_type -> plugin.kv_class",
    f"{_PREFILL}_init_kv_manager": "-> engine.pool_hooks.around_init",  # hides the draft pool
    f"{_DECODE}_init_kv_manager": "-> engine.pool_hooks.around_init",  # the same
    # records the request of each handle
    f"{_PD}decode:DecodeTransferQueue.extend": "decode_reqs -> engine.pool_hooks.around_extend",
    # resumed requests have new draft rows
    f"{_DECODE}resume_retracted_reqs": "-> engine.pool_hooks.around_resume",
    # refuse a room number that is missing, used twice or out of range, before SGLang uses it: in a
    # batch, in its tokenizer, in its DP controller, in its schedulers
    f"{_SRT}managers.io_struct:GenerateReqInput._normalize_bootstrap_params":
        "-> guards.room_reuse.around_numbering",
    f"{_TOKENIZER}_init_req_state": "obj request -> guards.room_reuse.around_request",
    f"{_DISPATCH}follow_bootstrap_room_scheduler": "req -> guards.room_reuse.around_dispatch",
    f"{_DISPATCH}round_robin_scheduler": "req",  # a scheduler then refuses it
    f"{_SCHEDULER}handle_generate_request": "recv_req -> guards.room_reuse.around_intake",
    f"{_SCHEDULER}handle_embedding_request": "recv_req -> guards.room_reuse.around_intake",
    # answers a refused request
    f"{_SRT}managers.scheduler_components.output_sender:SenderWrapper.send_output":
        "output recv_obj",
    # makes this rank's side of the channel
    f"{_MANAGER}__init__": "args disaggregation_mode server_args is_mla_backend",
    f"{_MANAGER}_register_topology_row": "url payload",  # adds this rank's row to SGLang's
    f"{_MANAGER}try_ensure_parallel_info": "bootstrap_addr",  # waits for facts and connections
    f"{_MANAGER}_resolve_rank_mapping": "info",  # refuses a server with too many ranks
    f"{_MANAGER}apply_prefill_status": "failure_reason",  # ignores aborts without deferred release
    f"{_MANAGER}record_failure": "bootstrap_room failure_reason",  # records why a request fails
    # notifies decode of an abort on prefill
    f"{_MANAGER}send_kv_status_message": "targets bootstrap_room status failure_reason",
    f"{_SENDER}__init__": "mgr bootstrap_addr bootstrap_room",  # fails if the number is in use
    f"{_SENDER}init": "num_kv_indices",  # begins a room
    f"{_SENDER}send": "indices_event kv_indices num_kv_tokens",  # also packs the chunk
    f"{_SENDER}pop_decode_prefix_len": "",  # which token is sent first
    f"{_SENDER}poll": "",  # Success once everything is packed
    f"{_SENDER}clear": "",  # ends a room
    f"{_SENDER}abort": "",  # ends a room, and notifies decode
    f"{_RECEIVER}__init__": "mgr bootstrap_addr bootstrap_room",  # fails if the number is in use
    f"{_RECEIVER}init": "prefill_dp_rank",  # refuses a prefill server before its metadata
    f"{_RECEIVER}send_metadata": "kv_indices decode_prefix_len",  # also opens the request
    f"{_RECEIVER}poll": "",  # Success once draft KV is in place, or cleared
    f"{_RECEIVER}clear": "",  # ends a room
    f"{_RECEIVER}ensure_abort_notified": "",  # notifies prefill of a request that fails
    f"{_SERVER}_setup_routes": "",  # GET /mixkv
    f"{_SERVER}_handle_route_put": "request",  # reads a rank's row from its registration
    # attaches no storage tier except Mooncake's store to a drafter's scheduler
    f"{_SCHEDULER}attach_hicache_storage_wrapped": "recv_req -> engine.storage.around_attach",
    # renames the objects of a rank's heads in Mooncake's store
    f"{_STORE}register_mem_pool_host": "-> engine.storage.around_register",
    f"{_SRT}arg_groups.resolution_hooks:register_resolution_hook": "name",  # checks at start
    f"{_SRT}arg_groups.overrides:resolved_view": "server_args",  # the flags as resolved
    # RDMA devices of this GPU
    f"{_SRT}distributed.device_communicators.mooncake_transfer_engine:get_ib_devices_for_gpu":
        "ib_device_str gpu_id",
    # KV heads of a model
    f"{_SRT}configs.model_config:ModelConfig.from_server_args":
        "server_args model_path model_revision is_draft_model",
    f"{_SRT}plugins.hook_registry:HookRegistry.register": "target hook hook_type",  # hooks
    # loads plugins in tokenizer workers
    f"{_SRT}managers.multi_tokenizer_mixin:write_data_for_multi_tokenizer":
        "port_args server_args scheduler_info -> engine.workers.around_write",
    f"{_SRT}plugins:load_plugins": "",
    # this process's configuration
    f"{_CONTEXT}get_disagg": "", f"{_CONTEXT}get_parallel": "",
    f"{_CONTEXT}get_server_args": "", f"{_CONTEXT}get_serving": "", f"{_CONTEXT}get_spec": "",
}  # fmt: skip
_SPLIT = {path: text.partition("-> ") for path, text in _FUNCTIONS.items()}
SEAMS = {path: tuple(parameters.split()) for path, (parameters, _, _) in _SPLIT.items()}
HOOKS = {path.replace(":", "."): around for path, (_, _, around) in _SPLIT.items() if around}
"""Maps a target, as SGLang's HookRegistry names it, to the plugin's function."""

_NAMES = {
    # a rank's facts; its tables, which room_reuse.py keeps consistent
    _MANAGER: "attn_cp_rank attn_dp_rank attn_tp_rank attn_tp_size connection_lock connection_pool "
        "dcp_size enable_deferred_decode_kv_release failure_records is_hybrid_mla_backend "
        "is_mla_backend kv_args kv_status_msg_carries_reason local_ip pp_rank pp_size "
        "prefill_info_table rank_port req_to_decode_prefix_len request_status system_dp_rank "
        "transfer_infos",
    _SENDER: "bootstrap_room conclude_state kv_mgr",  # a room number, and its end
    # the same; a request's ranks; ABORTs to other ranks over separate sockets
    _RECEIVER: "_socket_cache _socket_locks abort_notified bootstrap_addr bootstrap_infos "
        "bootstrap_room conclude_state kv_mgr",
    _SERVER: "app attn_cp_size attn_tp_size dp_size pp_size",  # GET /mixkv
    # the events of early sends, and of forwards
    f"{_PD}prefill:SchedulerDisaggregationPrefillMixin": "_early_send_wait_event",
    _SCHEDULER: "disaggregation_mode forward_stream ipc_channels",
    # a scheduler's answer to a refused request
    f"{_SRT}managers.scheduler_components.ipc_channels:SchedulerIpcChannels": "send_to_tokenizer",
    f"{_SRT}managers.io_struct:AbortReq": "finished_reason rid",
    # a rank's address, with the names that the response to GET /route uses
    f"{_CONN}PrefillRankInfo": "rank_ip rank_port",
    # a server's sizes, and the TP ranks that requests contact
    f"{_CONN}PrefillServerInfo": "attn_cp_size attn_tp_size dp_size pp_size target_tp_ranks",
    # the decode ranks of a request, which are notified
    f"{_PD}mooncake.conn:TransferInfo": "dst_port endpoint is_dummy",
    f"{_PD}nixl.conn:TransferInfo": "dst_port endpoint is_dummy",
    # chunks that are held back on their way to NIXL's workers; another agent after a restore
    f"{_PD}nixl.conn:NixlKVManager": "agent register_buffer_to_engine transfer_queues",
    f"{_PD}common.utils:TransferKVChunk": "room",
    f"{_PD}base.conn:KVPoll": "Failed Success Transferring WaitingForInput",
    f"{_PD}utils:DisaggregationMode": "DECODE PREFILL",
    # the buffers that SGLang moves; RDMA devices of this GPU
    f"{_PD}base.conn:KVArgs": "aux_item_lens gpu_id ib_device is_hybrid_mla_backend kv_data_ptrs "
        "kv_item_lens kv_layer_ids num_draft_entries page_size state_data_ptrs "
        "state_dim_per_tensor state_item_lens state_types total_kv_head_num",
    # the draft pool, which is hidden, and a request's rows in it
    _PREFILL: "draft_token_to_kv_pool kv_manager scheduler",
    _DECODE: "draft_token_to_kv_pool kv_manager req_to_token_pool scheduler",
    f"{_PD}decode:DecodeRequest": "kv_receiver req",
    f"{_POOL}memory_pool:ReqToTokenPool": "req_to_token",
    f"{_SRT}managers.schedule_batch:Req": "finished kv rid seqlen spec_correct_drafts_histogram",
    f"{_SRT}managers.schedule_batch:ReqKvInfo": "req_pool_idx",
    # the layout of its rows, and any parts besides K and V
    f"{_POOL}memory_pool:MHATokenToKVPool": "dtype head_num k_buffer k_scale_buffer page_size "
        "kv_cache_layout maybe_get_custom_mem_pool native_k_scale_buffer v_buffer",
    f"{_POOL}memory_pool:HybridLinearKVPool": "full_kv_pool",
    f"{_POOL}swa_memory_pool:SWAKVPool": "full_kv_pool",
    # the names of objects in Mooncake's store, and storage that is attached later
    _STORE: "mha_suffix storage_config",
    f"{_POOL}hicache_storage:HiCacheStorageConfig": "tp_size",
    f"{_SRT}managers.io_struct:AttachHiCacheStorageReqInput": "hicache_storage_backend",
    # room numbers in use
    _TOKENIZER: "disaggregation_mode rid_to_state",
    f"{_SRT}managers.tokenizer_manager:ReqState": "obj",
    f"{_SRT}managers.io_struct:GenerateReqInput": "bootstrap_host bootstrap_port bootstrap_room "
        "parallel_sample_num rid",
    # the hooks applied; timeouts; the drafter's heads
    f"{_SRT}plugins.hook_registry:HookRegistry": "_patched",
    f"{_SRT}environ:Envs": "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT "
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT SGLANG_RUST_SERVER",
    f"{_SRT}configs.model_config:ModelConfig": "get_total_num_kv_heads hf_config",
    # a rank's heads, and labels of metrics
    f"{_SRT}arg_groups.fields.parallel:Parallel": "attn_tp_rank attn_tp_size dp_rank moe_ep_rank "
        "pp_rank tp_rank",
    f"{_SRT}arg_groups.fields.serving:Serving": "weight_version",  # compared by both sides
    # rules of refusals.py and releases.py, a drafter's window, metrics
    _ARGS: "attention_backend attn_cp_size dcp_size decode_attention_backend decoupled_spec_role "
        "device disaggregation_decode_allocation_policy disaggregation_decode_enable_radix_cache "
        "disaggregation_decode_host_receive_threshold disaggregation_decode_retraction_backup "
        "disaggregation_mode disaggregation_transfer_backend enable_flexkv enable_hisparse "
        "enable_kv_cache_sharding enable_memory_saver enable_metrics grpc_mode smg_grpc_mode "
        "enable_multi_layer_eagle enable_pd_role_switch enable_unified_cache_external_linker "
        "enable_unified_memory extra_metric_labels hicache_storage_backend kv_canary "
        "prefill_attention_backend radix_cache_backend served_model_name speculative_algorithm "
        "speculative_draft_attention_backend speculative_draft_model_path use_ray "
        "speculative_draft_model_revision speculative_draft_sink_size speculative_eagle_topk "
        "speculative_draft_window_size",
}  # fmt: skip
ATTRIBUTES = {path.rstrip("."): tuple(names.split()) for path, names in _NAMES.items()}
LATER = {
    "0.5.21": {
        "disaggregation_decode_allocation_policy", "enable_kv_cache_sharding", "indices_event",
    },
    "0.5.22": {"indices_event"},
}  # fmt: skip
"""Maps a release to the parameters and attributes that it lacks, as well as their features."""
