"""SGLang's launchers as far as a server starts without a model, each in a process of its own.

`unplugged` has a process that has imported SGLang and loaded no plugin, as each launcher finds it.
Every call is a fork of it: a launcher up to the start of its schedulers, or a scheduler up to its
KV classes. What goes from one to the other is what SGLang sends: pickled ServerArgs, and the
environment.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing as mp
import os
import pickle
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rig.forks import in_fork

LIMIT_S = 300


@dataclass(frozen=True)
class Ended:
    """How a forked process ended. `value`: what it returned, or the ServerArgs (pickled) with
    which a launcher was about to start schedulers; None when it stopped, and `said` has why."""

    value: Any
    said: str = ""


class SchedulersError(BaseException):
    """A launcher is about to start schedulers with these ServerArgs."""


# ---------------------------------------------------------------- the launchers


def launch_server(arguments: Sequence[str]) -> None:
    """python -m sglang.launch_server"""
    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def engine_of_resolved(arguments: Sequence[str]) -> None:
    """sgl.Engine with ServerArgs that were resolved before any plugin was loaded: no hook of one
    has seen them."""
    import sglang

    server_args = _server_args(arguments)
    server_args.resolve_once()
    sglang.Engine(server_args=server_args)


def dynamo(arguments: Sequence[str]) -> None:
    """What Dynamo's worker calls: a parser, YAML and ServerArgs without plugins, then the engine.

    It picks the bootstrap port in between.
    """
    import sglang

    sglang.Engine(server_args=_server_args(arguments, disaggregation_bootstrap_port=8997))


def _server_args(arguments: Sequence[str], **changed: Any) -> Any:
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    words = list(arguments)
    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    if "--config" in words:
        words = ConfigArgumentMerger(parser=parser).merge_config_with_args(words)
    return ServerArgs.from_cli_args(
        argparse.Namespace(**{**vars(parser.parse_args(words)), **changed})
    )


# ---------------------------------------------------------------- the schedulers


def kv_classes(server_args: bytes) -> dict[str, str]:
    """Kind -> package of the class that a scheduler with these ServerArgs is handed out."""
    given = pickle.loads(server_args)
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish

    load_plugins()
    publish(given, role="scheduler")
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    backend = TransferBackend(given.disaggregation_transfer_backend)
    found = {kind.value: get_kv_class(backend, kind) for kind in KVClassType}
    return {kind: made.__module__.partition(".")[0] for kind, made in found.items()}


# ---------------------------------------------------------------- processes


Call = Callable[..., Ended]


@contextmanager
def unplugged() -> Iterator[Call]:
    """Calls functions in forks of a process with SGLang and no plugin, with these variables; an
    empty one is unset."""

    def call(function: Callable[..., Any], *arguments: Any, **environ: str) -> Ended:
        asked = partial(_called, function, arguments, environ)
        ended = pool.submit(in_fork, asked).result(LIMIT_S)
        return ended if isinstance(ended, Ended) else Ended(None, ended)

    with ProcessPoolExecutor(1, mp.get_context("spawn"), _without_plugins) as pool:
        yield call


def _without_plugins() -> None:
    import sglang
    from sglang.srt.entrypoints import engine as engines
    from sglang.srt.entrypoints import http_server
    from sglang.srt.plugins import _plugins_loaded

    assert sglang.Engine
    assert http_server.Engine is engines.Engine
    assert not _plugins_loaded
    engines.Engine._launch_scheduler_processes = classmethod(_about_to_start)


def _about_to_start(_: type, server_args: Any, *args: Any, **kwargs: Any) -> None:
    raise SchedulersError(pickle.dumps(server_args))


def _called(
    function: Callable[..., Any], arguments: tuple[Any, ...], environ: Mapping[str, str]
) -> Ended:
    """`said`: what a parser prints before it ends the process, too."""
    os.environ.update(environ)
    for name in (name for name, value in environ.items() if not value):
        del os.environ[name]
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        try:
            return Ended(function(*arguments))
        except SchedulersError as started:
            return Ended(started.args[0])
        except BaseException as stop:
            return Ended(None, f"{heard.getvalue()}{type(stop).__name__}: {stop}")
