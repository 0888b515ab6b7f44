"""A server is killed in the middle of a transfer: the request ends with the reason, and once
the killed server is back the next one is right, on the other server that nobody restarted.

Requests go to both servers as the router sends them, so that each one's answer is seen.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mixkv_demo.launch import HOST, Launch, Topology, prefill_and_decode
from mixkv_demo.pair import prompts, request_body
from mixkv_demo.processes import Fleet, ServerProcess
from mixkv_demo.servers import start
from sglang_mixkv.tools.client import RequestFailed, parse_answer, post

from .conftest import ENABLE, START_TIMEOUT, TP1, TP2

pytestmark = [START_TIMEOUT, pytest.mark.full]

TIMEOUTS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "20",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "5",
}
SETTLE_S = 3.0
"""Time for a request to get as far as it can while the other side does not answer."""


@dataclass
class Both:
    """A prefill and a decode server, and how often each was started."""

    fleet: Fleet
    launches: dict[str, Launch]
    bootstrap_port: int
    running: dict[str, ServerProcess]
    threads: ThreadPoolExecutor
    starts: int = 1

    def send(self, side: str, room: int) -> Future[tuple[int, ...]]:
        """One side's half of the request; its result is the tokens, or RequestFailed."""
        where = {
            "bootstrap_host": HOST,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": room,
        }
        return self.threads.submit(self._post, side, request_body(prompts()[2]) | where)

    def _post(self, side: str, body: dict[str, object]) -> tuple[int, ...]:
        response = post(f"{self.launches[side].url}/generate", body)
        if response.status_code != 200:
            raise RequestFailed(response.text)
        return parse_answer(response.json(), 0.0).tokens

    def ask(self) -> tuple[int, ...]:
        """A whole request; decode's tokens."""
        room = random.getrandbits(62)
        halves = [self.send(side, room) for side in ("prefill", "decode")]
        return [half.result(120) for half in halves][1]

    def kill(self, side: str) -> None:
        self.fleet.signal(self.running.pop(side), signal.SIGKILL)

    def restart(self, side: str, *flags: str) -> None:
        """Start it again on its ports, with further flags."""
        self.starts += 1
        launch = self.launches[side]
        again = replace(launch, name=f"{side}-{self.starts}", argv=(*launch.argv, *flags))
        self.running[side] = start(self.fleet, [again])[0]

    def caught_sending(self) -> tuple[int, dict[str, Future[tuple[int, ...]]]]:
        """A request whose KV the prefill is sending to a decode server that has stopped."""
        room = random.getrandbits(62)
        decode = self.send("decode", room)
        time.sleep(SETTLE_S)  # metadata goes out
        self.fleet.signal(self.running["decode"], signal.SIGSTOP)
        prefill = self.send("prefill", room)
        time.sleep(SETTLE_S)
        return room, {"prefill": prefill, "decode": decode}

    def log(self, side: str) -> str:
        return Path(self.running[side].log).read_text(errors="replace")


@contextmanager
def both() -> Iterator[Both]:
    with Fleet() as fleet, ThreadPoolExecutor(4) as threads:
        topology = Topology(TP2, TP1, ENABLE, ENABLE)
        *launches, port = prefill_and_decode("mla", topology, str(fleet.folder("stats")))
        launches = [replace(one, env={**one.env, **TIMEOUTS}) for one in launches]
        named = {one.name: one for one in launches}
        running = dict(zip(named, start(fleet, launches), strict=True))
        yield Both(fleet, named, port, running, threads)


def reason(half: Future[tuple[int, ...]], limit_s: float) -> str:
    """What the request's HTTP error says, within the configured timeouts."""
    with pytest.raises(RequestFailed) as failed:
        half.result(limit_s)
    return str(failed.value)


def test_kills_and_restarts() -> None:
    with both() as pair:
        before = pair.ask()

        room, halves = pair.caught_sending()
        pair.kill("decode")
        said = reason(halves["prefill"], 30)
        assert f"Failed to send kv chunk of {room} to {HOST}" in said
        assert f"Failed to send kv chunk of {room} to {HOST}" in pair.log("prefill")
        pair.restart("decode")
        assert pair.ask() == before

        room, halves = pair.caught_sending()
        pair.kill("prefill")
        pair.fleet.signal(pair.running["decode"], signal.SIGCONT)
        said = reason(halves["decode"], 30)
        lost = f"Lost connection with prefill instance (bootstrap_addr: {HOST}:"
        assert lost in said
        assert str(room) in said
        assert lost in pair.log("decode")
        pair.restart("prefill")
        assert pair.ask() == before

        pair.kill("decode")
        pair.restart("decode", "--dtype", "float32")
        room = random.getrandbits(62)
        halves = {side: pair.send(side, room) for side in ("prefill", "decode")}
        said = reason(halves["decode"], 30)
        assert "sglang-mixkv refuses prefill server" in said
        assert "bytes per token and head" in said
        reason(halves["prefill"], 40)
