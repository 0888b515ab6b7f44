"""The entry point that SGLang calls in every process, and the hooks that it registers.

In a process that has not opted in, each hook returns the result of SGLang's function. An opted-in
process never silently runs without the plugin: `validate` checks SGLang's launcher while it
resolves its arguments, and `kv_class` checks each process, once per ServerArgs, since a launcher
may resolve them before it loads plugins. If ServerArgs are not published (in a standalone bootstrap
server), the check runs when a manager is built. SGLang logs and swallows a plugin's exceptions, so
a failure here ends an opted-in process with SystemExit.

Import only the standard library at top level: SGLang skips a plugin that it cannot import, and
starts without it.
"""

from __future__ import annotations

import argparse
import functools
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

VALIDATION = "handle_other_validations"
_hook = functools.cache(pkgutil.resolve_name)
_handed_out: dict[tuple[Any, Any], tuple[Any, type]] = {}  # (ServerArgs, class)


def register() -> None:
    """Register the hooks. SGLang calls this in each process before it parses or starts anything."""
    try:
        _register()
    except Exception as error:
        from sglang_mixkv.config import PLAN_ENV, resolve_if_enabled

        is_asked = "--enable-mixkv" in sys.argv or os.environ.get(PLAN_ENV)
        if not is_asked and not resolve_if_enabled(None).enabled:
            raise
        from sglang_mixkv.engine.releases import stop

        remedy = "Report this with the message above"
        stop("MIXKV-START-02", "the plugin failed to load", [repr(error)], remedy)


def _register() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_mixkv.config import PLAN_ENV
    from sglang_mixkv.engine.seams import HOOKS

    for target, name in HOOKS.items():
        HookRegistry.register(target, functools.partial(_around, name), HookType.AROUND)
    if os.environ.get(PLAN_ENV):  # `plan` reports what `validate` would refuse
        return _hook("sglang_mixkv.tools.plan_launch.register")()
    register_resolution_hook(VALIDATION)(validate)


def _around(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the hook if this process has opted in; the hooks in this file check that themselves."""
    if not (name.startswith("plugin.") or _is_enabled(_published())):
        return original(*args, **kwargs)
    return _hook(f"sglang_mixkv.{name}")(original, *args, **kwargs)


def add_flags(original: Callable[..., None], parser: argparse.ArgumentParser) -> None:
    from sglang_mixkv.config import add_flags

    original(parser)
    add_flags(parser)


def attach_config(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    from sglang_mixkv.config import attach, resolve_if_enabled

    server_args = original(cls, args)
    attach(server_args, resolve_if_enabled(args))
    return server_args


def validate(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Check the launching process, once SGLang has resolved its arguments."""
    from sglang_mixkv.config import attach, config_of

    previous(server_args)
    config = config_of(server_args)
    if config.enabled:
        from sglang_mixkv.engine import releases

        attach(server_args, config)  # for the ranks
        releases.check(server_args, functions=False)


def kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Return SGLang's class with the plugin's mixin. Schedulers call this for each request."""
    server_args = _published()
    checked, known = _handed_out.get((transfer_backend, class_type), (None, None))
    if known is not None and checked is server_args:
        return known
    if not _is_enabled(server_args):
        return original(transfer_backend, class_type)
    from sglang_mixkv import refusals
    from sglang_mixkv.engine import releases

    if server_args is not None:
        releases.check_once(server_args)
    if transfer_backend.value not in ("fake", *refusals.BACKENDS):
        releases.stop_if([str(refusals.OTHER_BACKEND)])
    from sglang_mixkv.engine.manager import mixed

    stock = original(transfer_backend, class_type)
    found = mixed(stock, transfer_backend.value, class_type.value)
    if server_args is not None:
        _handed_out[transfer_backend, class_type] = server_args, found
    return found


def _published() -> Any:
    """Return this process's ServerArgs. None means that the environment decides: they are not
    published yet, or are elsewhere in an unsupported SGLang."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, ValueError):
        return None


def _is_enabled(server_args: Any) -> bool:
    from sglang_mixkv.config import config_of

    return config_of(server_args).enabled
