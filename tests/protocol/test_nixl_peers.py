"""NIXL's peers come and go: what a prefill rank does when a connection breaks, and anew."""

from __future__ import annotations

import os
import socket
import time
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from rig import faults as faults_of_ring
from rig import model
from rig.model import Case, Request
from rig.rank import Rank
from rig.ring import run
from rig.unserved import skip_unserved

pytestmark = pytest.mark.usefixtures("over_tcp")
ROUNDS = {"requests": tuple(Request(n) for n in (12, 9, 10)), "rounds": ((0,), (1,), (2,))}


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unserved("nixl")
    monkeypatch.setattr(model, "BACKEND", "nixl")
    monkeypatch.setenv("UCX_TLS", "tcp")


def cut_connections(but: int) -> int:
    """Shut this process's TCP connections down, but those at this port; how many."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            mine = socket.socket(fileno=os.dup(int(fd)))
        except OSError:
            continue  # not a socket
        with mine:
            try:
                if mine.getsockname()[1] != but and mine.getpeername():
                    mine.shutdown(socket.SHUT_RDWR)
                    count += 1
            except (OSError, IndexError):
                pass  # not connected, or no address
    return count


def cut_before_the_second(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
    """After the first, its server has given its memory up and taken it back."""
    if sender.bootstrap_room == rank.rooms()[1]:
        rank.manager.register_buffer_to_engine()
        assert cut_connections(but=rank.manager.rank_port)
        time.sleep(0.5)
    sender.send(chunk, state)


@pytest.mark.parametrize(
    "changed", [{}, {"draft": None}, {"hybrid": True}, {"draft": None, "hybrid": True}], ids=str
)
def test_a_peer_whose_connection_broke_is_taken_anew(changed: dict[str, Any]) -> None:
    """By the plugin's writes, and by SGLang's own, which are all where there is no drafter. NIXL
    says that it has the peer's metadata as before."""
    with faults_of_ring.short_timeouts():
        outcome = run(Case(1, 1, extra={"send": cut_before_the_second}, **ROUNDS, **changed))
    assert outcome.wrong == []
    for report in (*outcome.prefill, *outcome.decode):
        assert report.status == ["success", "failed", "success"]
        assert report.seconds[1] < 3
    for line in outcome.reasons.splitlines():
        assert "Failed to send" in line
        assert "the connection to it is lost" in line


class Agent:
    """`states`: by handle, what its write says each time; an exception is raised."""

    def __init__(self, **states: Any) -> None:
        self._states = states

    def check_xfer_state(self, handle: str) -> str:
        state = self._states[handle]
        if isinstance(state, Exception):
            raise state
        return str(state)


def test_a_connection_that_breaks_under_sglangs_own_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would take the write for one that goes on, keep the reason from decode, and name
    another. Its loop asks a second time for what is left of a batch that has failed."""
    from nixl._api import nixlBind
    from sglang.srt.disaggregation.nixl import conn

    from sglang_mixkv.engine.nixl import MixNixlManager
    from sglang_mixkv.engine.nixl_writes import StockWrites
    from sglang_mixkv.prefill.rooms import Room, State
    from sglang_mixkv.prefill.worker import Task, Worker
    from sglang_mixkv.transport.nixl import Memory, Nixl

    monkeypatch.setattr(conn, "NIXL_ERR_SETTLE_TIMEOUT_S", 0.1)
    lost = nixlBind.nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
    manager = object.__new__(MixNixlManager)
    manager.agent = Agent(done="DONE", broken=lost, late="PROC")
    manager.prefill, worker = MagicMock(), Worker(MagicMock(), MagicMock(), MagicMock())
    transport = Nixl(manager.agent, Memory("VRAM", 0), lambda _: 0)
    manager.stock = StockWrites(transport, lambda who, room, code: f"{who} {room.number} {code!r}")
    manager._thread = SimpleNamespace(worker=worker)
    worker.take(Task(Room(7, State.OPEN, 0.0), 0))
    posted = ["done", "broken", "late"]
    for handle in posted:
        manager.stock.post(worker, f"peer of {handle}", partial(str, handle))

    with pytest.raises(conn._NixlPostError, match=r"peer of broken 7 .*LOST"):
        manager._await_handles([*posted, None], failure_seen=False)
    assert transport.lost == {"peer of broken"}
    assert manager._await_handles(["done", "broken"], failure_seen=True) == (True, True)
    assert manager._await_handles(posted, failure_seen=True) == (False, True)
    with pytest.raises(conn._NixlPostError, match="LOST"):
        manager.stock.post(worker, "peer of broken", partial(str, "another"))
