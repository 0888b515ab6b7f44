"""The entry point that SGLang calls in every process, and the seams it uses.

    seam                                          why
    ServerArgs.add_cli_args            (after)    the plugin's flags on every parser
    ServerArgs.from_cli_args           (around)   flags and environment -> one record
    "handle_other_validations"         (wrapped)  checks at start, when all is resolved
    disaggregation.utils.get_kv_class  (around)   our manager, sender, receiver, bootstrap server
    disaggregation.utils.setup_state_kv_args      what KV args do not say of the drafter
                                       (after)

Not opted in, each hook hands through what SGLang computed. Opted in, a missing or changed
seam stops the server (`compat.preflight`). SGLang logs and swallows a plugin's exceptions,
so failures here end the process with SystemExit if the plugin was asked for.

Top-level imports stay in the standard library: a plugin that cannot be imported is skipped
by SGLang without a stop.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
FROM_CLI_ARGS = "sglang.srt.server_args.ServerArgs.from_cli_args"
GET_KV_CLASS = "sglang.srt.disaggregation.utils.get_kv_class"
SETUP_STATE = "sglang.srt.disaggregation.utils.setup_state_kv_args"
VALIDATION = "handle_other_validations"


def register() -> None:
    """Called by SGLang in each process, before anything is parsed or started."""
    try:
        _register()
    except Exception as error:
        if not _asked_for():
            raise
        from sglang_mixkv.engine.releases import stop

        stop("the plugin failed to load", [repr(error)], "Report this with the message above")


def _asked_for() -> bool:
    """Whether this process can tell that the operator opted in."""
    from sglang_mixkv.config import ENABLE_ENV, truth

    return "--enable-mixkv" in sys.argv or truth(ENABLE_ENV, os.environ)


def _register() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_mixkv.cpu import support

    support.install()
    HookRegistry.register(ADD_CLI_ARGS, _add_flags, HookType.AFTER)
    HookRegistry.register(FROM_CLI_ARGS, _attach_config, HookType.AROUND)
    HookRegistry.register(GET_KV_CLASS, _kv_class, HookType.AROUND)
    HookRegistry.register(SETUP_STATE, _describe_components, HookType.AFTER)
    register_resolution_hook(VALIDATION)(_validate)


def _add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    from sglang_mixkv.config import add_flags

    add_flags(parser)


def _attach_config(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    from sglang_mixkv.config import ATTRIBUTE, resolve

    server_args = original(cls, args)
    setattr(server_args, ATTRIBUTE, resolve(args))
    return server_args


def _validate(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Runs once in the launching process, after SGLang has resolved its arguments."""
    from sglang_mixkv.config import config_of

    previous(server_args)
    config = config_of(server_args)
    if not config.enabled:
        return
    from sglang.srt.arg_groups.overrides import resolved_view

    from sglang_mixkv import refusals as startup
    from sglang_mixkv.engine import releases as compat

    startup.set_metrics_folder(server_args)
    compat.preflight(config)
    dead = [path for path in (ADD_CLI_ARGS, FROM_CLI_ARGS, GET_KV_CLASS, SETUP_STATE)
            if not is_live(path)]  # fmt: skip
    if dead:
        compat.stop(
            "SGLang did not apply these hooks",
            dead,
            "Look above for the reason that SGLang logged, or for another plugin on these seams",
        )
    unsupported = startup.refusals(resolved_view(server_args), config=config)
    if unsupported:
        compat.stop("this combination is not supported", unsupported, "Change it, or drop the flag")


def is_live(path: str) -> bool:
    """Whether SGLang has wrapped this target with one of our hooks in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return path in HookRegistry._patched


def _kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    stock = original(transfer_backend, class_type)
    if not _enabled_here():
        return stock
    from sglang.srt.disaggregation.utils import TransferBackend

    if transfer_backend != TransferBackend.MOONCAKE:
        return stock
    from sglang_mixkv.engine.mooncake import CLASSES

    return CLASSES.get(class_type.value, stock)


def _describe_components(_result: None, kv_args: Any, *args: Any, **kwargs: Any) -> None:
    if not _enabled_here():
        return
    from sglang_mixkv.engine.kv_args import describe

    draft = kwargs.get("draft_token_to_kv_pool", args[1] if len(args) > 1 else None)
    describe(kv_args, args[0] if args else kwargs["token_to_kv_pool"], draft)


def _enabled_here() -> bool:
    """Opted in, as the ServerArgs say that this process was started with."""
    from sglang.srt.runtime_context import get_server_args

    from sglang_mixkv.config import config_of

    try:
        server_args = get_server_args()
    except ValueError:  # nothing published in this process yet
        server_args = None
    return config_of(server_args).enabled
