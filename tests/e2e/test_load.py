"""With many clients, some of which disconnect, and servers that are killed meanwhile, all other
clients get the single server's answers, and the ranks hold nothing afterwards.

With MIXKV_LOAD_MINUTES=5, rounds of clients repeat for five minutes, with different clients
disconnecting.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event

import pytest
from rig.process import watched_server

from mixkv_demo import launch
from mixkv_demo.client import Answer, NoAnswer, accept_length
from mixkv_demo.launch import Topology
from mixkv_demo.pair import ask, cousins, prompts
from mixkv_demo.processes import Fleet, ServerDied
from mixkv_demo.servers import Deployment, disaggregated, start
from sglang_mixkv.tools.client import RequestFailed

from .conftest import ENABLE, TP1, TP1_PP2, TP2, TP2_DP2, TP2_DP2_OLDER, WARM, Reference, cold

MINUTES = float(os.environ.get("MIXKV_LOAD_MINUTES", "0"))
pytestmark = [pytest.mark.timeout(1200 + 60 * MINUTES), pytest.mark.full]

CLIENTS, HANG_UP, PATIENCE_S, GIVE_UP_S = 32, 0.15, (0.05, 6.0), 180.0
COLD_SHARE, NEAR = 0.001, 0.02
TIMEOUTS = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "5",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "150",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "150",
    # By default SGLang's servers close connections that are idle for 5 s. The router sometimes
    # failed to send a request to one side ("error sending request"), possibly for this reason.
    "SGLANG_TIMEOUT_KEEP_ALIVE": "600",
    "SGLANG_MIXKV_PATIENCE": "5",
}
SETTLED_S = 330.0
"""Longer than both timeouts together, for which prefill retains an OPEN without a request."""


@dataclass
class Watched:
    """A pair behind the router, whose ranks write the resources that they hold to `states`."""

    deployment: Deployment
    states: Path
    ranks: int

    def kill(self, side: str) -> None:
        self.deployment.fleet.kill(side)
        for path in self.states.glob("*.json"):
            if not Path("/proc", path.stem).exists():
                path.unlink()

    def restart(self, side: str) -> None:
        """Start the server again on its ports, and wait until the router uses it."""
        (server,) = [one for one in self.deployment.servers if one.name == side]
        start(self.deployment.fleet, [replace(server, name=f"{side}-again")])
        deadline = time.monotonic() + SETTLED_S
        while True:
            try:
                ask(self.deployment.url, prompts()[0])
                return
            except RequestFailed:
                assert time.monotonic() < deadline
                time.sleep(1)

    def held(self) -> list[str]:
        """Wait until the ranks are idle and hold nothing. Return their leaks after the time limit,
        or the error of a server that has ended."""
        deadline, now = time.monotonic() + SETTLED_S, time.time()
        while True:
            try:
                self.deployment.fleet.check()
            except ServerDied as error:
                return [str(error)]
            states = [json.loads(path.read_text()) for path in self.states.glob("*.json")]
            found = [left for state in states for left in state["left"]]
            found += ["a request is in flight" for state in states if not state["idle"]]
            if sum(state["at"] > now + 1 for state in states) < self.ranks:
                found.append("a rank has stopped writing its state")
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(watched_server.EVERY_S)


@contextmanager
def watched(topology: Topology, pair: str) -> Iterator[Watched]:
    with Fleet() as fleet:
        states = fleet.folder("states")
        env = {**TIMEOUTS, watched_server.STATE_DIR_ENV: str(states)}
        watch = partial(launch.run_by, script=Path(watched_server.__file__), env=env)
        deployment = disaggregated(fleet, pair, topology, prefill=watch, decode=watch)
        ranks = launch.ranks(topology.prefill) + launch.ranks(topology.decode)
        yield Watched(deployment, states, ranks)


def crowd(
    url: str, asked: list[list[int]], turn: int, hang_up: float = HANG_UP,
    end: Callable[[], None] | None = None,
) -> list[Answer | RequestFailed | None]:  # fmt: skip
    """Return each client's answer or error, or None if it disconnected or sent nothing. `end`:
    called once a third of the clients have their answers; no client sends a request after that."""
    source, over = random.Random(turn), Event()

    def one(prompt: list[int], patience: float | None) -> Answer | RequestFailed | None:
        try:
            return None if over.is_set() else ask(url, prompt, patience or GIVE_UP_S)
        except RequestFailed as error:
            return None if patience and isinstance(error, NoAnswer) else error

    hangs_up = [source.uniform(*PATIENCE_S) if source.random() < hang_up else None for _ in asked]
    with ThreadPoolExecutor(CLIENTS) as pool:
        found = []
        for got in pool.map(one, asked, hangs_up):
            found.append(got)
            if end is not None and len(found) == len(asked) // 3:
                over.set()
                end()
    return found


def are_served(pair: Watched, asked: list[list[int]], expected: list[Answer]) -> None:
    """Check that all clients that do not disconnect get the single server's answers and accept
    length, that nearly no room is cold, and that nothing leaks."""
    before, begin = pair.deployment.counters(), time.monotonic()
    served, alone = list[Answer](), list[Answer]()
    for turn in count():
        found = crowd(pair.deployment.url, asked, turn)
        assert None in found
        for got, own in zip(found, expected, strict=True):
            if got is not None:
                assert isinstance(got, Answer), got
                assert got.tokens == own.tokens
                served.append(got)
                alone.append(own)
        if time.monotonic() - begin >= 60 * MINUTES:
            break
    assert accept_length(served) == pytest.approx(accept_length(alone), rel=NEAR)
    assert pair.held() == []
    rooms = pair.deployment.counters() - before
    lost = (
        cold(rooms) - rooms["rooms_total", "cold", "prefill_aborted"]
    )  # their clients disconnected
    assert lost <= COLD_SHARE * (rooms[WARM] + lost)


UP, DOWN, TO_DP, STAGES = (TP2, TP1), (TP1, TP2), (TP2, TP2_DP2), (TP1_PP2, TP2)
BOTH = "decode", "prefill"


@pytest.mark.parametrize(
    ("of", "backend", "pair", "killed"),
    [
        (UP, "mooncake", "mla", ()), (DOWN, "nixl", "mla", ()), (TO_DP, "mooncake", "mla", ()),
        ((TP2_DP2_OLDER,) * 2, "nixl", "mla", ()), (STAGES, "mooncake", "mla-dspark", ()),
        (UP, "nixl", "mla", BOTH), (DOWN, "mooncake", "mla", BOTH),
    ],
)  # fmt: skip
def test_disconnects_and_killed_servers_affect_no_other_client(
    of: tuple[tuple[str, ...], ...], backend: str, pair: str, killed: tuple[str, ...],
    reference: Reference,
) -> None:  # fmt: skip
    """Clients that disconnect, or a server that is killed, affect no other client's answer. Half of
    the test's time is the wait for the timeouts of a killed server's requests."""
    known = reference(pair, ())
    asked, expected = (prompts(pair=pair) + cousins(pair)) * 3, (known.fixed + known.cousins) * 3
    with watched(Topology(*of, ENABLE, ENABLE, backend=backend), pair) as running:
        for side in killed:
            lost = crowd(running.deployment.url, asked, 0, 0, partial(running.kill, side))
            assert any(isinstance(one, RequestFailed) for one in lost)
            running.restart(side)
            are_served(running, asked, expected)
        if not killed:
            are_served(running, asked, expected)
