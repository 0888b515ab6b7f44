"""The entry point that SGLang calls in every process, and the hooks that it registers.

    ServerArgs.add_cli_args               (after)    the plugin's flags on every parser
    ServerArgs.from_cli_args              (around)   flags and environment -> one record
    "handle_other_validations"            (wrapped)  checks at start, when all is resolved; the
                                                     record where no command line made one
    disaggregation.utils.get_kv_class     (around)   SGLang's classes, with our mixins
    _init_kv_manager of both queues       (around)   SGLang sees no draft pool; we get it
    DecodeTransferQueue.extend            (after)    a room learns its request, for the metrics
    DecodePreallocQueue                   (after)    draft rows of a retracted request
        .resume_retracted_reqs
    Scheduler                             (around)   a running server gets no storage tier; hooked
        .attach_hicache_storage_wrapped              in an opted-in scheduler's process alone

Not opted in, each hook hands through what SGLang computed. Opted in, a missing or changed
seam stops the server (`releases.preflight`). SGLang logs and swallows a plugin's exceptions,
so failures here end the process with SystemExit if the plugin was asked for.

An opted-in process never goes on as stock without a word. SGLang's launcher is checked while it
resolves its arguments. A process that hands out KV classes checks itself as well, once for its
ServerArgs (`engine/check.py`), since the launcher may have resolved them before plugins were
loaded. The contract with whoever builds ServerArgs and KV args by hand (a test, another tool):

    opted in by                    SGLANG_ENABLE_MIXKV=1, or the record in ServerArgs._mixkv
    KV args                        the attributes listed in engine/draft_pool.py
    no published ServerArgs        the classes are handed out (a bootstrap server alone); the
                                   check runs when a manager is built, with its ServerArgs
    ServerArgs resolved by hand    served: a device that is not set means host memory, the
                                   role is the manager's, speculation may be in get_spec() alone
    a stand-in for ServerArgs      served: only the installed SGLang is checked
    another transfer backend       stopped when a manager is asked for, or ServerArgs are
                                   published; else SGLang's class, and a warning
    the fake backend               SGLang's class: warm-up requests of a supported server use it

Top-level imports stay in the standard library: a plugin that cannot be imported is skipped
by SGLang without a stop.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(f"sglang.{__name__}")

ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
FROM_CLI_ARGS = "sglang.srt.server_args.ServerArgs.from_cli_args"
GET_KV_CLASS = "sglang.srt.disaggregation.utils.get_kv_class"
SCHEDULER = "sglang.srt.managers.scheduler"
ATTACH_STORAGE = f"{SCHEDULER}.Scheduler.attach_hicache_storage_wrapped"
VALIDATION = "handle_other_validations"
INIT_MANAGER = (
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager",
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager",
)
EXTEND_TRANSFERS = "sglang.srt.disaggregation.decode.DecodeTransferQueue.extend"
RESUME_RETRACTED = "sglang.srt.disaggregation.decode.DecodePreallocQueue.resume_retracted_reqs"
OF_QUEUES = (*INIT_MANAGER, EXTEND_TRANSFERS, RESUME_RETRACTED)


def register() -> None:
    """Called by SGLang in each process, before anything is parsed or started."""
    try:
        _register()
    except Exception as error:
        if not _asked_for():
            raise
        from sglang_mixkv.engine.releases import stop

        remedy = "Report this with the message above"
        stop("MIXKV-START-02", "the plugin failed to load", [repr(error)], remedy)


def _asked_for() -> bool:
    """Whether this process can tell that the operator opted in."""
    from sglang_mixkv.config import ENABLE_ENV, truth

    return "--enable-mixkv" in sys.argv or truth(ENABLE_ENV, os.environ)


def _register() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ADD_CLI_ARGS, _add_flags, HookType.AFTER)
    HookRegistry.register(FROM_CLI_ARGS, _attach_config, HookType.AROUND)
    HookRegistry.register(GET_KV_CLASS, _kv_class, HookType.AROUND)
    for path in INIT_MANAGER:
        HookRegistry.register(path, _hide_draft_pool, HookType.AROUND)
    HookRegistry.register(EXTEND_TRANSFERS, _note_requests, HookType.AFTER)
    HookRegistry.register(RESUME_RETRACTED, _note_retracted, HookType.AFTER)
    register_resolution_hook(VALIDATION)(_validate)


def _hide_draft_pool(original: Callable[[Any], Any], queue: Any) -> Any:
    if not _is_enabled(_published()):
        return original(queue)
    from sglang_mixkv.engine import handover

    return handover.around_init(original, queue)


def _note_requests(_result: Any, queue: Any, decode_reqs: Any) -> None:
    if _is_enabled(_published()):
        from sglang_mixkv.engine import handover

        handover.after_extend(queue, decode_reqs)


def _note_retracted(resumed: Any, queue: Any, *_args: Any, **_kwargs: Any) -> None:
    if _is_enabled(_published()):
        from sglang_mixkv.engine import handover

        handover.after_resume(resumed, queue)


def _add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    from sglang_mixkv.config import add_flags

    add_flags(parser)


def _attach_config(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    from sglang_mixkv.config import ATTRIBUTE, resolve_if_enabled

    server_args = original(cls, args)
    setattr(server_args, ATTRIBUTE, resolve_if_enabled(args))
    return server_args


def _validate(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Runs once in the launching process, after SGLang has resolved its arguments."""
    from sglang_mixkv.config import ATTRIBUTE, config_of

    previous(server_args)
    config = config_of(server_args)
    if not config.enabled:
        return
    setattr(server_args, ATTRIBUTE, config)  # ranks do as this process, whatever their environment
    from sglang_mixkv import refusals
    from sglang_mixkv.engine import check, releases

    refusals.set_metrics_folder(server_args)
    releases.preflight(config)
    _stop_unless_live(ADD_CLI_ARGS, FROM_CLI_ARGS, GET_KV_CLASS, *OF_QUEUES)
    check.stop_if_refused(server_args, releases.rules())


def _stop_unless_live(*paths: str) -> None:
    """Stop this process where SGLang did not apply one of these hooks."""
    from sglang_mixkv.engine import releases

    dead = [path for path in paths if not is_live(path)]
    if dead:
        releases.stop(
            "MIXKV-START-02",
            "SGLang did not apply these hooks",
            dead,
            "Look above for the reason that SGLang logged, or for another plugin on these seams",
        )


def is_live(path: str) -> bool:
    """Whether SGLang has wrapped this target with one of our hooks in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return path in HookRegistry._patched


def _kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """SGLang's schedulers ask with each request: what was checked once is only looked up."""
    server_args = _published()
    if not _is_enabled(server_args):
        return original(transfer_backend, class_type)
    guard_storage()
    handed_out, key = _handed_out(server_args), (transfer_backend, class_type)
    if key not in handed_out:
        _check(server_args, transfer_backend.value, class_type.value)
        from sglang_mixkv.engine.classes import mixed

        handed_out[key] = mixed(original, transfer_backend, class_type)
    return handed_out[key]


_of_arguments: tuple[Any, dict[Any, Any]] = (None, {})


def _handed_out(server_args: Any) -> dict[Any, Any]:
    """The classes that were handed out with these ServerArgs; before any are published, none."""
    global _of_arguments
    if server_args is None or server_args is not _of_arguments[0]:
        _of_arguments = (server_args, {})
    return _of_arguments[1]


def _check(server_args: Any, backend: str, kind: str) -> None:
    """Stop this process rather than hand out a class that would go on as stock."""
    from sglang_mixkv import refusals
    from sglang_mixkv.config import config_of
    from sglang_mixkv.engine import check

    _stop_unless_live(*OF_QUEUES)
    if server_args is not None:
        check.check_once(server_args, config_of(server_args))
    if backend == "fake" or backend in refusals.BACKENDS:
        return
    if server_args is not None or kind == "manager":
        check.stop_if([refusals.text_of(refusals.OTHER_BACKEND)])
    logger.warning(
        "[MIXKV-START-03] sglang-mixkv is enabled, but the %s of the %s backend is SGLang's own",
        kind,
        backend,
    )


def guard_storage() -> None:
    """From now on, ask before a storage tier is attached. A scheduler asks for KV classes before
    it binds what it does on requests."""
    if SCHEDULER not in sys.modules or is_live(ATTACH_STORAGE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ATTACH_STORAGE, _attach_storage, HookType.AROUND)
    HookRegistry.apply_hooks()
    _stop_unless_live(ATTACH_STORAGE)


def _attach_storage(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """`PUT /hicache/storage-backend` is answered with the reason, where the start would be."""
    server_args = _published()
    if not _is_enabled(server_args):
        return original(scheduler, recv_req)
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput

    from sglang_mixkv import refusals

    reason = refusals.storage_refusal(resolved_view(server_args))
    if reason is None:
        return original(scheduler, recv_req)
    logger.warning("[MIXKV-START-03] sglang-mixkv: no storage tier is attached: %s", reason)
    return AttachHiCacheStorageReqOutput(success=False, message=f"[MIXKV-START-03] {reason}")


def _published() -> Any:
    """The ServerArgs that this process was started with, None before they are published, and where
    an SGLang that is not known keeps them elsewhere: the environment says then who opted in."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, ValueError):
        return None


def _is_enabled(server_args: Any) -> bool:
    from sglang_mixkv.config import config_of

    return config_of(server_args).enabled
