"""NVIDIA Dynamo in front of the small pair: its frontend and its workers, as they are on PyPI.

Workers find each other by files, and requests go over TCP: neither etcd nor NATS is needed. Opted
in by environment, since Dynamo's parser knows no flags of plugins.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
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
    NEEDED,
    PAGES,
    SENT,
    START_TIMEOUT,
    TP1,
    TP2,
    TP2_DP2_OLDER,
    Reference,
    counts,
    finished,
    record,
    warm_share,
)
from .test_pairs import same

pytestmark = START_TIMEOUT

FOLDER = max((Path(sys.prefix) / "dynamo").glob("*[0-9]"), default=Path())
DYNAMO = FOLDER.name
"""The newest release of Dynamo that this environment has (scripts/dynamo.sh)."""

STARTED_S = 240
OPTED_IN = {ENABLE_ENV: "1"}
BANNER = "sglang-mixkv 0."


@pytest.fixture(scope="module", autouse=True)
def there() -> None:
    if not DYNAMO:
        pytest.skip("NOT TESTED: this environment has no Dynamo (scripts/dynamo.sh)")


@dataclass(frozen=True)
class Workers:
    """A frontend and its workers."""

    deployment: Deployment
    processes: dict[str, ServerProcess]
    launches: dict[str, Launch]

    def ask(self, prompt: list[int]) -> Answer:
        """Dynamo's frontend streams what `/generate` answers."""
        return self.deployment.watch(lambda: stream(self.deployment.url, request_body(prompt)))

    def answers(self) -> list[Answer]:
        return [self.ask(prompt) for prompt in prompts()]

    def log(self, name: str) -> str:
        return self.processes[name].log.read_text(errors="replace")

    def wait(self) -> None:
        """Until a first request is served: workers register when they like."""
        deadline = time.monotonic() + STARTED_S
        while True:
            try:
                self.ask(prompts()[0])
            except RequestFailed:
                assert time.monotonic() < deadline, {n: self.log(n) for n in self.processes}
                time.sleep(2)
            else:
                return


def environment(home: Path) -> dict[str, str]:
    return {
        "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(home / "store"),
        "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq", "DYN_TCP_RPC_HOST": launch.HOST,
        "DYN_SGLANG_ENABLE_GENERATE": "1", "DYN_SYSTEM_PORT": str(free_port()),
        "HOME": str(home), SPAWN_ENV: "1",
    }  # fmt: skip


def with_dynamo(server: Launch, home: Path, module: str, flags: Sequence[str]) -> Launch:
    path = os.pathsep.join(filter(None, [server.env.get("PYTHONPATH", ""), str(FOLDER)]))
    env = {**server.env, **environment(home), "PYTHONPATH": path}
    return replace(server, argv=(sys.executable, "-m", module, *flags), env=env)


Flags = tuple[str, ...]
Started = AbstractContextManager[Workers]


def as_given(flags: Flags, _home: Path) -> Flags:
    return flags


def in_a_file(flags: Flags, home: Path) -> Flags:
    """Flags with a value as YAML, with the events that the KV router of the frontend reads."""
    valued = {w: v for w, v in pairwise(flags) if w.startswith("--") and not v.startswith("--")}
    settings = {word.removeprefix("--"): value for word, value in valued.items()}
    endpoint = f"tcp://*:{free_port()}"
    events = {"publisher": "zmq", "topic": "kv-events", "endpoint": endpoint}
    settings["kv-events-config"] = json.dumps(events)
    file = home / f"{settings['disaggregation-mode']}.yaml"
    file.write_text(json.dumps(settings))  # JSON is YAML, too
    return ("--config", str(file), *(w for w in flags if w.startswith("--") and w not in valued))


def worker(
    server: Launch, home: Path, enabled: dict[str, str], form: Callable[[Flags, Path], Flags]
) -> Launch:
    """The same server, as a worker of Dynamo's, whose own page is at DYN_SYSTEM_PORT."""
    flags = server.argv[server.argv.index("--host") + 4 :]
    flags = form((*flags, "--served-model-name", "tiny"), home)
    changed = with_dynamo(server, home, "dynamo.sglang", flags)
    port = int(changed.env["DYN_SYSTEM_PORT"])
    return replace(changed, env={**changed.env, **enabled}, port=port)


@contextmanager
def dynamo(
    topology: Topology,
    enabled: dict[str, str] = OPTED_IN,
    form: Callable[[Flags, Path], Flags] = as_given,
    of_frontend: Flags = (),
) -> Iterator[Workers]:
    with Fleet() as fleet:
        home = fleet.folder("home")
        first, second, _ = launch.prefill_and_decode("mla", topology)
        launches = {
            "frontend": frontend(home, of_frontend),
            "prefill": worker(first, home, enabled, form),
            "decode": worker(second, home, enabled, form),
        }
        started = {n: fleet.start(n, one.argv, one.env) for n, one in launches.items()}
        servers = (launches["prefill"], launches["decode"])
        deployment = Deployment(fleet, launches["frontend"].url, servers)
        workers = Workers(deployment, started, launches)
        workers.wait()
        yield workers


def frontend(home: Path, further: Flags = ()) -> Launch:
    port = free_port()
    flags = ("--http-host", launch.HOST, "--http-port", str(port), *further)
    return with_dynamo(
        Launch("frontend", (), launch.local_env(), port), home, "dynamo.frontend", flags
    )


@contextmanager
def beside_servers(topology: Topology) -> Iterator[Workers]:
    """A frontend, and SGLang's own servers with a sidecar of Dynamo's each."""
    with Fleet() as fleet:
        home = fleet.folder("home")
        *servers, _ = launch.prefill_and_decode("mla", topology)
        launches, started = {"frontend": frontend(home)}, {}
        for server in servers:
            port = str(free_port())
            further = ("--grpc-port", port, "--incremental-streaming-output")
            launches[server.name] = replace(server, argv=(*server.argv, *further))
            flags = ("--grpc-endpoint", f"{launch.HOST}:{port}", "--bootstrap-host", launch.HOST)
            own = Launch(f"sidecar of {server.name}", (), launch.local_env(), 0)
            launches[own.name] = with_dynamo(own, home, "dynamo.sglang.sidecar", flags)
        for server in servers:
            (started[server.name],) = start(fleet, [launches[server.name]])
        for name in launches.keys() - started.keys():
            started[name] = fleet.start(name, launches[name].argv, launches[name].env)
        url = launches["frontend"].url
        workers = Workers(Deployment(fleet, url, tuple(servers)), started, launches)
        workers.wait()
        yield workers


def check(
    topology: Topology, name: str, reference: Reference, started: Started | None = None
) -> None:
    expected = reference("mla", ()).fixed
    with started or dynamo(topology) as workers:
        before = counts(workers.deployment)
        answers = workers.answers()
        counted = finished(workers.deployment, before, len(answers))
        banners = [BANNER in workers.log(side) for side in ("prefill", "decode")]
    record(f"Dynamo {DYNAMO}, {name}", answers, expected, warm_share(counted))
    same(answers, expected)
    assert warm_share(counted) == 1
    assert counted[SENT] == counted[NEEDED] > 0
    assert banners == [True, True]


def test_a_pair_of_workers(reference: Reference) -> None:
    check(Topology(TP2, TP1, backend="nixl"), "nixl 2 -> 1", reference)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("mooncake 2 -> 1", Topology(TP2, TP1)),
        ("mooncake 1 -> 2", Topology(TP1, TP2)),
        ("nixl 2 -> 2, DP-attention on decode", Topology(TP2, TP2_DP2_OLDER, backend="nixl")),
    ],
)
def test_other_pairs_of_workers(name: str, topology: Topology, reference: Reference) -> None:
    check(topology, name, reference)


@pytest.mark.full
def test_settings_in_a_file_and_the_kv_router(reference: Reference) -> None:
    topology = Topology((*TP2, *PAGES), (*TP1, *PAGES), backend="nixl")
    started = dynamo(topology, form=in_a_file, of_frontend=("--router-mode", "kv"))
    check(topology, "nixl 2 -> 1, YAML, KV router", reference, started)


@pytest.mark.full
def test_sidecars_beside_the_servers(reference: Reference) -> None:
    topology = Topology(TP2, TP1, ENABLE, ENABLE, backend="nixl")
    check(topology, "nixl 2 -> 1, sidecars", reference, beside_servers(topology))
