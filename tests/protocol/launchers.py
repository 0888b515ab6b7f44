"""Run SGLang's launchers without a model, each in a process of its own.

`unplugged` forks a process that has imported SGLang but no plugin, which is the state in which a
launcher starts. Every call forks that process again, and runs either a launcher until it would
start its schedulers, or a scheduler until it has its KV classes. As in SGLang, a scheduler gets
pickled ServerArgs and the environment from its launcher.
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
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rig.process.forks import die_with_parent, in_fork

LIMIT_S = 300


@dataclass(frozen=True)
class Ended:
    """The outcome of a forked process. `value`: the function's result, or the pickled ServerArgs
    that a launcher would have passed to its schedulers. If the process exited instead, `value` is
    None and `said` contains the reason."""

    value: Any
    said: str = ""


class SchedulersError(BaseException):
    """Raised instead of starting the schedulers. It has their pickled ServerArgs."""


# ---------------------------------------------------------------- the launchers


def launch_server(arguments: Sequence[str]) -> None:
    """Run python -m sglang.launch_server."""
    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def engine_of_resolved(arguments: Sequence[str]) -> None:
    """Run sgl.Engine with ServerArgs that were resolved before plugins were loaded, so that no hook
    was called for them."""
    import sglang

    server_args = _server_args(arguments)
    server_args.resolve_once()
    sglang.Engine(server_args=server_args)


def dynamo(arguments: Sequence[str]) -> None:
    """Do what Dynamo's worker does: parse flags and YAML, choose a bootstrap port and make
    ServerArgs, all before plugins are loaded. Then start the engine."""
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
    """Return, for each kind, the package of the class that a scheduler gets with these
    ServerArgs."""
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
    """Yield a function that runs another function, with the given environment variables, in a fork
    of the current process. This process must have imported SGLang but no plugins."""
    here, there = mp.Pipe()
    process = mp.get_context("fork").Process(target=_serve, args=(there,))
    process.start()

    def call(function: Callable[..., Any], *arguments: Any, **environ: str) -> Ended:
        here.send((function, arguments, environ))
        assert here.poll(LIMIT_S)
        ended = here.recv()
        return ended if isinstance(ended, Ended) else Ended(None, ended)

    try:
        yield call
    finally:
        process.kill()
        process.join()


def _serve(pipe: Any) -> None:
    die_with_parent()
    from sglang.srt.entrypoints import engine as engines
    from sglang.srt.entrypoints import http_server
    from sglang.srt.plugins import _plugins_loaded

    assert http_server.Engine is engines.Engine
    assert not _plugins_loaded
    engines.Engine._launch_scheduler_processes = classmethod(_about_to_start)
    while True:
        pipe.send(in_fork(partial(_called, *pipe.recv())))


def _about_to_start(_: type, server_args: Any, *args: Any, **kwargs: Any) -> None:
    raise SchedulersError(pickle.dumps(server_args))


def _called(
    function: Callable[..., Any], arguments: tuple[Any, ...], environ: Mapping[str, str]
) -> Ended:
    """Call the function and return its outcome. `said` includes what a parser prints before it
    exits."""
    os.environ.update(environ)
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        try:
            return Ended(function(*arguments))
        except SchedulersError as started:
            return Ended(started.args[0])
        except BaseException as stop:
            return Ended(None, f"{heard.getvalue()}{type(stop).__name__}: {stop}")
