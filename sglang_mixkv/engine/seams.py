"""Every function inside SGLang that the plugin hooks, overrides or calls. Why is said there.

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
    f"{_SRT}server_args:ServerArgs.": {"add_cli_args": "parser", "from_cli_args": "args"},
    f"{_SRT}disaggregation.utils:": {"get_kv_class": "transfer_backend class_type"},
    f"{_QUEUES}prefill:PrefillBootstrapQueue.": {"_init_kv_manager": ""},
    f"{_QUEUES}decode:DecodePreallocQueue.": {"_init_kv_manager": "", "resume_retracted_reqs": ""},
    f"{_QUEUES}decode:DecodeTransferQueue.": {"extend": "decode_reqs"},
    f"{_CONN}CommonKVManager.": {
        "__init__": "args disaggregation_mode server_args is_mla_backend",
        "_register_topology_row": "url payload",
        "try_ensure_parallel_info": "bootstrap_addr",
        "apply_prefill_status": "failure_reason",
        "record_failure": "bootstrap_room failure_reason",
        "send_kv_status_message": "targets bootstrap_room status failure_reason",
    },
    f"{_CONN}CommonKVSender.": {
        "__init__": "mgr bootstrap_addr bootstrap_room",
        "init": "num_kv_indices",
        "send": "kv_indices",
        "pop_decode_prefix_len": "", "poll": "", "clear": "", "abort": "",
    },
    f"{_CONN}CommonKVReceiver.": {
        "__init__": "mgr bootstrap_addr bootstrap_room",
        "init": "prefill_dp_rank",
        "send_metadata": "kv_indices decode_prefix_len",
        "poll": "", "clear": "", "ensure_abort_notified": "",
    },
    f"{_CONN}CommonKVBootstrapServer.": {
        "_setup_routes": "", "_handle_route_put": "request", "_is_ready": "",
    },
    f"{_SRT}managers.tokenizer_manager:TokenizerManager.": {"_init_req_state": "obj request"},
    f"{_SRT}managers.scheduler:Scheduler.": {"attach_hicache_storage_wrapped": "recv_req"},
    f"{_SRT}arg_groups.resolution_hooks:": {"register_resolution_hook": "name"},
    f"{_SRT}arg_groups.overrides:": {"resolved_view": "server_args"},
    f"{_SRT}distributed.device_communicators.mooncake_transfer_engine:": {
        "get_ib_devices_for_gpu": "ib_device_str gpu_id",
    },
    f"{_SRT}configs.model_config:ModelConfig.": {
        "from_server_args": "server_args model_path model_revision is_draft_model",
    },
    f"{_SRT}plugins.hook_registry:HookRegistry.": {"register": "target hook hook_type"},
    f"{_SRT}runtime_context:": {
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
