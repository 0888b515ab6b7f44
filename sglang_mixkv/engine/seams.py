"""Every function inside SGLang that the plugin hooks, overrides or calls, each with the reason.

Of this package only `plugin.py`, `engine/` and `tools/plan_*.py` use SGLang. `check` (releases.py)
looks for these in each opted-in process, and tests/protocol/test_seams.py for uses that are not
here. With each are the parameters that are passed or read by name; SGLang may have more.
"""

from __future__ import annotations

_SRT = "sglang.srt."
_CONN, _QUEUES = f"{_SRT}disaggregation.common.conn:", f"{_SRT}disaggregation."

HOOKS = {
    f"{_SRT}server_args:ServerArgs.add_cli_args": "plugin.add_flags",
    f"{_SRT}server_args:ServerArgs.from_cli_args": "plugin.attach_config",
    f"{_SRT}disaggregation.utils:get_kv_class": "plugin.kv_class",
    f"{_QUEUES}prefill:PrefillBootstrapQueue._init_kv_manager": "engine.handover.around_init",
    f"{_QUEUES}decode:DecodePreallocQueue._init_kv_manager": "engine.handover.around_init",
    f"{_QUEUES}decode:DecodeTransferQueue.extend": "engine.handover.around_extend",
    f"{_QUEUES}decode:DecodePreallocQueue.resume_retracted_reqs": "engine.handover.around_resume",
    f"{_SRT}managers.tokenizer_manager:TokenizerManager._init_req_state":
        "engine.rooms.around_request",
}  # fmt: skip
"""The plugin's function around each."""

_PARAMETERS = {
    f"{_SRT}server_args:ServerArgs.": {
        "add_cli_args": "parser",  # flags
        "from_cli_args": "args",  # flags and variables become a record
    },
    f"{_SRT}disaggregation.utils:": {
        "get_kv_class": "transfer_backend class_type",  # SGLang's classes with a mixin each
    },
    f"{_QUEUES}prefill:PrefillBootstrapQueue.": {
        "_init_kv_manager": "",  # SGLang sees no draft pool
    },
    f"{_QUEUES}decode:DecodePreallocQueue.": {
        "_init_kv_manager": "",  # SGLang sees no draft pool
        "resume_retracted_reqs": "",  # these have new draft rows
    },
    f"{_QUEUES}decode:DecodeTransferQueue.": {
        "extend": "decode_reqs",  # which request a room belongs to
    },
    f"{_CONN}CommonKVManager.": {
        # makes this rank's side of the channel
        "__init__": "args disaggregation_mode server_args is_mla_backend",
        "_register_topology_row": "url payload",  # this rank's row travels with SGLang's
        "try_ensure_parallel_info": "bootstrap_addr",  # waits for prefill's facts and connections
        "apply_prefill_status": "failure_reason",  # ignores an abort without deferred release
        "record_failure": "bootstrap_room failure_reason",  # why a request fails
        # decode is notified of an abort on prefill
        "send_kv_status_message": "targets bootstrap_room status failure_reason",
    },
    f"{_CONN}CommonKVSender.": {
        "__init__": "mgr bootstrap_addr bootstrap_room",  # fails a room number that is in use
        "init": "num_kv_indices",  # begins a room
        "send": "kv_indices",  # hands a chunk to the channel, too
        "pop_decode_prefix_len": "",  # the number of the first token that is sent
        "poll": "",  # Success once everything is packed
        "clear": "",  # ends a room
        "abort": "",  # ends a room, and notifies decode
    },
    f"{_CONN}CommonKVReceiver.": {
        "__init__": "mgr bootstrap_addr bootstrap_room",  # fails a room number that is in use
        "init": "prefill_dp_rank",  # refuses a prefill server before its metadata
        "send_metadata": "kv_indices decode_prefix_len",  # opens a room behind SGLang's message
        "poll": "",  # Success once draft KV is in place, or cleared
        "clear": "",  # ends a room
        "ensure_abort_notified": "",  # prefill is notified of a request that fails here
    },
    f"{_CONN}CommonKVBootstrapServer.": {
        "_setup_routes": "",  # GET /mixkv
        "_handle_route_put": "request",  # takes a rank's row out of its registration
        "_is_ready": "",  # no rows before all ranks have registered
    },
    f"{_SRT}managers.tokenizer_manager:TokenizerManager.": {
        "_init_req_state": "obj request",  # refuses a room number that is used twice
    },
    f"{_SRT}managers.scheduler:Scheduler.": {
        # replaced on a scheduler with a drafter: no storage tier
        "attach_hicache_storage_wrapped": "recv_req",
    },
    f"{_SRT}arg_groups.resolution_hooks:": {
        "register_resolution_hook": "name",  # checks at start
    },
    f"{_SRT}arg_groups.overrides:": {
        "resolved_view": "server_args",  # what flags became
    },
    f"{_SRT}distributed.device_communicators.mooncake_transfer_engine:": {
        "get_ib_devices_for_gpu": "ib_device_str gpu_id",  # RDMA devices of this GPU
    },
    f"{_SRT}configs.model_config:ModelConfig.": {
        # KV heads of a model
        "from_server_args": "server_args model_path model_revision is_draft_model",
    },
    f"{_SRT}plugins.hook_registry:HookRegistry.": {
        "register": "target hook hook_type",  # hooks
    },
    f"{_SRT}runtime_context:": {  # this process's configuration
        "get_disagg": "", "get_parallel": "", "get_server_args": "", "get_spec": "",
    },
}  # fmt: skip
SEAMS = {
    where + name: tuple(parameters.split())
    for where, functions in _PARAMETERS.items() for name, parameters in functions.items()
}  # fmt: skip


def target_of(path: str) -> str:
    """As SGLang's HookRegistry names it."""
    return path.replace(":", ".")
