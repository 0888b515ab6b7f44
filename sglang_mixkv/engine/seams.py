"""Every function inside SGLang that the plugin hooks, overrides or calls, each with the reason.

Of this package only `plugin.py`, `engine/` and `tools/plan_*.py` use SGLang. `check` (releases.py)
looks for these in each opted-in process, and tests/protocol/test_seams.py for uses that are not
here. With each are the parameters that are passed or read by name; SGLang may have more.
"""

from __future__ import annotations

_SRT = "sglang.srt."
_ARGS, _PD = f"{_SRT}server_args:ServerArgs.", f"{_SRT}disaggregation."
_PREFILL, _DECODE = f"{_PD}prefill:PrefillBootstrapQueue.", f"{_PD}decode:DecodePreallocQueue."
_TOKENIZER = f"{_SRT}managers.tokenizer_manager:TokenizerManager."
_CONN, _CONTEXT = f"{_PD}common.conn:CommonKV", f"{_SRT}runtime_context:"

HOOKS = {
    f"{_ARGS}add_cli_args": "plugin.add_flags",
    f"{_ARGS}from_cli_args": "plugin.attach_config",
    f"{_PD}utils:get_kv_class": "plugin.kv_class",
    f"{_PREFILL}_init_kv_manager": "engine.handover.around_init",
    f"{_DECODE}_init_kv_manager": "engine.handover.around_init",
    f"{_PD}decode:DecodeTransferQueue.extend": "engine.handover.around_extend",
    f"{_DECODE}resume_retracted_reqs": "engine.handover.around_resume",
    f"{_TOKENIZER}_init_req_state": "engine.rooms.around_request",
}
"""The plugin's function around each."""

_PARAMETERS = {
    f"{_ARGS}add_cli_args": "parser",  # flags
    f"{_ARGS}from_cli_args": "args",  # flags and variables become a record
    f"{_PD}utils:get_kv_class": "transfer_backend class_type",  # SGLang's classes with a mixin each
    f"{_PREFILL}_init_kv_manager": "",  # SGLang sees no draft pool
    f"{_DECODE}_init_kv_manager": "",  # SGLang sees no draft pool
    f"{_DECODE}resume_retracted_reqs": "",  # these have new draft rows
    f"{_PD}decode:DecodeTransferQueue.extend": "decode_reqs",  # which request a room belongs to
    # makes this rank's side of the channel
    f"{_CONN}Manager.__init__": "args disaggregation_mode server_args is_mla_backend",
    # this rank's row travels with SGLang's
    f"{_CONN}Manager._register_topology_row": "url payload",
    # waits for prefill's facts and connections
    f"{_CONN}Manager.try_ensure_parallel_info": "bootstrap_addr",
    # ignores an abort without deferred release
    f"{_CONN}Manager.apply_prefill_status": "failure_reason",
    # why a request fails
    f"{_CONN}Manager.record_failure": "bootstrap_room failure_reason",
    # decode is notified of an abort on prefill
    f"{_CONN}Manager.send_kv_status_message": "targets bootstrap_room status failure_reason",
    # fails a room number that is in use
    f"{_CONN}Sender.__init__": "mgr bootstrap_addr bootstrap_room",
    f"{_CONN}Sender.init": "num_kv_indices",  # begins a room
    f"{_CONN}Sender.send": "kv_indices",  # hands a chunk to the channel, too
    f"{_CONN}Sender.pop_decode_prefix_len": "",  # the number of the first token that is sent
    f"{_CONN}Sender.poll": "",  # Success once everything is packed
    f"{_CONN}Sender.clear": "",  # ends a room
    f"{_CONN}Sender.abort": "",  # ends a room, and notifies decode
    # fails a room number that is in use
    f"{_CONN}Receiver.__init__": "mgr bootstrap_addr bootstrap_room",
    f"{_CONN}Receiver.init": "prefill_dp_rank",  # refuses a prefill server before its metadata
    # opens a room behind SGLang's message
    f"{_CONN}Receiver.send_metadata": "kv_indices decode_prefix_len",
    f"{_CONN}Receiver.poll": "",  # Success once draft KV is in place, or cleared
    f"{_CONN}Receiver.clear": "",  # ends a room
    f"{_CONN}Receiver.ensure_abort_notified": "",  # prefill is notified of a request that fails
    f"{_CONN}BootstrapServer._setup_routes": "",  # GET /mixkv
    # takes a rank's row out of its registration
    f"{_CONN}BootstrapServer._handle_route_put": "request",
    f"{_CONN}BootstrapServer._is_ready": "",  # no rows before all ranks have registered
    f"{_TOKENIZER}_init_req_state": "obj request",  # refuses a room number that is used twice
    # replaced on a scheduler with a drafter: no storage tier
    f"{_SRT}managers.scheduler:Scheduler.attach_hicache_storage_wrapped": "recv_req",
    # checks at start
    f"{_SRT}arg_groups.resolution_hooks:register_resolution_hook": "name",
    f"{_SRT}arg_groups.overrides:resolved_view": "server_args",  # what flags became
    # RDMA devices of this GPU
    f"{_SRT}distributed.device_communicators.mooncake_transfer_engine:get_ib_devices_for_gpu":
        "ib_device_str gpu_id",
    # KV heads of a model
    f"{_SRT}configs.model_config:ModelConfig.from_server_args":
        "server_args model_path model_revision is_draft_model",
    f"{_SRT}plugins.hook_registry:HookRegistry.register": "target hook hook_type",  # hooks
    # this process's configuration
    f"{_CONTEXT}get_disagg": "", f"{_CONTEXT}get_parallel": "",
    f"{_CONTEXT}get_server_args": "", f"{_CONTEXT}get_spec": "",
}  # fmt: skip
SEAMS = {path: tuple(parameters.split()) for path, parameters in _PARAMETERS.items()}


def target_of(path: str) -> str:
    """As SGLang's HookRegistry names it."""
    return path.replace(":", ".")
