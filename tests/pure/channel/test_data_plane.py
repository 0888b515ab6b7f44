"""The code for peers and reads that all data planes share, mostly without a backend.

tests/protocol/test_data_planes.py has the tests with backends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rig.process.answers import silent
from rig.process.forks import in_fork

from sglang_mixkv.channel import mooncake, nixl
from sglang_mixkv.channel.data_plane import (
    DataPlane,
    Endpoint,
    Extent,
    Memory,
    Read,
    RemoteMemory,
)
from sglang_mixkv.channel.mooncake import Mooncake
from sglang_mixkv.channel.nixl import Nixl
from sglang_mixkv.draft.slot_format import HEADER, PROBE_OFFSET
from sglang_mixkv.errors import MixKVError

SIZE, THERE, LOCAL, REMOTE = 100, 70, 1000, 5000
TEN = (LOCAL, REMOTE, 10)


class Scripted(DataPlane):
    """A data plane whose reads end once `end` is set. `posted`: the extents that were posted."""

    name = "scripted"
    there = msgspec.msgpack.encode(Endpoint("scripted", b"", Memory(REMOTE, THERE), b""))

    def __init__(self) -> None:
        super().__init__()
        self.end, self.posted, self.dropped = True, list[Extent](), list[RemoteMemory]()
        self.register(Memory(LOCAL, SIZE))

    def _register(self, memory: Memory) -> bytes:
        return b""

    def _open(self, peer: RemoteMemory) -> None: ...

    def _post(self, read: Read, extents: Any) -> None:
        self.posted += extents
        read.handle = extents

    def _check(self, read: Read) -> str | None:
        return "" if self.end else None

    def _drop(self, peer: RemoteMemory) -> None:
        self.dropped.append(peer)
        raise RuntimeError("forget must not raise")

    def read(self, peer: RemoteMemory, *extents: Extent) -> list[tuple[Any, str]]:
        self.start("it", peer, extents)
        return self.ended()


def test_a_probe_writes_to_an_unused_byte() -> None:
    """A probe's byte is written to an unused byte of a slot's header.

    It may land at any time, so it must not overwrite a stamp or a checksum.
    """
    plane = Scripted()
    plane.connect(plane.there)
    assert plane.posted == [(LOCAL + PROBE_OFFSET, REMOTE, 1)]
    assert 16 <= PROBE_OFFSET < HEADER


def test_reads_outside_either_memory_are_not_posted() -> None:
    """A read outside the local or the remote memory fails and is not posted.

    The two memories differ in size, as the buffers of two servers may.
    """
    plane = Scripted()
    peer = plane.connect(plane.there)
    plane.posted.clear()
    for at, there, length in ((0, 61, 10), (0, 70, 1), (0, -1, 10), (91, 0, 10), (-1, 0, 10),
                              (100, 0, 1), (0, 0, 71), (0, 0, 0), (5, 5, -1)):  # fmt: skip
        wrong = (LOCAL + at, REMOTE + there, length)
        for extents in ([wrong], [TEN, wrong], [wrong, TEN]):
            ((tag, error),) = plane.read(peer, *extents)
            assert (tag, "outside" in error) == ("it", True)
    assert plane.posted == []
    for at, there, length in ((30, 0, THERE), (0, 0, 1), (99, 69, 1), (90, 0, 10), (0, 60, 10)):
        right = (LOCAL + at, REMOTE + there, length)
        assert plane.read(peer, right, TEN) == [("it", "")]
    unregistered = Scripted()
    unregistered._memory = None
    assert unregistered.read(peer, TEN) == [("it", "outside the registered memory")]


def test_a_peer_is_released_once_after_its_last_read() -> None:
    """A peer stays open until its reads have ended, since their bytes may still land."""
    plane = Scripted()
    peer, plane.end = plane.connect(plane.there), False
    assert plane.read(peer, TEN) == plane.read(peer, TEN) == []
    plane.forget(peer)
    plane.forget(peer)
    ((tag, error),) = plane.read(peer, TEN)
    assert (tag, "gone" in error, plane.dropped) == ("it", True, [])
    plane.end = True
    assert plane.ended() == [("it", "")] * 2
    plane.forget(peer)
    assert plane.dropped == [peer]


def test_the_handle_of_a_read_is_released_before_its_peer() -> None:
    """The handle of a read is released before its peer.

    NIXL frees a transfer together with its handle, and must do so before it removes the agent.
    """

    class Handle:
        """The backend's handle of a transfer."""

    class Holding(Scripted):
        def _post(self, read: Read, extents: Any) -> None:
            read.handle = Handle()
            held.append(weakref.ref(read.handle))

        def _drop(self, peer: RemoteMemory) -> None:
            is_held.append(held[-1]() is not None)

    held, is_held, plane = list[Any](), list[bool](), Holding()
    peer = plane.connect(plane.there)
    plane.end = False
    assert plane.read(peer, TEN) == []
    plane.forget(peer)
    plane.end = True
    assert (plane.ended(), is_held) == ([("it", "")], [False])


def test_a_peer_that_cannot_be_opened_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = Scripted()

    def refuses(peer: RemoteMemory) -> None:
        raise OSError("no route")

    monkeypatch.setattr(plane, "_open", refuses)
    with pytest.raises(ConnectionError, match="scripted: no route"):
        plane.connect(plane.there)
    assert (plane.posted, len(plane.dropped)) == ([], 1)


def test_a_read_that_cannot_be_posted_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = Scripted()
    peer = plane.connect(plane.there)
    with monkeypatch.context() as patch:
        patch.setattr(plane, "_post", lambda *_: no_memory())
        ((tag, error),) = plane.read(peer, TEN)
    assert (tag, "no batch" in error, peer.reads, plane.busy) == ("it", True, 0, False)
    assert plane.read(peer, TEN) == [("it", "")]


def test_a_peer_without_an_answer_is_probed_only_once() -> None:
    """A peer whose last probe has no answer yet gets no second probe.

    Each probe is a read that cannot be cancelled.
    """
    plane = Scripted()
    plane.end = False
    with pytest.raises(ConnectionError, match="scripted"):
        plane.connect(plane.there, 0)
    with pytest.raises(ConnectionError, match="not answered"):
        plane.connect(plane.there, 0)
    assert (plane.ended(), plane.busy, len(plane.posted), plane.dropped) == ([], False, 1, [])
    plane.end = True
    assert (plane.ended(), len(plane.dropped)) == ([], 1)
    assert plane.read(plane.connect(plane.there, 0), TEN) == [("it", "")]


def test_a_restarted_peer_is_not_blamed_for_the_former_ones_silence() -> None:
    """A probe without an answer delays only that instance, although its successor has its ports."""
    plane = Scripted()
    plane.end = False
    with pytest.raises(ConnectionError, match="could not be read"):
        plane.connect(plane.there, 0)
    plane.end = True
    successor = Endpoint("scripted", b"", Memory(REMOTE, THERE), b"restarted")
    plane.connect(msgspec.msgpack.encode(successor), 0)


def test_no_two_planes_have_one_endpoint() -> None:
    """Two planes with the same session, memory and device have different instances.

    A rank that is restarted gets the ports and often the addresses of the former one.
    """
    one, other = (msgspec.msgpack.decode(Scripted().endpoint, type=Endpoint) for _ in range(2))
    assert msgspec.structs.replace(one, instance=other.instance) == other
    assert one.instance != other.instance


def test_no_read_is_posted_on_a_dead_plane() -> None:
    """After a restore, a read from a known peer fails, and no peer can be connected."""
    plane = Scripted()
    peer = plane.connect(plane.there)
    plane.posted.clear()
    plane.dead = True
    ((tag, error),) = plane.read(peer, TEN)
    assert (tag, bool(error), plane.posted, peer.reads) == ("it", True, [], 0)
    with pytest.raises(ConnectionError):
        plane.connect(plane.there, 0)
    assert plane.posted == []


@pytest.mark.parametrize("error", ["", "broken", None])
def test_a_peer_is_connected_once_a_byte_was_read(error: str | None) -> None:
    """A peer is connected after a read without an error, and not after one that fails or hangs."""
    plane = Scripted()
    plane._check = lambda read: error  # type: ignore[method-assign]
    if error == "":
        assert not plane.connect(plane.there, 0).gone
        return
    with pytest.raises(ConnectionError, match="could not be read"):
        plane.connect(plane.there, 0)


def no_memory() -> int:
    raise MemoryError("no batch")


@pytest.mark.parametrize("second", [lambda: 0, lambda: (1 << 64) - 1, no_memory])
def test_a_read_that_mooncake_rejects_midway_fails(second: Callable[[], int]) -> None:
    """A read whose second transfer Mooncake rejects fails after its first transfer has ended.

    Mooncake rejects a transfer with 0, or with -1, which some releases return as an unsigned
    number. A status of -2 means that a transfer has exceeded MC_SLICE_TIMEOUT but still runs.
    """
    plane, posts, states = object.__new__(Mooncake), [lambda: 7, second], [0, -2, 1]
    DataPlane.__init__(plane)
    plane._memory = Memory(0, 100)
    plane._engine = SimpleNamespace(
        batch_transfer_async_read=lambda *_: posts.pop(0)(),
        transfer_check_status=lambda number: states.pop(0) if number == 7 else None,
    )
    peer = RemoteMemory(Endpoint("mooncake", b"", Memory(0, 100), b""))
    plane._names = {peer.endpoint: "its name"}
    plane.start("it", peer, [(0, 0, 10), (20, 20, 10), (40, 40, 10)])
    assert [plane.ended(), plane.ended()] == [[], []]
    ((tag, error),) = plane.ended()
    assert tag == "it"
    assert "rejected" in error or "no batch" in error
    assert not peer.reads
    assert bool(plane._names) is ("no batch" in error), "a name must not be reused if not open"


@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_a_mooncake_read_ends_after_all_its_transfers(failing: int | None) -> None:
    """A read ends once all of its transfers have ended, in any order.

    Mooncake drops a transfer's status once it has returned the end, so an ended transfer is never
    polled. Each poll queries one transfer at a time until that transfer has ended.
    """
    for order in permutations(range(3)):
        plane, asked, ended = object.__new__(Mooncake), list[int](), list[int]()
        DataPlane.__init__(plane)
        plane._memory, numbers = Memory(0, 100), iter(range(1, 4))

        def check(number: int, asked: list[int] = asked, ended: list[int] = ended) -> int:
            asked.append(number - 1)
            return 0 if number - 1 not in ended else -1 if number - 1 == failing else 1

        plane._engine = SimpleNamespace(
            batch_transfer_async_read=lambda *_, numbers=numbers: next(numbers),
            transfer_check_status=check,
        )
        peer = RemoteMemory(Endpoint("mooncake", b"", Memory(0, 100), b""))
        plane.start("it", peer, [(0, 0, 10), (20, 20, 10), (40, 40, 10)])
        assert (plane.ended(), plane.ended(), len(asked)) == ([], [], 2)
        for number in order:
            assert plane.busy
            ended.append(number)
            found = plane.ended()
        assert found == [("it", "" if failing is None else "Mooncake reports a failure")]
        assert len(asked) <= 2 + 3 + 2, "three ends, and two polls of a transfer still in flight"
        assert (plane.busy, peer.reads) == (False, 0)


HEAD = struct.pack("<QB", 400, mooncake.METADATA)


@pytest.mark.parametrize(
    ("begin", "drip"), [(b"", b""), (HEAD, b""), (b"", b"\1"), (HEAD, b"\1"), (HEAD[:4], b"\0")]
)
def test_a_mooncake_peer_that_answers_slowly_times_out(
    monkeypatch: pytest.MonkeyPatch, begin: bytes, drip: bytes
) -> None:
    """A peer that answers byte by byte times out: the limit applies to the whole answer."""
    monkeypatch.setattr(mooncake, "ANSWER_S", 0.3)
    plane = object.__new__(Mooncake)
    DataPlane.__init__(plane)
    plane._memory = Memory(0, 100)
    with silent(begin, drip) as address:
        one = Endpoint("mooncake", address.encode(), Memory(0, 100), b"")
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            plane.connect(msgspec.msgpack.encode(one))
        assert time.monotonic() - began < 5


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace Mooncake's engine by one that returns the test's `codes`, and records memory."""
    pytest.importorskip("mooncake.engine")
    made = SimpleNamespace(codes=(0, 0), registered=[], get_rpc_port=lambda: 17)
    made.initialize = lambda *_: made.codes[0]
    made.register_memory = lambda *memory: made.registered.append(memory) or made.codes[1]
    monkeypatch.setattr("mooncake.engine.TransferEngine", lambda: made)
    return made


@pytest.mark.parametrize(("host", "session"), [("10.0.0.1", b"10.0.0.1:17"), ("::1", b"[::1]:17")])
def test_mooncake_registers_the_slots_and_names_its_port(
    host: str, session: bytes, engine: Any
) -> None:
    """The memory is registered by address and size. Over TCP, Mooncake reads also without that."""
    plane = Mooncake(host, "mlx5_0")
    plane.register(Memory(LOCAL, SIZE, 3))
    assert engine.registered == [(LOCAL, SIZE)]
    assert msgspec.msgpack.decode(plane.endpoint, type=Endpoint).session == session


@pytest.mark.parametrize("codes", [(1, 0), (-1, 0), (0, 1), (0, -600)])
def test_any_code_but_0_of_mooncake_is_refused(codes: tuple[int, int], engine: Any) -> None:
    engine.codes = codes
    with pytest.raises(MixKVError, match=rf"MIXKV-START-06.*code {sum(codes)}"):
        Mooncake("10.0.0.1").register(Memory(LOCAL, SIZE))


@pytest.mark.parametrize(("value", "host"), [(None, "127.0.0.7"), ("1", "[::ffff:127.0.0.7]")])
def test_a_mooncake_name_has_the_engines_address_family(
    value: str | None, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mooncake connects to IPv6 addresses only if MC_USE_IPV6 is set."""
    monkeypatch.setattr(mooncake, "HAND_S", 0.01)
    monkeypatch.delenv("MC_USE_IPV6", raising=False)
    if value is not None:
        monkeypatch.setenv("MC_USE_IPV6", value)
    assert mooncake._hand(b"answer", 6).rpartition(":")[0] == host


@contextlib.contextmanager
def answering(answer: Callable[[str], bytes]) -> Iterator[str]:
    """Yield the address of a peer that answers one query, and then waits for its end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as peer:
                peer.recv(100)
                peer.sendall(answer(address))
                peer.recv(100)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield address
        thread.join(10)
        assert not thread.is_alive()


def framed(text: bytes) -> bytes:
    return struct.pack("<QB", 1 + len(text), mooncake.METADATA) + text


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, None),
        ({"rdma_server_name": ""}, None),
        ({"rdma_server_name": "10.0.0.7:17"}, "10.0.0.7:17"),
        ({"rdma_server_name": "[fd00::7]:17", "tcp_data_host": "10.0.0.8"}, "[fd00::7]:17"),
    ],
)
def test_mooncake_gets_the_address_of_a_peers_nics(given: Any, name: str | None) -> None:
    """The handed answer has the peer's address for RDMA, if it has one, as its name.

    All else is unchanged: Mooncake finds the peer's memory there.
    """
    rest = {"tcp_data_port": 7, "buffers": [{"addr": 1, "length": 2}]} | given

    def answer(address: str) -> bytes:
        return framed(json.dumps({"name": address, **rest}).encode())

    with answering(answer) as address:
        found = mooncake._ask(address)
    content = json.loads(found[9:])
    assert framed(found[9:]) == found
    rest.pop("rdma_server_name", None)
    assert content == {**rest, "name": name or address}


@pytest.mark.parametrize(
    "given",
    [
        {"rdma_server_name": "localhost:17"},
        {"rdma_server_name": "10.0.0.7"},
        {"tcp_data_host": "localhost"},
        {"name": "localhost:17"},
        {"name": "127.0.0.1:17"},
        {"name": ""},
    ],
)
def test_an_answer_of_mooncake_has_only_ip_addresses(given: dict[str, str]) -> None:
    """Mooncake would look a host's name up, even one that it can resolve, and that may block."""

    def answer(address: str) -> bytes:
        return framed(json.dumps({"name": address} | given).encode())

    with answering(answer) as address, pytest.raises(ValueError, match=r"."):
        mooncake._ask(address)


@pytest.mark.parametrize(("beyond", "is_read"), [(0, True), (1, False), (1 << 40, False)])
def test_a_mooncake_answer_is_read_up_to_its_maximum_size(beyond: int, is_read: bool) -> None:
    """A peer that announces a longer answer fails at once, before it can send the answer."""

    def answer(address: str) -> bytes:
        text = json.dumps({"name": address}).encode()
        spaces = mooncake.LONGEST - 9 - len(text)
        head = struct.pack("<QB", 1 + len(text) + spaces + beyond, mooncake.METADATA)
        return head + text + b" " * (spaces + min(beyond, 1))

    with answering(answer) as address:
        began = time.monotonic()
        if is_read:
            assert json.loads(mooncake._ask(address)[9:]) == {"name": address}
        else:
            with pytest.raises(ValueError, match="answered"):
                mooncake._ask(address)
        assert time.monotonic() - began < mooncake.ANSWER_S


def test_a_mooncake_name_is_never_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name that is handed to Mooncake has a host of its own, also after one was dropped.

    The kernel reuses ports, and Mooncake keeps its answer about a name for ever.
    """
    plane, hosts = object.__new__(Mooncake), list[str]()
    DataPlane.__init__(plane)
    plane._names, plane._numbers = {}, itertools.count()
    monkeypatch.setattr(mooncake, "_ask", lambda _: b"")
    for number in range(6):
        peer = RemoteMemory(Endpoint("mooncake", b"", Memory(0, 100), b"%d" % number))
        plane._open(peer)
        assert peer.name is not None
        hosts.append(peer.name.rpartition(":")[0])
        if number % 2:
            plane._names.clear()  # reads from these names have failed to start
    assert len({*hosts}) == len(hosts)


@pytest.mark.parametrize("opened", [False, True])
def test_the_thread_of_an_unopened_mooncake_name_ends(
    monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    """The thread that serves a name ends if Mooncake never connects, or never disconnects."""
    monkeypatch.setattr(mooncake, "HAND_S", 0.3)
    before, host = set(threading.enumerate()), mooncake._hand(b"answer", 1)
    (thread,) = set(threading.enumerate()) - before
    with contextlib.ExitStack() as stack:
        if opened:
            address = host.removeprefix("[::ffff:").replace("]", "").rsplit(":", 1)
            peer = stack.enter_context(socket.create_connection((address[0], int(address[1]))))
            assert peer.recv(100) == b"answer"
        thread.join(5)
        assert not thread.is_alive()


# ---------------------------------------------------------------- several threads


class Counting(Scripted):
    """A data plane that counts its reads.

    `flying`: the number of reads in flight. `dropped_under`: that number at each release of a peer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flying, self.dropped_under = 0, list[int]()

    def _post(self, read: Read, extents: Any) -> None:
        super()._post(read, extents)
        self.flying += 1

    def _check(self, read: Read) -> str | None:
        self.flying -= self.end
        return super()._check(read)

    def _drop(self, peer: RemoteMemory) -> None:
        self.dropped_under.append(self.flying)


class Watched:
    """Runs `what` in a second thread at the `at`th access to an attribute in `names`.

    Only accesses by the first thread count. The second thread runs until it ends or needs a lock
    that the first one holds.
    """

    names: tuple[str, ...]
    at, what = 0, staticmethod(lambda: None)

    def __init__(self, *args: Any) -> None:
        self._looks, self._first, self.other = 0, threading.get_ident(), threading.Thread()
        super().__init__(*args)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in type(self).names and threading.get_ident() == self._first:
            self._looks += 1
            if self._looks == self.at:
                self.other = threading.Thread(target=self.what)
                self.other.start()
                self.other.join(0.05)
        return found

    def watch(self, at: int, what: Callable[[], Any], do: Callable[[], Any]) -> None:
        """Run `do`, and `what` in a second thread at the `at`th access during `do`."""
        self._looks, self.at, self.what = 0, at, what
        do()
        self.at = 0
        if self.other.ident is not None:
            self.other.join(10)
        assert not self.other.is_alive()


class WatchedPeer(Watched, RemoteMemory):
    names = "reads", "gone"


@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("doing", ["start", "ended", "forget"])
def test_a_peer_may_be_forgotten_in_another_thread(doing: str, at: int) -> None:
    """A peer that another thread forgets at any step is released once, after its last read.

    The bytes of a read in flight may still land.
    """
    plane = Counting()
    peer = WatchedPeer(msgspec.msgpack.decode(plane.there, type=Endpoint))
    peer.name, plane.end = "it", False
    if doing == "ended":
        plane.start("before", peer, [TEN])
        plane.end = True
    do = {
        "start": lambda: plane.start("it", peer, [TEN]),
        "ended": plane.ended,
        "forget": lambda: plane.forget(peer),
    }[doing]
    peer.watch(at, lambda: plane.forget(peer), do)
    plane.end = True
    plane.ended()
    plane.forget(peer)
    assert (plane.dropped_under, plane.flying, peer.reads) == ([0], 0, 0)


class WatchedPlane(Watched, Scripted):
    """A watched data plane. `answered`: the sessions of the peers that answer."""

    names = "_unanswered", "_check"

    def __init__(self) -> None:
        super().__init__()
        self.answered = set[bytes]()

    def _check(self, read: Read) -> str | None:
        return "" if read.peer.endpoint.session in self.answered else None

    def give_up(self, session: bytes, why: str = "could not be read") -> None:
        there = Endpoint(self.name, session, Memory(REMOTE, THERE), b"")
        with pytest.raises(ConnectionError, match=why):
            self.connect(msgspec.msgpack.encode(there), -1)


@pytest.mark.parametrize("at", range(1, 7))
@pytest.mark.parametrize(
    ("doing", "other"), [("give up", "give up"), ("give up", "ended"), ("ended", "give up")]
)
def test_probes_may_time_out_in_several_threads(doing: str, other: str, at: int) -> None:
    """A probe that times out is polled until it has ended, and its peer is released once.

    The time-out may come at any step of another thread.
    """
    plane, given_up = WatchedPlane(), [b"answers", b"silent"]
    for session in given_up:
        plane.give_up(session)
    plane.answered = {b"answers"}

    def gives_up() -> None:
        plane.give_up(session := b"%d" % threading.get_ident())
        given_up.append(session)

    do: dict[str, Callable[[], Any]] = {"give up": gives_up, "ended": plane.ended}
    plane.watch(at, do[other], do[doing])
    plane.ended()
    for session in given_up[1:]:
        plane.give_up(session, "not answered")
    plane.answered = set(given_up)
    plane.ended()
    assert sorted(peer.endpoint.session for peer in plane.dropped) == sorted(given_up)


class Agent:
    """The calls of a NIXL agent that manage peers. Peers with the same name share a connection."""

    def __init__(self) -> None:
        self.known, self.calls = set[str](), list[str]()

    def add_remote_agent(self, session: bytes) -> bytes:
        self.calls.append("add")
        self.known.add(session.decode())
        return session

    def remove_remote_agent(self, name: str) -> None:
        self.calls.append("remove")
        self.known.remove(name)  # raises KeyError for an unknown name, as NIXL does


def nixl_with(agent: Any) -> tuple[Nixl, Callable[[bytes], RemoteMemory]]:
    plane = object.__new__(Nixl)
    DataPlane.__init__(plane)
    plane._agent, plane._naming, plane._named = agent, threading.Lock(), defaultdict(set)

    def opened(session: bytes) -> RemoteMemory:
        peer = RemoteMemory(Endpoint("nixl", session, Memory(0, 100), b""))
        plane._open(peer)
        return peer

    return plane, opened


@pytest.mark.parametrize(
    ("backend", "given", "taken"),
    [
        ("UCX", None, {"engine_config": "TCP_CONN_NB=y"}),
        ("UCX", {"num_threads": "4"}, {"engine_config": "TCP_CONN_NB=y", "num_threads": "4"}),
        ("UCX", {"engine_config": "TLS=rc"}, {"engine_config": "TLS=rc"}),
        ("POSIX", {"ios_pool_size": "8"}, {"ios_pool_size": "8"}),
    ],
)
def test_nixl_parameters_of_the_operator_take_precedence(
    backend: str, given: Any, taken: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[tuple[str, dict[str, str]]]()
    agent = SimpleNamespace(create_backend=lambda *args: made.append(args))
    monkeypatch.setattr(nixl, "_new_agent", lambda: agent)
    Nixl(backend, given)
    assert made == [(backend, taken)]


def test_a_nixl_name_stays_while_a_peer_uses_it() -> None:
    """NIXL's entry for a name stays until all peers with that name are forgotten."""
    agent = Agent()
    plane, opened = nixl_with(agent)
    one, two, other = opened(b"a"), opened(b"a"), opened(b"b")
    for _ in range(10):
        plane.forget(one)
        assert (agent.known, agent.calls.count("remove")) == ({"a", "b"}, 0)
        one = opened(b"a")
    assert {name: len(peers) for name, peers in plane._named.items()} == {"a": 2, "b": 1}
    for peer, left in ((one, {"a", "b"}), (other, {"a"}), (two, set())):
        plane.forget(peer)
        plane.forget(peer)
        assert agent.known == left
    assert not plane._named


@pytest.mark.parametrize("reads", [0, 1])
def test_reopening_keeps_a_name_with_reads_in_flight(reads: int) -> None:
    agent = Agent()
    plane, opened = nixl_with(agent)
    one, two = opened(b"a"), opened(b"a")
    two.reads = reads
    agent.calls.clear()
    plane._open(one)  # again, as after a failed read
    assert agent.calls == ["remove", "add"][reads:]
    two.reads = 0
    plane.forget(one)
    plane.forget(two)
    assert (agent.known, dict(plane._named)) == (set(), {})


class Transfers(Agent):
    """An agent that records descriptors, and reports these states.

    `asked`: (kind of memory, devices) of each list. The first state is that of the post.
    """

    def __init__(self, *states: str) -> None:
        super().__init__()
        self.asked: list[tuple[str, set[int]]] = []
        self._states = list(states)

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> None:
        self.asked.append((kind, {device for _, _, device, _ in regions}))

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def get_xfer_descs(self, ranges: list[tuple[int, int, int]], kind: str) -> Any:
        self.asked.append((kind, {device for _, _, device in ranges}))

    def initialize_xfer(self, *_: Any) -> str:
        return "a handle"

    def transfer(self, _: str) -> str:
        return self._states.pop(0)

    def check_xfer_state(self, _: str) -> str:
        if (state := self._states.pop(0)) == "raises":
            raise Disconnected(state)
        return state


class Disconnected(Exception):
    """An error of NIXL's bindings, whose only base is Exception."""


@pytest.mark.parametrize(("here", "there"), [(3, 1), (0, 2), (None, 1), (3, None), (None, None)])
def test_nixl_descriptors_name_each_sides_gpu(here: int | None, there: int | None) -> None:
    agent = Transfers("PROC")
    plane, _ = nixl_with(agent)
    plane.register(Memory(LOCAL, SIZE, here))
    peer = RemoteMemory(Endpoint("nixl", b"a", Memory(REMOTE, THERE, there), b""))
    plane._open(peer)
    plane.start("it", peer, [TEN, TEN])
    own, other = (("DRAM", {0}) if gpu is None else ("VRAM", {gpu}) for gpu in (here, there))
    assert agent.asked == [own, own, other]


@pytest.mark.parametrize(
    ("states", "ends"),
    [
        (["DONE", "DONE"], ""),
        (["PROC", "PROC", "PROC", "DONE"], ""),
        (["ERR"], "rejected"),
        (["PROC", "ERR"], "NIXL reports ERR"),
        (["PROC", "PROC", "another"], "NIXL reports another"),
        (["PROC", "raises"], "Disconnected"),
    ],
)
def test_a_nixl_read_ends_as_its_agent_reports(states: list[str], ends: str) -> None:
    """A read ends at once if its post fails, and otherwise with the first state but PROC."""
    agent = Transfers(*states)
    plane, opened = nixl_with(agent)
    plane.register(Memory(0, SIZE))
    peer = opened(b"a")
    plane.start("it", peer, [(0, 0, 10)])
    for _ in states[2:]:
        assert (plane.ended(), peer.reads) == ([], 1)
    ((tag, error),) = plane.ended()
    assert (tag, peer.reads, agent._states) == ("it", 0, [])
    assert ends in error if ends else error == ""


def test_a_nixl_agent_is_made_for_several_threads_and_sleeps_when_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other threads connect while the channel's thread reads, and polling would occupy a core.

    In NIXL's own agent, the progress thread never sleeps.
    """
    api, made = pytest.importorskip("nixl._api"), list[Any]()
    real = api.nixlBind.nixlAgent
    monkeypatch.setattr(api.nixlBind, "nixlAgent", lambda *args: made.append(args) or real(*args))
    agent = nixl._new_agent()
    name, config = made[-1]
    assert (name, config.useProgThread, config.pthrDelay) == (agent.name, True, 1000)
    strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    assert config.syncMode == strict.value


def agent_of_process_seven() -> str:
    """Return the name of a new agent in a process with a fixed seed and a fixed PID."""
    os.getpid = lambda: 7
    random.seed(1)
    name: str = nixl._new_agent().name
    return name


def test_agents_of_two_containers_have_two_names() -> None:
    """Two agents have different names even if their processes have the same PID.

    Processes in two containers may have the same PID, and SGLang seeds them alike.
    """
    pytest.importorskip("nixl")
    one, other = in_fork(agent_of_process_seven), in_fork(agent_of_process_seven)
    assert one != other
