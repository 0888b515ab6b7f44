"""A prefill rank that stops answering while decode connects to it affects only its own requests.

The tests use the real threads of both sides, real sockets and the real engine. Each silent peer has
valid facts and a channel port that answers, and only its Mooncake engine is an impostor.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rig.channel.threads import Decode, Prefill, wait_for
from rig.process.forks import in_own_process

from sglang_mixkv.channel import data_plane, mooncake
from sglang_mixkv.channel.messages import draw_instance
from sglang_mixkv.channel.mooncake import Mooncake
from sglang_mixkv.channel.times import Times

from . import impostor
from .impostor import standing_for

HOST, TOKENS, MOST = "127.0.0.1", 20, 24
HURRY_S = 0.7  # the limit of each of two connection steps, 10 s by default
PATIENT = Times(10)  # so that no request goes cold on a busy machine; SLOW_S is the test's limit
SLOW_S = 1.0  # a request takes a few ms, or 10 s if the channel's thread is blocked
WAYS = (
    impostor.silent,
    impostor.silent_from_the_opening,
    impostor.silent_where_it_is_read,
    impostor.dripping,
)


class Ranks:
    """A decode rank, a prefill rank that it reads from, and another prefill rank whose facts the
    impostors use."""

    def __init__(self) -> None:
        os.environ.update(MC_FORCE_TCP="1", GLOG_minloglevel="3", MC_LOG_LEVEL="ERROR")
        self.good, self.other = self._prefill(1), self._prefill(2)
        self.decode = Decode(PATIENT, plane=Mooncake(HOST))
        self.peer = self.decode.reach(self.good.row)
        assert wait_for(lambda: self.peer in self.decode.channel._links)
        self._rooms = iter(range(1, 1 << 20))
        self.request()

    def _prefill(self, seed: int) -> Prefill:
        found = Prefill(PATIENT, plane=Mooncake(HOST))
        found.memory[:] = seed
        return found

    def request(self) -> float:
        """Send a request to the rank that answers, check that it is warm and correct, and return
        its duration in seconds."""
        room, began = next(self._rooms), time.monotonic()
        sent = self.good.send(room, TOKENS)
        handle = self.decode.open(room, TOKENS, self.peer)
        self.decode.channel.target_arrived(handle)
        assert wait_for(lambda: handle.state is not None, 20)
        took = time.monotonic() - began
        assert handle.state is not None
        assert (handle.state.value, handle.reason) == ("warm", "")
        assert (self.decode.rows_of(handle) == 1).all()
        self.good.channel.end(sent)
        self.decode.channel.close(handle)
        return took

    def row(self, endpoint: bytes) -> Any:
        """Make the facts of a rank whose channel answers, with this endpoint."""
        staging = msgspec.structs.replace(self.other.row.staging, endpoint=endpoint)
        address = self.other.channel.address
        return SimpleNamespace(instance=draw_instance(), address=address, staging=staging)

    @contextmanager
    def dialing(self, rows: list[Any]) -> Iterator[list[BaseException]]:
        """Connect to all ranks at once, and yield a list that collects the errors. Each attempt
        must end within 20 s of the block's end."""
        ends: list[BaseException] = []

        def dial(row: Any) -> None:
            try:
                self.decode.channel.hang_up(self.decode.channel.dial(row, "silent:1"))
            except Exception as error:
                ends.append(error)

        threads = [threading.Thread(target=dial, args=(row,), daemon=True) for row in rows]
        for thread in threads:
            thread.start()
        yield ends
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)

    def check_requests(self, seconds: float) -> None:
        until, took = time.monotonic() + seconds, [self.request()]
        while time.monotonic() < until:
            took.append(self.request())
            time.sleep(0.01)
        assert max(took) < SLOW_S, f"{max(took):.2f} s"
        assert sorted(took)[len(took) // 2] < 0.1


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "ANSWER_S", HURRY_S)
    monkeypatch.setattr(data_plane.DataPlane.connect, "__defaults__", (HURRY_S,))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@in_own_process
def test_silent_ranks_do_not_delay_requests_to_other_ranks(way: impostor.Answer) -> None:
    """Requests to other ranks succeed without delay while decode connects to several silent
    ranks."""
    ranks, count = Ranks(), random.Random(way.__name__).randint(1, MOST)
    with ExitStack() as stack:
        endpoint = ranks.other.row.staging.endpoint
        made = [stack.enter_context(standing_for(endpoint, way)) for _ in range(count)]
        ends = stack.enter_context(ranks.dialing([ranks.row(one) for one in made]))
        ranks.check_requests(2 * HURRY_S)
    assert len(ends) == count
    assert all(isinstance(end, OSError) for end in ends), ends
    ranks.check_requests(0)
    ranks.decode.reach(ranks.row(endpoint), "a server that answers:1")


def without(name: str) -> Callable[[int, dict[str, Any]], bytes]:
    def answer(kind: int, real: dict[str, Any]) -> bytes:
        del real[name]
        return text(real, kind)

    return answer


def with_value(**values: Any) -> Callable[[int, dict[str, Any]], bytes]:
    return lambda kind, real: text(real | values, kind)


def text(content: Any, kind: int) -> bytes:
    return impostor.frame(impostor.json.dumps(content).encode(), kind)


# A host's name would be looked up, which may block, so even one that can be resolved is rejected.
STRANGE: dict[str, Callable[[int, dict[str, Any]], bytes]] = {
    "empty": lambda kind, real: impostor.struct.pack("<Q", 0) + b"x" * 99,
    "breaks off": lambda kind, real: text(real, kind)[:-1],
    "no JSON": lambda kind, real: impostor.frame(b"{" * 9, kind),
    "a list": lambda kind, real: text([], kind),
    "another kind": lambda kind, real: text(real, 0),
    "no name": without("name"),
    "another's name": with_value(name="127.0.0.1:1"),
    "a host's name": with_value(name="prefill.example:1"),
    "NICs by a host's name": with_value(rdma_server_name="localhost:1"),
    "a port by a host's name": with_value(tcp_data_host="localhost"),
}


@in_own_process
def test_malformed_answers_end_only_their_own_connection() -> None:
    """An answer that is not the peer's ends only its own connection. Other requests succeed."""
    ranks = Ranks()
    endpoint = ranks.other.row.staging.endpoint
    for name, answer in STRANGE.items():
        with standing_for(endpoint, answer) as strange:
            assert not is_reached(ranks, strange), name
    for session in (b"localhost:1", b"", b":", b"127.0.0.1", b"127.0.0.1:x", b"127.0.0.1:99999"):
        of = data_plane.decode(endpoint, "mooncake")
        wrong = msgspec.msgpack.encode(msgspec.structs.replace(of, session=session))
        assert not is_reached(ranks, wrong), session
    ranks.request()


def is_reached(ranks: Ranks, endpoint: bytes) -> bool:
    try:
        ranks.decode.plane.connect(endpoint, 0)
    except ConnectionError:
        return False
    return True
