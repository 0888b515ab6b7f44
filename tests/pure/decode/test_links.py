"""The links to many peers: all messages are read, and idle links are not polled."""

from __future__ import annotations

import gc
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from rig.channel.threads import SEGMENT, Channel, wait_for
from rig.process.answers import silent
from rig.process.resources import resources

from sglang_mixkv.channel import sockets
from sglang_mixkv.channel.messages import Ack, Announced, Fail, Message, encode
from sglang_mixkv.channel.sockets import BATCH, Poller, new_context, new_socket
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import actions as act
from sglang_mixkv.decode import links
from sglang_mixkv.decode.links import Link, Links
from sglang_mixkv.draft.rows import DraftRows

PEER, HOST, SOON_MS, MANY = b"%08d" % 0, "127.0.0.1", 10_000, 100
PATIENT = Times(100)  # so long that nothing times out
LARGE = Fail(1, 2, "lost", "\N{GRINNING FACE}" * 512)


class Ranks:
    """A ROUTER socket in place of `count` prefill ranks, and a decode rank connected to them."""

    def __init__(self, count: int = 1) -> None:
        self._context = new_context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.links = Links(None, Times(), Poller())
        self._names: dict[bytes, bytes] = {}
        for number in range(count):
            port = self._socket.bind_to_random_port(f"tcp://{HOST}")
            row: Any = SimpleNamespace(instance=b"%08d" % number, address=f"tcp://{HOST}:{port}")
            self.links.add(self.links.dial(row, ""))
            assert self.links.send(row.instance, Ack(((0, 1),)))
            self._names[row.instance] = self._socket.recv_multipart()[0]
        self.look(0)

    def send(self, peer: bytes, message: Message) -> None:
        self._socket.send_multipart([self._names[peer], encode(message)])

    def look(self, timeout_ms: int = SOON_MS) -> list[tuple[bytes, Message | ValueError]]:
        return list(self.links.received(self.links._poller.poll(timeout_ms)))

    def close(self) -> None:
        self.links._context.destroy(linger=0)
        self._context.destroy(linger=0)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    one = Ranks()
    yield one
    one.close()


def is_named(ranks: Ranks, timeout_s: float = 0) -> bool:
    """Return True if epoll reports a socket as readable."""
    return bool(select.select([ranks.links._poller._epoll], [], [], timeout_s)[0])


@pytest.mark.parametrize("leaves", [True, False])
def test_a_message_that_arrived_before_a_send_is_read(ranks: Ranks, leaves: bool) -> None:
    """A message that arrived before a send is read, although the send resets the socket's FD.

    A send that fails because the peer's queue is full also resets the FD.
    """
    while not leaves and (ranks.links.send(PEER, LARGE) or is_named(ranks, 1)):
        ranks.look(0)
    ranks.send(PEER, Fail(1, 2, "lost"))
    assert is_named(ranks, 10)
    time.sleep(0.05)  # libzmq checks for arrivals at most once per millisecond
    assert ranks.links.send(PEER, LARGE) is leaves
    assert not is_named(ranks)
    assert ranks.look() == [(PEER, Fail(1, 2, "lost"))]


def test_messages_beyond_one_batch_need_no_new_signal(ranks: Ranks) -> None:
    sent = [(PEER, Fail(number, 2, "lost")) for number in range(3 * BATCH)]
    for peer, message in sent:
        ranks.send(peer, message)
    found = list[tuple[bytes, Message | ValueError]]()
    while len(found) < len(sent):
        some = ranks.look()
        assert 0 < len(some) <= BATCH
        found += some
    assert found == sent


@pytest.mark.parametrize("count", [2, 7, MANY])
def test_peers_that_send_without_a_pause_share_a_batch(count: int) -> None:
    """Many ranks of a hostile server, which all send without a pause, delay no other rank's message
    for long: a look takes one batch from all of them together, or one message from each. A rank
    that sends while the others are silent gets the whole batch."""
    ranks = Ranks(count)
    try:
        sent = {peer: [Fail(room, 2, "lost") for room in range(BATCH)] for peer in ranks._names}
        for peer, messages in sent.items():
            for message in messages:
                ranks.send(peer, message)
        time.sleep(0.3)  # until they have arrived
        found: dict[bytes, list[Any]] = {peer: [] for peer in sent}
        while found != sent:
            some = ranks.look()
            each = Counter(peer for peer, _ in some)
            assert 0 < max(each.values()) <= max(1, BATCH // len(each))
            for peer, message in some:
                found[peer].append(message)
        (peer, messages), *_ = sent.items()
        for message in messages:
            ranks.send(peer, message)
        time.sleep(0.3)
        assert ranks.look() == [(peer, message) for message in messages], "alone, it gets all"
    finally:
        ranks.close()


@pytest.mark.parametrize(("count", "queries"), [(1, 2), (2, 2), (BATCH - 1, 2), (BATCH, 3)])
def test_an_empty_socket_is_not_queried_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, count: int, queries: int
) -> None:
    """A socket that was read until it was empty is not queried again before the next signal.

    A query takes 1.3 us. One query finds the first message, and one more finds the socket empty.
    After a full batch, a third query is needed.
    """
    asked, real = list[Any](), sockets.has_message
    monkeypatch.setattr(sockets, "has_message", lambda one: asked.append(one) or real(one))
    for number in range(count):
        ranks.send(PEER, Fail(number, 2, "lost"))
    time.sleep(0.2)  # until all messages have arrived
    asked.clear()
    assert len(ranks.look(0)) == count
    assert ranks.look(0) == []
    assert ranks.look(0) == []
    assert len(asked) == queries


def test_messages_before_the_registration_are_read() -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        router = context.socket(zmq.ROUTER)
        dealer.connect(f"tcp://{HOST}:{router.bind_to_random_port(f'tcp://{HOST}')}")
        dealer.send(b"here")
        router.send_multipart([name := router.recv_multipart()[0], b"there"])
        assert dealer.poll(SOON_MS)  # resets the socket's FD
        poller = Poller()
        poller.register(dealer)
        assert poller.poll(SOON_MS) == [dealer]
        assert dealer.recv() == b"there"
        assert not dealer.poll(0)  # so that the next message sets the FD
        router.send_multipart([name, b"there"])
        assert select.select([dealer.fileno()], [], [], SOON_MS / 1000)[0]
        poller.unregister(dealer)
        assert poller.poll(0) == []
        router.close()


@pytest.mark.parametrize(
    "address",
    ["tcp://prefill.example:9100", "ipc:///tmp/a:1", "inproc://a:1", "tcp://127.0.0.1", "", "a:b"],
)
def test_an_address_without_ip_and_port_is_rejected(ranks: Ranks, address: str) -> None:
    """An address without an IP and a port is rejected."""
    with pytest.raises(ValueError, match="expected tcp://IP:PORT"):
        ranks.links.dial(SimpleNamespace(address=address), "")  # type: ignore[arg-type]


def test_dialing_a_rank_that_does_not_answer_times_out(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "CONNECT_S", 0.1)
    with silent() as address, pytest.raises(TimeoutError):
        ranks.links.dial(SimpleNamespace(address=f"tcp://{address}", instance=PEER), "")


def test_a_peer_takes_little_memory_and_three_descriptors() -> None:
    """A peer takes under 128 KiB of memory, two descriptors on decode and one on prefill.

    All links of the test lead to one prefill rank, under different server names. A link takes a
    socket and an eventfd on decode, and a socket on prefill.
    """
    with Channel(PATIENT) as channel:

        def serve(servers: range) -> None:
            for number in servers:
                peer = channel.decode.reach(channel.prefill.row, str(number))
                sent = channel.prefill.send(number, SEGMENT)
                handle = channel.decode.open(number, SEGMENT, peer)
                assert channel.state(handle) == ("warm", "")
                channel.end(sent, handle)

        serve(range(1))
        gc.collect()  # closes what earlier tests left open
        before = resources()
        serve(range(1, 1 + MANY))
        after = resources()
        assert (after["fds"] - before["fds"]) / MANY == 2 + 1
        assert (after["rss_mib"] - before["rss_mib"]) * 1024 / MANY < 128


def test_idle_peers_are_not_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    getsockopt = zmq.Socket.getsockopt

    def counted(socket: Any, option: int) -> Any:
        if option == zmq.EVENTS:
            asked.append(socket)
        return getsockopt(socket, option)

    monkeypatch.setattr(zmq.Socket, "getsockopt", counted)
    ranks, messages = Ranks(MANY), 20
    assert len(set(asked)) == MANY  # each new socket is queried
    asked.clear()
    for number in range(messages):
        sent = PEER, Fail(number, 2, "lost")
        ranks.send(*sent)
        while not (found := ranks.look()):
            pass
        assert found == [sent]
        assert ranks.links.send(PEER, Ack(((0, 1),)))
    assert messages <= len(asked) <= 4 * messages
    assert len(set(asked)) == 1
    ranks.close()


# ---------------------------------------------------------------- resources of a peer


class Plane:
    """The calls of a data plane for peers.

    `held`: the peers that are not forgotten. `fails`: whether `connect` raises. `then` is called at
    step `at`; each call of the data plane has a step before it and one after it.
    """

    dead = False

    def __init__(self) -> None:
        self.held, self.made, self.fails = set[int](), 0, False
        self.at, self.then, self._steps = 0, lambda: None, 0

    def _step(self) -> None:
        self._steps += 1
        if self._steps == self.at:
            self.then()

    def connect(self, _: bytes) -> int:
        self._step()
        if self.fails:
            raise ConnectionError("the peer's memory could not be read")
        self.made += 1
        self.held.add(self.made)
        self._step()
        return self.made

    def forget(self, peer: int) -> None:
        self._step()
        self.held.discard(peer)
        self._step()


Dialed = tuple[Links, Plane, Callable[[], Link], list[zmq.Socket[bytes]]]


@pytest.fixture
def dialed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dialed]:
    """Yield links over a `Plane`, the plane, a function that dials, and the sockets made."""
    context, plane, made = new_context(), Plane(), list[zmq.Socket[bytes]]()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port(f"tcp://{HOST}")
    store: Any = SimpleNamespace(plane=plane, rows=SimpleNamespace(use_device=lambda: None))
    these = Links(store, PATIENT, Poller())

    def socket(*given: Any) -> zmq.Socket[bytes]:
        made.append(new_socket(*given))
        return made[-1]

    monkeypatch.setattr(links, "new_socket", socket)
    row: Any = SimpleNamespace(
        instance=PEER, address=f"tcp://{HOST}:{port}", staging=SimpleNamespace(endpoint=b"")
    )
    yield these, plane, lambda: these.dial(row, ""), made
    these._context.destroy(linger=0)
    context.destroy(linger=0)


STEPS = range(1, 9)


@pytest.mark.parametrize("at", STEPS)
@pytest.mark.parametrize("fails", [False, True])
def test_hanging_up_during_a_reconnection_leaves_no_peer(
    dialed: Dialed, fails: bool, at: int
) -> None:
    """A link that is hung up at any step of its reconnection leaves no peer open."""
    these, plane, dial, made = dialed
    link = dial()
    link.reconnecting, plane.fails = True, fails
    plane.at, plane.then, plane._steps = at, lambda: these.hang_up(link), 0
    these._connect_again(link)
    if not link.closed:
        these.hang_up(link)
    assert (plane.held, link.reconnecting, made[0].closed) == (set(), False, True)


@pytest.mark.parametrize("at", STEPS)
def test_reconnecting_during_a_hang_up_leaves_no_peer(dialed: Dialed, at: int) -> None:
    """A link that reconnects at any step of a hang-up leaves no peer open."""
    these, plane, dial, _ = dialed
    link = dial()
    plane.at, plane.then, plane._steps = at, lambda: these._connect_again(link), 0
    these.hang_up(link)
    assert plane.held == set()


def test_reconnections_leak_nothing(dialed: Dialed) -> None:
    these, plane, dial, made = dialed
    these.add(link := dial())
    for number in range(20):
        plane.fails = number % 3 == 1  # the link then stays broken until the next attempt
        these._connect_again(link)
        assert len(plane.held) == (not plane.fails)
    assert (len(made), made[0].closed) == (1, False)
    these.drop(PEER)
    these.drop(PEER)
    assert (plane.held, made[0].closed, these._links, these._of_dealer) == (set(), True, {}, {})
    assert not these._poller._sockets


def test_a_new_link_replaces_an_earlier_one(dialed: Dialed) -> None:
    these, plane, dial, made = dialed
    for _ in range(5):
        these.add(dial())
    assert [one.closed for one in made] == [True] * 4 + [False]
    assert (plane.held, len(these._poller._sockets), len(these._of_dealer)) == ({5}, 1, 1)


@pytest.mark.parametrize("fails", ["memory", "port"])
def test_an_unreachable_rank_leaves_no_socket(
    dialed: Dialed, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    _, plane, dial, made = dialed
    plane.fails = fails == "memory"
    if fails == "port":
        monkeypatch.setattr(links, "CONNECT_S", 0)
        monkeypatch.setattr(zmq.Socket, "connect", lambda *_: None)
    with pytest.raises(ConnectionError if fails == "memory" else TimeoutError):
        dial()
    assert (plane.held, made[0].closed) == (set(), True)


def broken_once(these: Links, plane: Plane, link: Link) -> Any:
    """End a read of the link with an error."""
    plane.ended = lambda: [((1, link, link.memory), "broken")]  # type: ignore[attr-defined]
    return list(these.ended())


def test_one_thread_reconnects_a_link_unless_it_is_hung_up(dialed: Dialed) -> None:
    these, plane, dial, _ = dialed
    link, gate, before = dial(), threading.Event(), threading.active_count()
    old = link.memory
    plane.at, plane.then, plane._steps = 1, lambda: gate.wait(10), 0
    for _ in range(3):
        broken_once(these, plane, link)
    assert threading.active_count() == before + 1
    gate.set()
    assert wait_for(lambda: not link.reconnecting)
    assert link.memory != old
    plane.ended = lambda: [((1, link, old), "broken")]  # type: ignore[attr-defined]
    list(these.ended())  # a read of the former connection does not matter any more
    assert (link.reconnecting, plane.made) == (False, 2)
    these.hang_up(link)
    broken_once(these, plane, link)
    assert (link.reconnecting, plane.held, plane.made) == (False, set(), 2)


def test_a_failed_thread_start_is_retried_at_the_next_failure(
    dialed: Dialed, monkeypatch: pytest.MonkeyPatch
) -> None:
    these, plane, dial, _ = dialed
    link = dial()

    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        assert len(broken_once(these, plane, link)) == 1
    assert (link.reconnecting, plane.made) == (False, 1)
    broken_once(these, plane, link)
    assert wait_for(lambda: plane.made == 2 and not link.reconnecting)
    assert plane.held == {2}


def test_a_reads_tag_names_the_memory_that_it_uses(dialed: Dialed) -> None:
    """A read's tag names the memory that the read uses, even if a reconnection replaces it.

    A failure of that read must not count as a failure of the new memory.
    """
    these, plane, dial, _ = dialed
    started: list[tuple[Any, Any]] = []

    class Moving(Link):
        memory = property(lambda self: next(self.__dict__["_memories"]), lambda self, _: None)

    link = dial()
    moving = Moving(link.peer, link.row, link.dealer, None)
    moving.__dict__["_memories"] = iter(range(100))
    moving.row.staging.base = moving.row.staging.slot_bytes = 0
    these.add(moving)
    these._store.staging = SimpleNamespace(address=0, slot_bytes=0)  # type: ignore[union-attr]
    plane.start = lambda tag, peer, _: started.append((tag[2], peer))  # type: ignore[attr-defined]
    assert these.read(act.StartRead(link.peer, [], 0.0, 1.0))
    ((named, read),) = started
    assert named == read


def test_nothing_is_read_without_staging_on_either_side(ranks: Ranks, dialed: Dialed) -> None:
    """Nothing is read if either side has no drafter or no staging buffer, or the peer is gone."""
    without, (these, _, dial, _) = ranks.links, dialed
    these.add(link := dial())
    for one, peer, staging in (
        (without, PEER, None), (without, PEER, SimpleNamespace(base=0, slot_bytes=64)),
        (these, PEER, None), (these, b"gone", None),
    ):  # fmt: skip
        (link if one is these else one._links[PEER]).row.staging = staging  # type: ignore[misc]
        assert not one.read(act.StartRead(1, peer, (), 4))
    assert not list(without.ended())


def test_each_segment_of_a_read_has_its_own_slots_and_size(dialed: Dialed) -> None:
    """A read takes each segment from its slot there to its slot here, and no byte more.

    Slots, their sizes and the memory's address differ between the sides. The reader needs some of
    its heads from this rank, and a segment may have fewer tokens than fit.
    """
    these, plane, dial, _ = dialed
    started: list[Any] = []
    plane.start = lambda _, peer, extents: started.append((peer, extents))  # type: ignore[attr-defined]
    entries = [torch.zeros((8, 4, width), dtype=torch.uint8) for width in (16, 24)]
    rows, store = DraftRows(entries, range(4)), these._store
    store.rows.packed_bytes = rows.packed_bytes  # type: ignore[union-attr]
    store.staging = SimpleNamespace(address=10_000, slot_bytes=1024)  # type: ignore[union-attr]
    link = dial()
    link.row.staging.base, link.row.staging.slot_bytes = 50_000, 4096  # type: ignore[union-attr]
    these.add(link)
    source = SimpleNamespace(source=SimpleNamespace(heads=range(1, 3)))
    segments: Any = [
        SimpleNamespace(announced=Announced(there, 1, count), slot=here, transfer=source)
        for there, here, count in ((5, 2, 7), (0, 3, 1))
    ]
    assert these.read(act.StartRead(link.peer, segments, 0.0, 1.0))
    assert started == [
        (link.memory, [
            (10_000 + 2 * 1024, 50_000 + 5 * 4096, rows.packed_bytes(7, 2)),
            (10_000 + 3 * 1024, 50_000, rows.packed_bytes(1, 2)),
        ]),
    ]  # fmt: skip


def test_a_message_of_several_frames_ends_only_its_own_link() -> None:
    """No message after it is read, and those of another rank are."""
    ranks = Ranks(2)
    good, bad = ranks._names
    ranks._socket.send_multipart([ranks._names[bad], b"one", b"two"])
    for peer in (bad, bad, good):
        ranks.send(peer, Fail(1, 2, "lost"))
    found = list[Any]()
    assert wait_for(lambda: found.extend(ranks.look(10)) or len(found) == 2)
    assert {peer: str(message) for peer, message in found} == {
        bad: "a message of several frames", good: str(Fail(1, 2, "lost")),
    }  # fmt: skip
    assert (bad in ranks.links, good in ranks.links, ranks.look(10)) == (False, True, [])
    ranks.close()
