"""Many peers: whatever comes is read, and those that are idle cost memory and descriptors alone."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from rig.channel.threads import SEGMENT, Channel, wait_for
from rig.process.answers import silent
from rig.process.resources import resources

from sglang_mixkv.channel import sockets
from sglang_mixkv.channel.messages import Ack, Fail, Message, encode
from sglang_mixkv.channel.sockets import BATCH, Poller, new_context, new_socket
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import actions as act
from sglang_mixkv.decode import links
from sglang_mixkv.decode.links import Link, Links

PEER, HOST, SOON_MS, MANY = b"%08d" % 0, "127.0.0.1", 10_000, 100
PATIENT = Times(100)  # nothing here is late
LARGE = Fail(1, 2, "lost", "\N{GRINNING FACE}" * 512)


class Ranks:
    """`count` prefill ranks in one socket, and a decode rank that is connected to them."""

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
    """Return True if epoll reports the socket as readable."""
    return bool(select.select([ranks.links._poller._epoll], [], [], timeout_s)[0])


@pytest.mark.parametrize("leaves", [True, False])
def test_a_message_that_came_before_a_send_is_read(ranks: Ranks, leaves: bool) -> None:
    """The send makes the socket's FD silent, also one that fails, since its peer takes no more."""
    while not leaves and (ranks.links.send(PEER, LARGE) or is_named(ranks, 1)):
        ranks.look(0)
    ranks.send(PEER, Fail(1, 2, "lost"))
    assert is_named(ranks, 10)
    time.sleep(0.05)  # a send in the same millisecond may leave the FD alone
    assert ranks.links.send(PEER, LARGE) is leaves
    assert not is_named(ranks)
    assert ranks.look() == [(PEER, Fail(1, 2, "lost"))]


def test_messages_that_exceed_one_poll_need_no_further_signal(ranks: Ranks) -> None:
    sent = [(PEER, Fail(number, 2, "lost")) for number in range(3 * BATCH)]
    for peer, message in sent:
        ranks.send(peer, message)
    found = list[tuple[bytes, Message | ValueError]]()
    while len(found) < len(sent):
        some = ranks.look()
        assert 0 < len(some) <= BATCH
        found += some
    assert found == sent


@pytest.mark.parametrize(("count", "queries"), [(1, 2), (2, 2), (BATCH - 1, 2), (BATCH, 3)])
def test_a_socket_that_was_read_to_its_end_is_not_queried_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, count: int, queries: int
) -> None:
    """A query takes 1.3 us: one finds that there are messages, and one after the first message
    whether it came alone. A full batch may have left some."""
    asked, real = list[Any](), sockets.has_message
    monkeypatch.setattr(sockets, "has_message", lambda one: asked.append(one) or real(one))
    for number in range(count):
        ranks.send(PEER, Fail(number, 2, "lost"))
    time.sleep(0.2)  # until all have come
    asked.clear()
    assert len(ranks.look(0)) == count
    assert ranks.look(0) == []
    assert ranks.look(0) == []
    assert len(asked) == queries


def test_what_came_before_a_socket_was_registered_is_read() -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        router = context.socket(zmq.ROUTER)
        dealer.connect(f"tcp://{HOST}:{router.bind_to_random_port(f'tcp://{HOST}')}")
        dealer.send(b"here")
        router.send_multipart([name := router.recv_multipart()[0], b"there"])
        assert dealer.poll(SOON_MS)  # which makes its FD silent
        poller = Poller()
        poller.register(dealer)
        assert poller.poll(SOON_MS) == [dealer]
        assert dealer.recv() == b"there"
        assert not dealer.poll(0)  # so that the next message signals
        router.send_multipart([name, b"there"])
        assert select.select([dealer.fileno()], [], [], SOON_MS / 1000)[0]
        poller.unregister(dealer)
        assert poller.poll(0) == []
        router.close()


@pytest.mark.parametrize(
    "address",
    ["tcp://prefill.example:9100", "ipc:///tmp/a:1", "inproc://a:1", "tcp://127.0.0.1", "", "a:b"],
)
def test_what_no_prefill_rank_binds_is_not_connected_to(ranks: Ranks, address: str) -> None:
    """All sockets wait while libzmq's thread looks up a name."""
    with pytest.raises(ValueError, match="expected tcp://IP:PORT"):
        ranks.links.dial(SimpleNamespace(address=address), "")  # type: ignore[arg-type]


def test_a_rank_that_does_not_answer_is_given_up(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "CONNECT_S", 0.1)
    with silent() as address, pytest.raises(TimeoutError):
        ranks.links.dial(SimpleNamespace(address=f"tcp://{address}", instance=PEER), "")


def test_a_peer_takes_little_memory_and_few_descriptors() -> None:
    """All links lead to one prefill rank, as if other servers named it, too. Each takes a socket
    and an eventfd for its messages on decode, and a socket on prefill."""
    with Channel(PATIENT) as channel:

        def serve(servers: range) -> None:
            for number in servers:
                peer = channel.decode.reach(channel.prefill.row, str(number))
                sent = channel.prefill.send(number, SEGMENT)
                handle = channel.decode.open(number, SEGMENT, peer)
                assert channel.state(handle) == ("warm", "")
                channel.end(sent, handle)

        serve(range(1))
        before = resources()
        serve(range(1, 1 + MANY))
        after = resources()
        assert (after["fds"] - before["fds"]) / MANY == 2 + 1
        assert (after["rss_mib"] - before["rss_mib"]) * 1024 / MANY < 128


def test_idle_peers_are_not_asked_for_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    getsockopt = zmq.Socket.getsockopt

    def counted(socket: Any, option: int) -> Any:
        if option == zmq.EVENTS:
            asked.append(socket)
        return getsockopt(socket, option)

    monkeypatch.setattr(zmq.Socket, "getsockopt", counted)
    ranks, messages = Ranks(MANY), 20
    assert len(set(asked)) == MANY  # each once, when it is new
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


# ---------------------------------------------------------------- what is held of a peer


class Plane:
    """A data plane, as far as its peers go. `at`: before and after each of its calls, counted from
    one, `then` is done once. `held`: peers that nobody has forgotten. `fails`: connecting does."""

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
    """Links over such a plane, how to dial one, and the sockets that were made."""
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
def test_a_link_that_is_hung_up_while_it_reconnects(dialed: Dialed, fails: bool, at: int) -> None:
    """Hanging up at any step of the reconnection leaves its peers with nobody."""
    these, plane, dial, made = dialed
    link = dial()
    link.reconnecting, plane.fails = True, fails
    plane.at, plane.then, plane._steps = at, lambda: these.hang_up(link), 0
    these._connect_again(link)
    if not link.closed:
        these.hang_up(link)
    assert (plane.held, link.reconnecting, made[0].closed) == (set(), False, True)


@pytest.mark.parametrize("at", STEPS)
def test_a_link_that_reconnects_while_it_is_hung_up(dialed: Dialed, at: int) -> None:
    """A whole reconnection happens at each step of hanging up."""
    these, plane, dial, _ = dialed
    link = dial()
    plane.at, plane.then, plane._steps = at, lambda: these._connect_again(link), 0
    these.hang_up(link)
    assert plane.held == set()


def test_repairs_leave_nothing_behind(dialed: Dialed) -> None:
    these, plane, dial, made = dialed
    these.add(link := dial())
    for number in range(20):
        plane.fails = number % 3 == 1  # it stays broken until the next try
        these._connect_again(link)
        assert len(plane.held) == (not plane.fails)
    assert (len(made), made[0].closed) == (1, False)
    these.drop(PEER)
    these.drop(PEER)
    assert (plane.held, made[0].closed, these._links, these._of_dealer) == (set(), True, {}, {})
    assert not these._poller._sockets


def test_a_link_takes_the_place_of_an_earlier_one(dialed: Dialed) -> None:
    these, plane, dial, made = dialed
    for _ in range(5):
        these.add(dial())
    assert [one.closed for one in made] == [True] * 4 + [False]
    assert (plane.held, len(these._poller._sockets), len(these._of_dealer)) == ({5}, 1, 1)


@pytest.mark.parametrize("fails", ["memory", "port"])
def test_a_rank_that_cannot_be_reached_leaves_no_socket(
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
    """Fail a read of the link."""
    plane.ended = lambda: [((1, link, link.memory), "broken")]  # type: ignore[attr-defined]
    return list(these.ended())


def test_one_thread_mends_a_link_and_none_one_that_is_hung_up(dialed: Dialed) -> None:
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
    list(these.ended())  # of the connection before: it says nothing of this one
    assert (link.reconnecting, plane.made) == (False, 2)
    these.hang_up(link)
    broken_once(these, plane, link)
    assert (link.reconnecting, plane.held, plane.made) == (False, set(), 2)


def test_where_no_thread_can_be_started_the_next_failure_mends(
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


def test_a_read_is_one_of_the_memory_that_its_end_names(dialed: Dialed) -> None:
    """This holds even if a reconnection replaces the memory meanwhile, whose later failure is
    mended."""
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


def test_without_a_drafter_or_a_staging_buffer_nothing_is_read(
    ranks: Ranks, dialed: Dialed
) -> None:
    """Either this rank or its peer may lack them; nothing is read from a peer that is gone,
    either."""
    without, (these, _, dial, _) = ranks.links, dialed
    these.add(link := dial())
    for one, peer, staging in (
        (without, PEER, None), (without, PEER, SimpleNamespace(base=0, slot_bytes=64)),
        (these, PEER, None), (these, b"gone", None),
    ):  # fmt: skip
        (link if one is these else one._links[PEER]).row.staging = staging  # type: ignore[misc]
        assert not one.read(act.StartRead(1, peer, (), 4))
    assert not list(without.ended())
