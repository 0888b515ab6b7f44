"""Everything inside SGLang that the plugin touches: each seam, with why.

Of this package only `plugin.py`, `engine/` and `tools/plan_*.py` use SGLang. `preflight`
(releases.py) looks for these before an opted-in server starts, and tests/protocol/test_seams.py
looks for uses that are not here. A seam names the parameters that are passed or read by name;
SGLang may have more.
"""

from __future__ import annotations

from typing import NamedTuple

_COMMON = "sglang.srt.disaggregation.common.conn"
_CONTEXT = "sglang.srt.runtime_context"
_MANAGER, _SENDER = f"{_COMMON}:CommonKVManager", f"{_COMMON}:CommonKVSender"
_RECEIVER, _BOOTSTRAP = f"{_COMMON}:CommonKVReceiver", f"{_COMMON}:CommonKVBootstrapServer"
_PREFILL, _DECODE = "sglang.srt.disaggregation.prefill", "sglang.srt.disaggregation.decode"


class Seam(NamedTuple):
    """`path`: module:name. `parameters`: those of the function that the plugin relies on."""

    path: str
    why: str
    parameters: tuple[str, ...] = ()


# fmt: off
HOOKED = (
    Seam("sglang.srt.server_args:ServerArgs.add_cli_args", "flags", ("parser",)),
    Seam("sglang.srt.server_args:ServerArgs.from_cli_args", "flags and variables become a record",
         ("args",)),
    Seam("sglang.srt.disaggregation.utils:get_kv_class", "SGLang's classes with a mixin each",
         ("transfer_backend", "class_type")),
    Seam(f"{_PREFILL}:PrefillBootstrapQueue._init_kv_manager", "SGLang sees no draft pool"),
    Seam(f"{_DECODE}:DecodePreallocQueue._init_kv_manager", "SGLang sees no draft pool"),
    Seam(f"{_DECODE}:DecodeTransferQueue.extend", "which request a room belongs to",
         ("decode_reqs",)),
    Seam(f"{_DECODE}:DecodePreallocQueue.resume_retracted_reqs", "these have new draft rows"),
    Seam("sglang.srt.managers.tokenizer_manager:TokenizerManager._init_req_state",
         "refuses a room number that is used twice", ("obj", "request")),
    Seam("sglang.srt.managers.scheduler:Scheduler.attach_hicache_storage_wrapped",
         "replaced on a scheduler with a drafter: no storage tier", ("recv_req",)),
)
OVERRIDDEN = (
    Seam(f"{_MANAGER}.__init__", "makes this rank's side of the channel",
         ("args", "disaggregation_mode", "server_args", "is_mla_backend")),
    Seam(f"{_MANAGER}._register_topology_row", "this rank's row travels with SGLang's",
         ("url", "payload")),
    Seam(f"{_MANAGER}.try_ensure_parallel_info", "waits for the facts and connections of prefill",
         ("bootstrap_addr",)),
    Seam(f"{_MANAGER}.apply_prefill_status", "ignores an abort on prefill without deferred release",
         ("failure_reason",)),
    Seam(f"{_SENDER}.__init__", "fails a room number that is in use",
         ("mgr", "bootstrap_addr", "bootstrap_room")),
    Seam(f"{_SENDER}.init", "begins a room", ("num_kv_indices",)),
    Seam(f"{_SENDER}.send", "hands a chunk to the channel, too", ("kv_indices",)),
    Seam(f"{_SENDER}.poll", "Success once everything is packed"),
    Seam(f"{_SENDER}.pop_decode_prefix_len", "the number of the first token that is sent"),
    Seam(f"{_SENDER}.clear", "ends a room"),
    Seam(f"{_SENDER}.abort", "ends a room, and notifies decode"),
    Seam(f"{_RECEIVER}.__init__", "fails a room number that is in use",
         ("mgr", "bootstrap_addr", "bootstrap_room")),
    Seam(f"{_RECEIVER}.init", "refuses a prefill server before its metadata", ("prefill_dp_rank",)),
    Seam(f"{_RECEIVER}.send_metadata", "opens a room behind SGLang's message",
         ("kv_indices", "decode_prefix_len")),
    Seam(f"{_RECEIVER}.poll", "Success once draft KV is in place, or cleared"),
    Seam(f"{_RECEIVER}.clear", "ends a room"),
    Seam(f"{_BOOTSTRAP}._setup_routes", "GET /mixkv"),
    Seam(f"{_BOOTSTRAP}._handle_route_put", "takes a rank's row out of its registration",
         ("request",)),
)
CALLED = (
    Seam(f"{_BOOTSTRAP}._is_ready", "no rows before all ranks have registered"),
    Seam(f"{_MANAGER}.record_failure", "why a request fails", ("bootstrap_room", "failure_reason")),
    Seam(f"{_MANAGER}.send_kv_status_message", "decode is notified of an abort on prefill",
         ("targets", "bootstrap_room", "status", "failure_reason")),
    Seam(f"{_RECEIVER}.ensure_abort_notified", "prefill is notified of a request that fails here"),
    Seam("sglang.srt.arg_groups.resolution_hooks:register_resolution_hook", "checks at start",
         ("name",)),
    Seam("sglang.srt.distributed.device_communicators.mooncake_transfer_engine:"
         "get_ib_devices_for_gpu", "RDMA devices of this GPU", ("ib_device_str", "gpu_id")),
    Seam("sglang.srt.arg_groups.overrides:resolved_view", "what flags became", ("server_args",)),
    Seam("sglang.srt.configs.model_config:ModelConfig.from_server_args", "KV heads of a model",
         ("server_args", "model_path", "model_revision", "is_draft_model")),
    Seam("sglang.srt.plugins.hook_registry:HookRegistry.register", "hooks",
         ("target", "hook", "hook_type")),
    *(Seam(f"{_CONTEXT}:{name}", "this process's configuration") for name in (
        "get_disagg", "get_parallel", "get_server_args", "get_spec")),
)
# fmt: on
SEAMS = (*HOOKED, *OVERRIDDEN, *CALLED)
