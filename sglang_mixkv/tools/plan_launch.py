"""With SGLANG_MIXKV_PLAN=FILE, a launch writes its resolved arguments as one row, and exits before
it loads a model. `plan` reads rows as well as lines.

HTTP, gRPC and Dynamo starts resolve their arguments (`resolve_once`), may add to them, and check
them (`check_server_args`). Both steps are hooked, but only if the variable is set.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn

import msgspec

from sglang_mixkv import __version__
from sglang_mixkv.config import PLAN_ENV, PLAN_GPU_ENV, Config, config_of, truth
from sglang_mixkv.engine.releases import sglang_version
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.tools.plan_server import GPUS, Server, as_on, resolved, server_of
from sglang_mixkv.tools.plan_shell import unreadable
from sglang_mixkv.tools.plan_text import Given

SCHEMA = 1
MARK = r'\{\s*"sglang_mixkv_plan"'
_SEEN = "_mixkv_planned"
_for_good = ExitStack()  # no exit, since this process ends


class LaunchRow(msgspec.Struct, frozen=True):
    """The row of a launch. `error`: what SGLang or the plugin reports if there is no `server`."""

    sglang_mixkv_plan: int
    plugin: str
    sglang: str
    server: Server | None = None
    error: str = ""


def rows_in(text: str) -> list[dict[str, Any]]:
    """Return the rows in a file or a log. Raises ValueError for one that is cut off."""
    decode = json.JSONDecoder().raw_decode
    return [decode(text, found.start())[0] for found in re.finditer(MARK, text)]


def read_row(given: Given, role: str) -> Server | None:
    """Read a text's row, if it has one. Raises MixKVError for an unusable row or different rows."""
    if given.pointer or not re.search(MARK, given.text):
        return None
    again = f"write it again with sglang-mixkv {__version__}"
    try:
        found, *others = rows_in(given.text)
        if any(one != found for one in others):
            raise unreadable(f"{role}: expected one row of {PLAN_ENV}, got {1 + len(others)}")
        if found["sglang_mixkv_plan"] != SCHEMA:
            text = f"the row has format {found['sglang_mixkv_plan']}, of sglang-mixkv "
            raise unreadable(f"{role}: {text}{found.get('plugin')}; expected {SCHEMA}: {again}")
        row = msgspec.convert(found, LaunchRow)
    except (json.JSONDecodeError, RecursionError, msgspec.MsgspecError) as error:
        raise unreadable(f"{role}: the row is damaged ({error}): {again}") from None
    if row.server is None:
        raise unreadable(f"{role}: SGLang {row.sglang} did not resolve the launch: {row.error}")
    return msgspec.structs.replace(row.server, role=role)


def register() -> None:
    """Hook both steps of a launch. Raises SystemExit for a GPU that plan does not know."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    gpu = os.environ.get(PLAN_GPU_ENV, "")
    if gpu not in ("", *GPUS):
        raise SystemExit(f"{PLAN_GPU_ENV}: expected {' or '.join(GPUS)}; got {gpu!r}")
    of = "sglang.srt.server_args.ServerArgs."
    HookRegistry.register(f"{of}resolve_once", around_resolve, HookType.AROUND)
    HookRegistry.register(f"{of}check_server_args", around_check, HookType.AROUND)


def around_resolve(original: Callable[[Any], None], server_args: Any) -> None:
    """Resolve for this host's GPU or, without one, for one on which SGLang starts; else exit."""
    import torch

    if hasattr(server_args, _SEEN) or getattr(server_args, "_resolution_finished", False):
        return original(server_args)
    try:
        named, is_cpu = os.environ.get(PLAN_GPU_ENV), truth("SGLANG_USE_CPU_ENGINE", os.environ)
        gpus = [named] if named else [*GPUS]
        if torch.accelerator.is_available() or (is_cpu and not named):
            gpus = [""]
        else:
            server_args.device = server_args.device or "cuda"
        unresolved = copy.deepcopy(server_args)
        setattr(unresolved, _SEEN, "a copy")
        made, gpu, stock = resolved(partial(copy.deepcopy, unresolved), gpus)
        if stock:
            _end(made, gpu, stock, config_of(server_args))
    except Exception as error:
        _write(server_args, error=f"{type(error).__name__}: {error}")
    setattr(server_args, _SEEN, gpu)
    if gpu:
        _for_good.enter_context(as_on(gpu))
    return original(server_args)


def around_check(original: Callable[[Any], None], server_args: Any) -> None:
    """Check the arguments, write their row, and exit."""
    gpu, stock = getattr(server_args, _SEEN, ""), list[str]()
    if gpu == "a copy":
        return original(server_args)
    try:
        original(server_args)
    except Exception as error:
        stock.append(f"SGLang {sglang_version()} does not start it: {error}")
    _end(server_args, gpu, stock, config_of(server_args))


def _end(made: Any, gpu: str, stock: list[str], config: Config) -> NoReturn:
    try:
        server = server_of(made, gpu, stock, config)
    except Exception as error:
        words = error.text if isinstance(error, MixKVError) else f"{type(error).__name__}: {error}"
        _write(made, error="; ".join([*stock, words.rstrip(".")]))
    _write(made, server)


def _write(made: Any, server: Server | None = None, error: str = "") -> NoReturn:
    """Write the row on the first node, and exit, with 1 if that fails, but wait for no thread."""
    status, path = 0, os.environ[PLAN_ENV]
    if not getattr(made, "node_rank", 0):
        text = msgspec.json.encode(LaunchRow(SCHEMA, __version__, sglang_version(), server, error))
        try:  # does not wait for the reader of a FIFO
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
            with open(file, "wb") as out:
                out.write(text + b"\n")
        except OSError as problem:
            sys.stderr.write(f"{PLAN_ENV}={path}: {problem.strerror}\n")
            status = 1
        sys.stdout.write(f"\n{text.decode()}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
