"""NVIDIA Dynamo in front of the small pair: its frontend and its workers, as they are on PyPI.

Workers find each other by files, and requests go over TCP: neither etcd nor NATS is needed. Opted
in by environment, since Dynamo's parser knows no flags of plugins.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mixkv_cpu import SPAWN_ENV
from mixkv_demo import launch
from mixkv_demo.launch import Launch, Topology
from mixkv_demo.pair import prompts, request_body
from mixkv_demo.ports import free_port
from mixkv_demo.processes import Fleet, ServerProcess
from mixkv_demo.servers import Deployment
from sglang_mixkv.config import ENABLE_ENV
from sglang_mixkv.tools.client import Answer, RequestFailed, accept_length, stream

from .conftest import (
    COLLAPSED,
    START_TIMEOUT,
    TP1,
    TP2,
    TP2_DP2_OLDER,
    Reference,
    counts,
    record,
    warm_share,
    without_drafter,
)
from .test_pairs import same

pytestmark = START_TIMEOUT

FOLDER = max((Path(sys.prefix) / "dynamo").glob("*[0-9]"), default=Path())
DYNAMO = FOLDER.name
"""The newest release of Dynamo that this environment has (scripts/dynamo.sh)."""

STARTED_S = 240
OPTED_IN = {ENABLE_ENV: "1"}
STOCK: dict[str, str] = {}
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


def worker(server: Launch, home: Path, enabled: dict[str, str]) -> Launch:
    """The same server, as a worker of Dynamo's."""
    flags = server.argv[server.argv.index("--host") + 4 :]
    flags = (*flags, "--served-model-name", "tiny", "--enable-metrics")
    changed = with_dynamo(server, home, "dynamo.sglang", flags)
    return replace(changed, env={**changed.env, **enabled})


@contextmanager
def dynamo(
    topology: Topology,
    prefill: dict[str, str] = OPTED_IN,
    decode: dict[str, str] = OPTED_IN,
    *,
    drafting_prefill: bool = True,
    serves: bool = True,
) -> Iterator[Workers]:
    with Fleet() as fleet:
        stats, home = fleet.folder("stats"), fleet.folder("home")
        first, second, _ = launch.prefill_and_decode("mla", topology, str(stats))
        first = first if drafting_prefill else without_drafter(first)
        launches = {
            "frontend": frontend(home),
            "prefill": worker(first, home, prefill),
            "decode": worker(second, home, decode),
        }
        started = {n: fleet.start(n, one.argv, one.env) for n, one in launches.items()}
        servers = (launches["prefill"], launches["decode"])
        deployment = Deployment(fleet, launches["frontend"].url, stats, servers)
        workers = Workers(deployment, started, launches)
        if serves:
            workers.wait()
        yield workers


def frontend(home: Path) -> Launch:
    port = free_port()
    flags = ("--http-host", launch.HOST, "--http-port", str(port))
    return with_dynamo(
        Launch("frontend", (), launch.local_env(), port), home, "dynamo.frontend", flags
    )


def check(topology: Topology, name: str, reference: Reference) -> None:
    expected = reference("mla", ()).fixed
    with dynamo(topology) as workers:
        before = counts(workers.deployment)
        answers = workers.answers()
        counted = counts(workers.deployment)
        banners = [BANNER in workers.log(side) for side in ("prefill", "decode")]
    counted.subtract(before)
    record(f"Dynamo {DYNAMO}, {name}", answers, expected, warm_share(counted))
    same(answers, expected)
    assert warm_share(counted) == 1
    assert counted["draft_bytes_sent"] == counted["draft_bytes_needed"] > 0
    assert banners == [True, True]


def test_a_pair_of_workers(reference: Reference) -> None:
    check(Topology(TP2, TP1, backend="nixl"), "nixl 2 -> 1", reference)


def test_without_the_plugin_the_drafter_is_lost(reference: Reference) -> None:
    """The control."""
    expected = reference("mla", ()).fixed
    with dynamo(Topology(TP2, TP1, backend="nixl"), STOCK, STOCK) as workers:
        answers = workers.answers()
        assert BANNER not in workers.log("decode")
    record(f"Dynamo {DYNAMO}, nixl 2 -> 1, stock", answers, expected)
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    assert accept_length(answers) < COLLAPSED


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
def test_a_worker_that_is_killed_and_started_again(reference: Reference) -> None:
    expected = reference("mla", ()).fixed
    with dynamo(Topology(TP2, TP1, backend="nixl")) as workers:
        fleet, again = workers.deployment.fleet, workers.launches["prefill"]
        fleet.signal(workers.processes["prefill"], signal.SIGKILL)
        fresh = {**again.env, "DYN_SYSTEM_PORT": str(free_port())}
        fleet.start("prefill again", again.argv, fresh)
        workers.wait()
        answers = workers.answers()
    record(f"Dynamo {DYNAMO}, nixl 2 -> 1, prefill restarted", answers, expected)
    same(answers, expected)


@pytest.mark.full
def test_a_prefill_worker_without_a_drafter(reference: Reference) -> None:
    """Drafting on decode alone: served cold."""
    expected = reference("mla", ()).fixed
    with dynamo(Topology(TP2, TP1, backend="nixl"), drafting_prefill=False) as workers:
        before = counts(workers.deployment)
        answers = workers.answers()
        counted = counts(workers.deployment)
    counted.subtract(before)
    record(f"Dynamo {DYNAMO}, nixl 2 -> 1, decode alone drafts", answers, expected)
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    assert counted["channel_cold"] == len(answers)


@pytest.mark.full
def test_a_worker_that_is_not_opted_in_is_refused() -> None:
    with dynamo(Topology(TP2, TP1, backend="nixl"), prefill=STOCK, serves=False) as workers:
        deadline = time.monotonic() + STARTED_S
        while "MIXKV-PAIR-01" not in workers.log("decode"):
            assert time.monotonic() < deadline, workers.log("decode")
            with pytest.raises(RequestFailed):
                workers.ask(prompts()[0])
            time.sleep(2)
