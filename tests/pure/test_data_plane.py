"""What all data planes share: peers, threads and lists, without a backend. With them:
tests/protocol/test_data_planes.py."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_mixkv.channel import data_plane
from sglang_mixkv.channel.data_plane import DataPlane, Endpoint, Extent, Memory, Peer, Read
from sglang_mixkv.channel.mooncake import Mooncake
from sglang_mixkv.channel.nixl import Nixl


class Scripted(DataPlane):
    """Its reads end once `end` is set. `_check` takes a while, and notices a second caller."""

    name = "scripted"
    here = msgspec.msgpack.encode(Endpoint("scripted", b"", Memory(0, 100), b""))

    def __init__(self) -> None:
        super().__init__()
        self.end, self.wrong, self.checking = True, 0, set[Read]()
        self.open: Callable[[], None] = lambda: None
        self.register(Memory(0, 100), spare=0)

    def _register(self, memory: Memory) -> bytes:
        return b""

    def _open(self, peer: Peer) -> None:
        self.open()

    def _post(self, read: Read, extents: Any) -> None:
        read.handle = extents

    def _check(self, read: Read) -> str | None:
        self.wrong += read in self.checking or not read.handle
        self.checking.add(read)
        time.sleep(1e-3)
        self.checking.discard(read)
        return "" if self.end else None

    def _drop(self, peer: Peer) -> None:
        raise RuntimeError("forget must not raise")

    def _close(self) -> None: ...

    def read(self, peer: Peer) -> list[tuple[Any, str]]:
        self.start("it", peer, [Extent(0, 0, 10)])
        return self.ended()


def test_start_does_not_wait_for_connect() -> None:
    plane = Scripted()
    peer = plane.connect(plane.here)
    with peer.connecting:
        began = time.monotonic()
        assert plane.read(peer)[0][1]
        assert time.monotonic() - began < 1
    assert plane.read(peer) == [("it", "")]


def test_a_peer_that_could_not_be_connected_to_holds_up_nobody() -> None:
    """The probe that was left running ends when nobody has the peer any more."""
    plane = Scripted()
    plane.end = False
    with pytest.raises(ConnectionError):
        plane.connect(plane.here, 0)
    plane.end = True
    again = threading.Thread(target=plane.connect, args=(plane.here,), daemon=True)
    again.start()
    again.join(5)
    assert not again.is_alive()


def test_a_read_is_looked_at_by_one_thread_at_a_time() -> None:
    """All that connect ask for the ends of probes that another one left running."""
    plane = Scripted()
    peer = plane.connect(plane.here)
    plane.end = peer.connected = False
    with pytest.raises(ConnectionError):
        plane.connect(plane.here, 0)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(plane.connect, plane.here) for _ in range(2)]
        time.sleep(0.05)
        plane.end = True
        assert [one.result() for one in both] == [peer, peer]
    assert (plane.wrong, peer.connected) == (0, True)


def test_a_peer_that_was_forgotten_takes_no_other_along() -> None:
    """`connect` may still hold one that was forgotten and is connected again."""
    plane = Scripted()
    former = plane.connect(plane.here)
    plane.forget(former)
    assert plane.read(former)[0][1]
    peer = plane.connect(plane.here)
    plane.forget(former)
    assert plane.connect(plane.here) is peer is not former


def test_a_peer_that_is_forgotten_is_released_behind_its_reads() -> None:
    """Its bytes may still land."""
    plane, dropped = Scripted(), list[Peer]()
    plane._drop = dropped.append  # type: ignore[method-assign]
    peer, plane.end = plane.connect(plane.here), False
    assert plane.read(peer) == []
    plane.forget(peer)
    assert (plane.ended(), dropped) == ([], [])
    plane.end = True
    assert plane.ended() == [("it", "")]
    assert dropped == [peer]


class Handed:
    """A lock that the next one has before the former one goes on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        time.sleep(0.02)


class HandedPeer(Peer):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connecting: Any = Handed()


def test_a_peer_that_was_never_connected_is_not_given_to_who_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_plane, "Peer", HandedPeer)
    plane, opened = Scripted(), itertools.count()

    def open_() -> None:
        time.sleep(0.05)
        if next(opened) == 0:
            raise OSError("nobody answers")

    plane.open = open_
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(plane.connect, plane.here) for _ in range(2)]
    assert any(isinstance(one.exception(), ConnectionError) for one in both)
    given = [one.result() for one in both if one.exception() is None]
    for peer in [*given, plane.connect(plane.here)]:
        assert plane.read(peer) == [("it", "")]


def no_memory() -> int:
    raise MemoryError("no batch")


@pytest.mark.parametrize("second", [lambda: 0, lambda: (1 << 64) - 1, no_memory])
def test_a_list_that_mooncake_rejects_midway(second: Callable[[], int]) -> None:
    """-1 as Mooncake's binding returns it, in its releases with and without a sign. -2 of a
    transfer that runs: it takes longer than MC_SLICE_TIMEOUT."""
    plane, posts, states = object.__new__(Mooncake), [lambda: 7, second], [0, -2, 1]
    DataPlane.__init__(plane)
    plane._memory = Memory(0, 100)
    plane._engine = SimpleNamespace(
        batch_transfer_async_read=lambda *_: posts.pop(0)(),
        transfer_check_status=lambda number: states.pop(0) if number == 7 else None,
    )
    peer = Peer(b"", Endpoint("mooncake", b"", Memory(0, 100), b""))
    plane.start("it", peer, [Extent(0, 0, 10), Extent(20, 20, 10), Extent(40, 40, 10)])
    assert [plane.ended(), plane.ended()] == [[], []]
    ((tag, error),) = plane.ended()
    assert tag == "it"
    assert "rejected" in error or "no batch" in error
    assert not peer.reads


def test_nixls_agent_stays_for_its_other_peers() -> None:
    """A server may name another one's agent."""
    plane, removed = object.__new__(Nixl), list[str]()
    plane._naming, plane._named = threading.Lock(), Counter()
    plane._agent = SimpleNamespace(
        add_remote_agent=bytes.decode, remove_remote_agent=removed.append
    )
    peers = [Peer(key, Endpoint("nixl", b"agent", Memory(0, 1), key)) for key in (b"1", b"2")]
    for peer in (*peers, peers[0]):  # that one is mended
        plane._open(peer)
    plane._drop(peers[0])
    assert removed == []
    plane._drop(peers[1])
    assert removed == ["agent"]
