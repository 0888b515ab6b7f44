"""The launch scripts themselves with the small pair: only sizes differ from production.

Each way to opt in is there once on each side: a flag, a YAML file, the environment; and each
launcher: `sglang serve`, `python -m sglang.launch_server`. Both sizes differ, and one-sided
opt-in is refused, so right drafts mean that the plugin is active on both sides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mixkv_cpu as cpu
from mixkv_demo import launch, servers
from mixkv_demo.pair import model_flags, prompts
from mixkv_demo.ports import free_port
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import Deployment, bring_up
from sglang_mixkv.config import ENABLE_ENV, PATIENCE_ENV

from .conftest import START_TIMEOUT, Reference, all_arrived, answered, same

pytestmark = [START_TIMEOUT, pytest.mark.full]

SCRIPTS = Path(__file__).parents[2] / "scripts"
ENVIRONMENT = {"MIXKV": "0", ENABLE_ENV: "1"}
YAML = {"MIXKV": "0"}
SERVE = {"LAUNCHER": "sglang serve"}
ROUTERS = ("router", "mini-lb")


# Variables of prefill.sh and decode.sh, and which of them opts in by --config.
CASES = {
    "serve-flag--yaml": ({"TP": "2", **SERVE}, {"TP": "1", **YAML}, "decode"),
    "environment--serve-environment": (
        {"TP": "1", **ENVIRONMENT}, {"TP": "2", **SERVE, **ENVIRONMENT}, "",
    ),
}  # fmt: skip

ByRouter = dict[str, Deployment]
"""A running pair behind each of ROUTERS."""


def script(name: str, arguments: tuple[str, ...], **variables: str) -> launch.Launch:
    """One of the launch scripts as a server to start."""
    port, file = free_port(), name if name in ("prefill", "decode") else "router"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {cpu.SPAWN_ENV: "1", "PATH": path, "HOST": launch.HOST, "PORT": str(port)}
    env = {**launch.local_env(), **own, **variables}
    return launch.Launch(name, ("bash", str(SCRIPTS / f"launch/{file}.sh"), *arguments), env, port)


def server(
    name: str, sizes: dict[str, str], shared: dict[str, str], yaml: Path | None
) -> launch.Launch:
    """A prefill or decode server on CPU: sizes by variables, the CPU's flags behind."""
    models = dict(zip(*[iter(model_flags("mla"))] * 2, strict=True))
    names = {"MODEL": models["--model-path"], "DRAFT": models["--speculative-draft-model-path"]}
    config = ("--config", str(yaml)) if yaml else ()
    arguments = (*cpu.LAUNCH_FLAGS, "--sleep-on-idle", "--enable-metrics", *config)
    env = cpu.launch_env(int(sizes["TP"]))
    return script(name, arguments, **{**env, **names, **shared, **sizes})


def router(
    name: str, prefill: launch.Launch, decode: launch.Launch, bootstrap: str
) -> launch.Launch:
    further = ("--mini-lb",) if name == "mini-lb" else ("--prometheus-port", str(free_port()))
    return script(name, further, PREFILL=f"{prefill.url},{bootstrap}", DECODE=decode.url)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ByRouter]:
    *sizes, in_yaml = request.param
    yaml = tmp_path_factory.mktemp("config") / "mixkv.yaml"
    yaml.write_text("enable-mixkv: true\nmixkv-staging-mb: 32\n")
    with Fleet() as fleet:
        bootstrap = str(free_port())
        shared = {PATIENCE_ENV: launch.PATIENCE, "BOOTSTRAP_PORT": bootstrap}
        prefill, decode = (
            server(name, own, shared, yaml if in_yaml == name else None)
            for name, own in zip(("prefill", "decode"), sizes, strict=True)
        )
        first, second = (router(name, prefill, decode, bootstrap) for name in ROUTERS)
        bring_up(fleet, [prefill, decode, first], servers.silent)
        bring_up(fleet, [second], servers.silent)
        yield {r.name: Deployment(fleet, r.url, (prefill, decode), (r,)) for r in (first, second)}


def test_drafts_are_the_single_servers(started: ByRouter, reference: Reference) -> None:
    for name, deployment in started.items():
        expected = reference("mla", ()).fixed
        answers, counted = answered(f"launch scripts, {name}", deployment, expected, prompts())
        same(answers, expected)
        all_arrived(counted)


def test_sglangs_benchmark_runs_against_a_deployment(started: ByRouter, tmp_path: Path) -> None:
    """The documented command, with smaller numbers."""
    command = [
        *(sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang"),
        *("--base-url", started["router"].url),
        *("--num-prompts", "3", "--max-concurrency", "2", "--dataset-name", "random-ids"),
        *("--random-input-len", "40", "--random-output-len", "20"),
        *("--output-file", str(tmp_path / "out.jsonl")),
    ]
    done = subprocess.run(
        command, env={**os.environ, **launch.local_env(), **cpu.launch_env()},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out.jsonl").read_text())["completed"] == 3
