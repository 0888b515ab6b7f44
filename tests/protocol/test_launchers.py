"""Each way to start SGLang opts in whole or not at all: the launcher, then what a rank is given.

What a launcher does up to the start of its schedulers is real (rig/launchers.py). Refusals that
need no launcher are in test_startup.py; whole servers in tests/e2e.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import launchers
from rig.launchers import Ended, Unplugged, dynamo, launch_server, serve

from .test_startup import FLAGS, OTHER

FLAG, ENV = "--enable-mixkv", {"SGLANG_ENABLE_MIXKV": "1"}
KINDS = ("manager", "sender", "receiver", "bootstrap_server")
ASCEND = ("--disaggregation-transfer-backend", "ascend")
Launcher = Callable[[list[str]], None]
RESOLVED = launchers.engine_of_resolved  # before plugins were loaded
EVERY = [launch_server, serve, launchers.engine, launchers.engine_of_arguments, dynamo, RESOLVED]


def with_full(*launchers_: Launcher) -> list[Any]:
    """These with --full only."""
    return [pytest.param(launcher, marks=pytest.mark.full) for launcher in launchers_]


COMMANDS = [launch_server, *with_full(serve)]
LAUNCHERS = [*COMMANDS, dynamo, *with_full(launchers.engine, launchers.engine_of_arguments)]


@pytest.fixture(scope="module")
def unplugged() -> Iterator[Unplugged]:
    process = Unplugged()
    yield process
    process.close()


def name_of(value: Any) -> str | None:
    return getattr(value, "__name__", None)


def packages(unplugged: Unplugged, launched: Ended, **environ: str) -> set[str]:
    """Whose classes a rank is handed out; `stopped` with the reason where it ends instead."""
    assert launched.value is not None, launched.said[-2000:]
    rank = unplugged.call(launchers.kv_classes, launched.value, **environ)
    return {rank.value[kind] for kind in KINDS} if rank.value else {f"stopped: {rank.said}"}


# ---------------------------------------------------------------- every way in


@pytest.mark.parametrize("launcher", EVERY, ids=name_of)
def test_the_variable_opts_every_launcher_in(unplugged: Unplugged, launcher: Launcher) -> None:
    launched = unplugged.call(launcher, FLAGS, **ENV)
    assert packages(unplugged, launched, **ENV) == {"sglang_mixkv"}


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=name_of)
def test_a_rank_without_the_variable_does_as_its_launcher(
    unplugged: Unplugged, launcher: Launcher
) -> None:
    """The record travels with ServerArgs: some ranks of a server would else be stock."""
    launched = unplugged.call(launcher, FLAGS, **ENV)
    assert packages(unplugged, launched) == {"sglang_mixkv"}


def given_by(way: str, folder: Path) -> list[str]:
    file = folder / "server.yaml"
    file.write_text("enable-mixkv: true\nmixkv-staging-mb: 32\n")
    return {"flag": [*FLAGS, FLAG], "yaml": [*FLAGS, "--config", str(file)]}[way]


@pytest.mark.parametrize("launcher", COMMANDS, ids=name_of)
@pytest.mark.parametrize("way", ["flag", "yaml"])
def test_the_flag_opts_a_command_in(
    unplugged: Unplugged, launcher: Launcher, way: str, tmp_path: Path
) -> None:
    launched = unplugged.call(launcher, given_by(way, tmp_path))
    assert packages(unplugged, launched) == {"sglang_mixkv"}


def test_serve_takes_the_model_without_a_flag(unplugged: Unplugged) -> None:
    launched = unplugged.call(serve, [*FLAGS[1:], FLAG])
    assert packages(unplugged, launched) == {"sglang_mixkv"}


@pytest.mark.parametrize("launcher", [launch_server, launchers.engine, dynamo], ids=name_of)
def test_not_opted_in_is_stock(unplugged: Unplugged, launcher: Launcher) -> None:
    launched = unplugged.call(launcher, FLAGS)
    assert packages(unplugged, launched) == {"sglang"}
    assert not hasattr(pickle.loads(launched.value), "_mixkv") or launcher is launch_server


def test_a_value_of_the_variable_reaches_a_rank(unplugged: Unplugged) -> None:
    launched = unplugged.call(dynamo, FLAGS, **ENV, SGLANG_MIXKV_STAGING_MB="32")
    assert pickle.loads(launched.value)._mixkv.staging_mb == 32


# ---------------------------------------------------------------- no way around


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=name_of)
def test_what_is_refused_stops_the_launcher(unplugged: Unplugged, launcher: Launcher) -> None:
    launched = unplugged.call(launcher, [*FLAGS, *ASCEND], **ENV)
    assert launched.value is None
    assert OTHER in launched.said


def test_what_is_refused_stops_a_rank_where_no_hook_saw_the_arguments(
    unplugged: Unplugged,
) -> None:
    launched = unplugged.call(RESOLVED, [*FLAGS, *ASCEND], **ENV)
    (said,) = packages(unplugged, launched, **ENV)
    assert OTHER in said


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=name_of)
def test_a_variable_that_says_neither_yes_nor_no_stops_it(
    unplugged: Unplugged, launcher: Launcher
) -> None:
    launched = unplugged.call(launcher, FLAGS, SGLANG_ENABLE_MIXKV="maybe")
    assert launched.value is None
    assert "expected SGLANG_ENABLE_MIXKV to be 1 or 0; got 'maybe'" in launched.said


NO_PLUGIN = {"SGLANG_PLUGINS": "other"}
UNKNOWN = f"unrecognized arguments: {FLAG}"


@pytest.mark.parametrize("way", ["flag", "yaml"])
@pytest.mark.parametrize(
    ("launcher", "environ", "words"),
    [
        (launch_server, NO_PLUGIN, UNKNOWN),
        pytest.param(serve, NO_PLUGIN, UNKNOWN, marks=pytest.mark.full),
        (dynamo, ENV, UNKNOWN),  # its parser is built before plugins are loaded
        (launchers.engine, {}, "enable_mixkv"),
    ],
    ids=name_of,
)
def test_a_flag_that_a_launcher_does_not_know_stops_it(
    unplugged: Unplugged, launcher: Launcher, environ: dict[str, str], words: str, way: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    if launcher is launchers.engine and way == "yaml":
        pytest.skip("an engine has keywords alone")
    launched = unplugged.call(launcher, given_by(way, tmp_path), **environ)
    assert launched.value is None
    assert words in launched.said


def test_with_the_variable_alone_a_plugin_that_is_left_out_cannot_speak(
    unplugged: Unplugged,
) -> None:
    """No code of it runs: the peer refuses the pair, and the scripts and the doctor say it before.

    test_routers.py, tests/pure/test_launch_scripts.py, tests/pure/test_doctor.py.
    """
    environ = {**ENV, "SGLANG_PLUGINS": "other"}
    launched = unplugged.call(dynamo, FLAGS, **environ)
    assert packages(unplugged, launched, **environ) == {"sglang"}


# ---------------------------------------------------------------- metrics without SGLang's server


SERIES = "sglang:mixkv_sent_bytes_total"


def engines_own_metrics(arguments: list[str]) -> list[str]:
    """Dynamo's own port: it reads SGLang's folder once the engine is there, and keeps `sglang:`."""
    from sglang.srt.runtime_context import get_server_args, publish

    with pytest.raises(launchers.SchedulersError) as started:
        dynamo(arguments)
    publish(pickle.loads(started.value.args[0]), role="scheduler")
    assert get_server_args().enable_metrics
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    from sglang_mixkv.engine.metrics import MetricsReporter

    names = ("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank")
    MetricsReporter("prefill", dict.fromkeys(names, "0")).moved(5, 0.0)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if line.startswith("sglang:") and line.endswith(" 5.0")]


def test_series_show_where_a_launcher_reads_sglangs_folder(unplugged: Unplugged) -> None:
    ended = unplugged.call(engines_own_metrics, [*FLAGS, "--enable-metrics"], **ENV)
    (line,) = ended.value or [ended.said]
    assert line.startswith(f'{SERIES}{{component="draft"')


# ---------------------------------------------------------------- the router


def test_the_router_is_no_process_of_the_plugin(unplugged: Unplugged) -> None:
    """It reads its PD line with the servers' environment, and loads no plugin."""
    line = "--pd-disaggregation --prefill http://p:30000 8998 --decode http://d:30001"
    ended = unplugged.call(router, line.split(), **ENV)
    assert ended.value == ([("http://p:30000", 8998)], ["http://d:30001"], False), ended.said


def router(arguments: list[str]) -> tuple[Any, ...]:
    from sglang.srt import plugins
    from sglang_router.launch_router import parse_router_args

    args = parse_router_args(arguments)
    return args.prefill_urls, args.decode_urls, plugins._plugins_loaded
