"""NIXL's transport over an agent that says what a test wants: how each write ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_mixkv.kv.ranges import Blocks
from sglang_mixkv.transport import nixl
from sglang_mixkv.transport.nixl import Code, Memory, Nixl


class nixlRemoteDisconnectError(Exception):
    """As NIXL's binding names it."""


class Agent:
    """`states`: what a post and each look at a write say; an exception is raised."""

    def __init__(self, *states: str | Exception) -> None:
        self.states = list(states)
        self.ranges: list[tuple[list[list[int]], str]] = []
        self.registered: list[tuple[int, int, int, str]] = []

    def register_memory(self, regions: list[Any], kind: str) -> None:
        if kind != "VRAM":
            raise RuntimeError("no room")
        self.registered += regions

    def get_xfer_descs(self, rows: np.ndarray, kind: str) -> str:
        self.ranges.append((rows.tolist(), kind))
        return kind

    def initialize_xfer(self, *_: Any) -> str:
        return "handle"

    def _next(self, _: str) -> str:
        state = self.states.pop(0)
        if isinstance(state, Exception):
            raise state
        return state

    transfer = check_xfer_state = _next

    def check_remote_metadata(self, session: str) -> bool:
        return session == "peer"


BLOCKS = Blocks(*(np.array(column, np.int64) for column in ([10, 20], [30, 40], [4, 8])))
LOST = nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")


def over(agent: Agent, kind: str = "VRAM") -> Nixl:
    return Nixl(agent, Memory(kind, 1), lambda _: 3)


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["DONE"], Code.DONE),
        (["PROC", "PROC", "DONE"], Code.DONE),
        (["ERR"], Code.FAILED),
        (["PROC", "ERR"], Code.FAILED),
        ([ValueError("NIXL_ERR_NOT_FOUND")], Code.REJECTED),
        (["PROC", ValueError("NIXL_ERR_NOT_FOUND")], Code.FAILED),
        ([LOST], Code.LOST),
        (["PROC", LOST], Code.LOST),
    ],
    ids=str,
)
def test_how_a_write_ends(states: list[Any], code: Code) -> None:
    transport = over(Agent(*states))
    assert transport.wait(transport.write("peer", BLOCKS)) == code
    assert transport.probe("peer") == (code is not Code.LOST)
    assert not transport.probe("nobody")
    assert code is Code.DONE or transport.why(code)


def test_a_write_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "GIVE_UP_S", -1.0)
    transport = over(Agent("PROC", "PROC"))
    assert transport.wait(transport.write("peer", BLOCKS)) == Code.LATE
    assert transport.lost == {"peer"}


def test_nothing_is_posted_to_a_lost_peer() -> None:
    """Another room would wait for it as long again."""
    agent, lost = Agent(LOST), set()
    kv, rows = (Nixl(agent, Memory(kind, 1), lambda _: 3, lost) for kind in ("VRAM", "DRAM"))
    kv.write("peer", BLOCKS)
    assert rows.wait(rows.write("peer", BLOCKS)) == Code.LOST
    assert len(agent.ranges) == 2  # of the first write: source, destination


def test_a_write_of_another_that_ended_with_the_connection() -> None:
    for state, broke in (("PROC", False), ("ERR", False), (ValueError("x"), False), (LOST, True)):
        transport = over(Agent(state))
        assert transport.has_lost("peer", "handle") == broke
        assert transport.lost == ({"peer"} if broke else set())


def test_ranges_name_the_device_of_each_side() -> None:
    agent = Agent("DONE")
    over(agent).write("peer", BLOCKS)
    assert agent.ranges == [
        ([[10, 4, 1], [20, 8, 1]], "VRAM"),
        ([[30, 4, 3], [40, 8, 3]], "VRAM"),
    ]


def test_nothing_to_write_is_nothing_posted() -> None:
    agent = Agent()
    assert over(agent).wait(over(agent).write("peer", Blocks.none())) == Code.DONE


def test_memory_that_cannot_be_registered() -> None:
    agent = Agent()
    over(agent).register(64, 8)
    assert agent.registered == [(64, 8, 1, "")]
    with pytest.raises(MemoryError, match="8 bytes"):
        over(agent, "DRAM").register(64, 8)
