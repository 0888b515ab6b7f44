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
from rig.launchers import Ended, Unplugged, dynamo, engine_of_resolved, kv_classes, launch_server

from .test_startup import FLAGS, OTHER

FLAG, ENV = "--enable-mixkv", {"SGLANG_ENABLE_MIXKV": "1"}
KINDS = ("manager", "sender", "receiver", "bootstrap_server")
ASCEND = ("--disaggregation-transfer-backend", "ascend")
Launcher = Callable[[list[str]], None]


@pytest.fixture(scope="module")
def unplugged() -> Iterator[Unplugged]:
    process = Unplugged()
    yield process
    process.close()


@pytest.fixture(params=[launch_server, dynamo], ids=lambda launcher: launcher.__name__)
def launcher(request: pytest.FixtureRequest) -> Any:
    return request.param


def packages(unplugged: Unplugged, launched: Ended, **environ: str) -> set[str]:
    """Whose classes a rank is handed out; `stopped` with the reason where it ends instead."""
    assert launched.value is not None, launched.said[-2000:]
    rank = unplugged.call(kv_classes, launched.value, **environ)
    return {rank.value[kind] for kind in KINDS} if rank.value else {f"stopped: {rank.said}"}


def test_the_variable_opts_in_a_launcher_and_its_ranks(
    unplugged: Unplugged, launcher: Launcher
) -> None:
    """The record travels with ServerArgs: some ranks of a server would else be stock."""
    launched = unplugged.call(launcher, FLAGS, **ENV, SGLANG_MIXKV_STAGING_MB="32")
    assert packages(unplugged, launched) == {"sglang_mixkv"}
    assert pickle.loads(launched.value)._mixkv.staging_mb == 32


def test_without_it_a_launcher_is_stock(unplugged: Unplugged, launcher: Launcher) -> None:
    launched = unplugged.call(launcher, FLAGS)
    assert packages(unplugged, launched) == {"sglang"}


@pytest.mark.parametrize("way", ["flag", "yaml"])
def test_the_flag_opts_a_command_in(unplugged: Unplugged, way: str, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("enable-mixkv: true\n")
    given = {"flag": [FLAG], "yaml": ["--config", str(file)]}[way]
    launched = unplugged.call(launch_server, [*FLAGS, *given])
    assert packages(unplugged, launched) == {"sglang_mixkv"}


# ---------------------------------------------------------------- no way around


def test_what_is_refused_stops_the_launcher(unplugged: Unplugged, launcher: Launcher) -> None:
    for flags, environ, said in (
        ([*FLAGS, *ASCEND], ENV, OTHER),
        (FLAGS, {"SGLANG_ENABLE_MIXKV": "maybe"},
         "expected SGLANG_ENABLE_MIXKV to be 1 or 0; got 'maybe'"),
    ):  # fmt: skip
        launched = unplugged.call(launcher, flags, **environ)
        assert launched.value is None
        assert said in launched.said


@pytest.mark.parametrize("more", [(), ASCEND])
def test_a_rank_looks_where_no_hook_saw_the_arguments(
    unplugged: Unplugged, more: tuple[str, ...]
) -> None:
    launched = unplugged.call(engine_of_resolved, [*FLAGS, *more], **ENV)
    (said,) = packages(unplugged, launched, **ENV)
    assert OTHER in said if more else said == "sglang_mixkv"


@pytest.mark.parametrize(
    ("launcher", "environ"), [(launch_server, {"SGLANG_PLUGINS": "other"}), (dynamo, ENV)]
)
def test_a_flag_that_a_launcher_does_not_know_stops_it(
    unplugged: Unplugged, launcher: Launcher, environ: dict[str, str]
) -> None:
    """Dynamo's parser is built before plugins are loaded."""
    launched = unplugged.call(launcher, [*FLAGS, FLAG], **environ)
    assert launched.value is None
    assert f"unrecognized arguments: {FLAG}" in launched.said
