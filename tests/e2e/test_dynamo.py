"""Run the small pair behind NVIDIA Dynamo, with the frontend and workers that are on PyPI.

Workers discover each other through files, and requests go over TCP, so neither etcd nor NATS is
needed. The workers opt in through the environment, since Dynamo's parser rejects a plugin's flags.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from mixkv_cpu import SPAWN_ENV
from mixkv_demo import launch
from mixkv_demo.launch import Launch, Topology
from mixkv_demo.pair import prompts, request_body
from mixkv_demo.ports import free_port
from mixkv_demo.processes import Fleet, ServerProcess
from mixkv_demo.servers import Deployment, start
from sglang_mixkv.config import ENABLE_ENV
from sglang_mixkv.tools.client import Answer, RequestFailed, stream

from .conftest import (
    ENABLE,
    PAGES,
    START_TIMEOUT,
    TP1,
    TP2,
    TP2_DP2_OLDER,
    Reference,
    all_arrived,
    answered,
    same,
)

FOLDER = max((Path(sys.prefix) / "dynamo").glob("*[0-9]"), default=Path())
DYNAMO = FOLDER.name
"""The newest release of Dynamo installed here by scripts/optional.sh."""

pytestmark = [
    START_TIMEOUT,
    pytest.mark.skipif(
        not DYNAMO, reason="NOT TESTED: this environment has no Dynamo (scripts/optional.sh)"
    ),
]
STARTED_S = 240
KV_ROUTER, SIDECARS = "nixl 2 -> 1, YAML, KV router", "nixl 2 -> 1, sidecars"
BANNER = "sglang-mixkv 0."


def full(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.full)


Flags = tuple[str, ...]
Workers = tuple[Deployment, Callable[[list[int]], Answer], list[ServerProcess]]
"""A frontend with its workers, a function that sends a prompt, and the workers' processes."""


def with_dynamo(server: Launch, home: Path, module: str, flags: Sequence[str]) -> Launch:
    path = os.pathsep.join(filter(None, [server.env.get("PYTHONPATH", ""), str(FOLDER)]))
    env = {
        "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(home / "store"),
        "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq", "DYN_TCP_RPC_HOST": launch.HOST,
        "DYN_SGLANG_ENABLE_GENERATE": "1", "DYN_SYSTEM_PORT": str(free_port()),
        "HOME": str(home), SPAWN_ENV: "1", "PYTHONPATH": path,
    }  # fmt: skip
    argv = (sys.executable, "-m", module, *flags)
    return replace(server, argv=argv, env={**server.env, **env})


def in_a_file(flags: Flags, home: Path) -> Flags:
    """Move the flags that have values to a YAML file, and enable the KV events that the frontend's
    KV router reads."""
    valued = {w: v for w, v in pairwise(flags) if w.startswith("--") and not v.startswith("--")}
    settings = {word.removeprefix("--"): value for word, value in valued.items()}
    endpoint = f"tcp://*:{free_port()}"
    events = {"publisher": "zmq", "topic": "kv-events", "endpoint": endpoint}
    settings["kv-events-config"] = json.dumps(events)
    file = home / f"{settings['disaggregation-mode']}.yaml"
    file.write_text(json.dumps(settings))  # JSON is valid YAML
    return ("--config", str(file), *(w for w in flags if w.startswith("--") and w not in valued))


def worker(server: Launch, home: Path, in_file: bool) -> Launch:
    """Return the server as a Dynamo worker, which serves its metrics at DYN_SYSTEM_PORT."""
    flags = (*server.argv[server.argv.index("--host") + 4 :], "--served-model-name", "tiny")
    flags = in_a_file(flags, home) if in_file else flags
    changed = with_dynamo(server, home, "dynamo.sglang", flags)
    env = {**changed.env, ENABLE_ENV: "1"}
    return replace(changed, env=env, port=int(env["DYN_SYSTEM_PORT"]))


def with_sidecar(server: Launch, home: Path) -> tuple[Launch, Launch]:
    """Return SGLang's own server, and a Dynamo sidecar for it."""
    port = str(free_port())
    further = ("--grpc-port", port, "--incremental-streaming-output")
    flags = ("--grpc-endpoint", f"{launch.HOST}:{port}", "--bootstrap-host", launch.HOST)
    own = Launch(f"sidecar of {server.name}", (), launch.local_env(), 0)
    sidecar = with_dynamo(own, home, "dynamo.sglang.sidecar", flags)
    return replace(server, argv=(*server.argv, *further)), sidecar


@contextmanager
def dynamo(topology: Topology, kind: str) -> Iterator[Workers]:
    with Fleet() as fleet:
        home, port = fleet.folder("home"), free_port()
        *servers, _ = launch.prefill_and_decode("mla", topology)
        flags = ["--http-host", launch.HOST, "--http-port", str(port)]
        flags += ["--router-mode", "kv"] if kind == KV_ROUTER else []
        own = Launch("frontend", (), launch.local_env(), port)
        others = [with_dynamo(own, home, "dynamo.frontend", flags)]
        if kind == SIDECARS:
            both = [with_sidecar(server, home) for server in servers]
            servers = [server for server, _ in both]
            started = start(fleet, servers)
            others += [sidecar for _, sidecar in both]
        else:
            servers = [worker(server, home, kind == KV_ROUTER) for server in servers]
            started = [fleet.start(one.name, one.argv, one.env) for one in servers]
        for one in others:
            fleet.start(one.name, one.argv, one.env)
        deployment = Deployment(fleet, own.url, tuple(servers))

        def ask(prompt: list[int]) -> Answer:
            """Send a prompt to `/generate`, whose answer Dynamo's frontend streams."""
            return deployment.watch(lambda: stream(deployment.url, request_body(prompt)))

        deadline = time.monotonic() + STARTED_S
        while True:  # until the workers have registered
            try:
                ask(prompts()[0])
                break
            except RequestFailed:
                assert time.monotonic() < deadline, [log(one) for one in started]
                time.sleep(2)
        yield deployment, ask, started


def log(process: ServerProcess) -> str:
    return process.log.read_text(errors="replace")


PAIR = Topology(TP2, TP1, backend="nixl")
WITH_PAGES = Topology((*TP2, *PAGES), (*TP1, *PAGES), backend="nixl")
TO_DP = Topology(TP2, TP2_DP2_OLDER, backend="nixl")


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("nixl 2 -> 1", PAIR),
        full("mooncake 2 -> 1", Topology(TP2, TP1)),
        full("mooncake 1 -> 2", Topology(TP1, TP2)),
        full("nixl 2 -> 2, DP-attention on decode", TO_DP),
        full(KV_ROUTER, WITH_PAGES),
        full(SIDECARS, Topology(TP2, TP1, ENABLE, ENABLE, backend="nixl")),
    ],
)
def test_a_pair_of_dynamo_workers(name: str, topology: Topology, reference: Reference) -> None:
    expected = reference("mla", ()).fixed
    with dynamo(topology, name) as (deployment, ask, workers):
        answers, counted = answered(deployment, expected, prompts(), ask)
        banners = [BANNER in log(one) for one in workers]
    same(answers, expected)
    all_arrived(counted)
    assert banners == [True, True]
