"""The entry point that SGLang calls in every process, and the hooks that it registers.

Not opted in, each hook hands through what SGLang computed. Opted in, an unknown release or a
changed seam stops the server (`releases.preflight`). SGLang logs and swallows a plugin's
exceptions, so failures here end the process with SystemExit if the plugin was asked for.

An opted-in process never goes on as stock without a word. SGLang's launcher is checked while it
resolves its arguments. A process that hands out KV classes checks itself as well, once for its
ServerArgs (`releases.check_once`), since the launcher may have resolved them before plugins were
loaded. The contract with whoever builds ServerArgs and KV args by hand (a test, another tool):

    opted in by                    SGLANG_ENABLE_MIXKV=1, or the record in ServerArgs._mixkv
    KV args                        the attributes listed in engine/draft_pool.py
    no published ServerArgs        the classes are handed out (a bootstrap server alone); the
                                   check runs when a manager is built, with its ServerArgs
    ServerArgs resolved by hand    served: a device that is not set means host memory, the
                                   role is the manager's, speculation may be in get_spec() alone
    a stand-in for ServerArgs      served: only the installed SGLang is checked
    another transfer backend       stopped when a class is asked for
    the fake backend               SGLang's class: warm-up requests of a supported server use it

Top-level imports stay in the standard library: a plugin that cannot be imported is skipped
by SGLang without a stop.
"""

from __future__ import annotations

import argparse
import functools
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
FROM_CLI_ARGS = "sglang.srt.server_args.ServerArgs.from_cli_args"
GET_KV_CLASS = "sglang.srt.disaggregation.utils.get_kv_class"
VALIDATION = "handle_other_validations"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager"
_PREFILL, _DECODE = "sglang.srt.disaggregation.prefill", "sglang.srt.disaggregation.decode"
AROUND = {
    f"{_PREFILL}.PrefillBootstrapQueue._init_kv_manager": "handover.around_init",
    f"{_DECODE}.DecodePreallocQueue._init_kv_manager": "handover.around_init",
    f"{_DECODE}.DecodeTransferQueue.extend": "handover.around_extend",
    f"{_DECODE}.DecodePreallocQueue.resume_retracted_reqs": "handover.around_resume",
    f"{_TOKENIZER}.TokenizerManager._init_req_state": "rooms.around_request",
}
"""The function in `engine/` around each."""
_handed_out: dict[tuple[Any, Any], tuple[Any, type]] = {}
"""By transfer backend and kind, the ServerArgs that were checked, and the class."""


def register() -> None:
    """Called by SGLang in each process, before anything is parsed or started."""
    try:
        _register()
    except Exception as error:
        from sglang_mixkv.config import resolve_if_enabled

        if "--enable-mixkv" not in sys.argv and not resolve_if_enabled(None).enabled:
            raise
        from sglang_mixkv.engine.releases import stop

        remedy = "Report this with the message above"
        stop("MIXKV-START-02", "the plugin failed to load", [repr(error)], remedy)


def _register() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ADD_CLI_ARGS, _add_flags, HookType.AFTER)
    HookRegistry.register(FROM_CLI_ARGS, _attach_config, HookType.AROUND)
    HookRegistry.register(GET_KV_CLASS, _kv_class, HookType.AROUND)
    for path, name in AROUND.items():
        HookRegistry.register(path, functools.partial(_around, name), HookType.AROUND)
    register_resolution_hook(VALIDATION)(_validate)


def _around(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _is_enabled(_published()):
        return original(*args, **kwargs)
    hook = pkgutil.resolve_name(f"sglang_mixkv.engine.{name}")
    return hook(original, *args, **kwargs)


def _add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    from sglang_mixkv.config import add_flags

    add_flags(parser)


def _attach_config(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """Flags and environment become one record."""
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
    from sglang_mixkv.engine import releases

    releases.preflight(config, functions=False)
    _stop_unless_live(ADD_CLI_ARGS, FROM_CLI_ARGS, GET_KV_CLASS, *AROUND)
    releases.stop_if_refused(server_args, releases.rules())


def _stop_unless_live(*paths: str) -> None:
    """Stop this process where SGLang did not wrap one of these with its hook."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_mixkv.engine import releases

    dead = [path for path in paths if path not in HookRegistry._patched]
    if dead:
        releases.stop(
            "MIXKV-START-02",
            "SGLang did not apply these hooks",
            dead,
            "Look above for the reason that SGLang logged, or for another plugin on these seams",
        )


def _kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """SGLang's classes, with our mixins. Its schedulers ask with each request: what was checked and
    handed out once for these ServerArgs is only looked up."""
    server_args = _published()
    checked, handed_out = _handed_out.get((transfer_backend, class_type), (None, None))
    if handed_out is not None and checked is server_args:
        return handed_out
    if not _is_enabled(server_args):
        return original(transfer_backend, class_type)
    _check(server_args, transfer_backend.value)
    from sglang_mixkv.engine.classes import mixed

    handed_out = mixed(original, transfer_backend, class_type)
    if server_args is not None:
        _handed_out[transfer_backend, class_type] = server_args, handed_out
    return handed_out


def _check(server_args: Any, backend: str) -> None:
    """Stop this process rather than hand out a class that would go on as stock."""
    from sglang_mixkv import refusals
    from sglang_mixkv.engine import releases

    _stop_unless_live(*AROUND)
    if server_args is not None:
        releases.check_once(server_args)
    if backend not in ("fake", *refusals.BACKENDS):
        releases.stop_if([str(refusals.OTHER_BACKEND)])


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
