"""The doctor's read: its protocol and its verdict, and real reads between two child processes."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from sglang_mixkv.channel.data_plane import Extent
from sglang_mixkv.config import Config
from sglang_mixkv.tools import doctor_read
from sglang_mixkv.tools.doctor_read import READ, Ask, Children, Offer, ReadFailed, Result, Wire

SMALL = Wire(config=Config(staging_mb=8))
SIZE = 4096
ASK = Ask("mooncake", "127.0.0.1")


# ---------------------------------------------------------------- bytes


def test_every_piece_of_a_pattern_occurs_once() -> None:
    words = [doctor_read.pattern(n, 1 << 16).view(np.uint64) for n in range(READ)]
    assert len(np.unique(np.concatenate(words))) == READ << 13


class Copies:
    """A plane that copies patterns at once, and a side whose memory is a dictionary. `error`: how
    its reads end, None if they do not."""

    def __init__(self, error: str | None = "", bad: int = -1) -> None:
        self.plane, self.slot_bytes, self.memory = self, SIZE, "host"
        self._error, self._bad, self._memory = error, bad, dict[int, Any]()

    def address(self, number: int) -> int:
        return number

    def start(self, tag: Any, _peer: Any, extents: list[Extent]) -> None:
        for local, remote, size in extents:
            data = doctor_read.pattern(remote // SIZE, size)
            data[17] ^= local == self._bad
            self._memory[local] = data

    def ended(self) -> list[tuple[Any, str]]:
        return [] if self._error is None else [(0, self._error)]

    def get(self, number: int, size: int) -> Any:
        return self._memory[number][:size]


def read_slots(side: Copies) -> Result:
    return doctor_read._read_slots(side, None, Offer(slot_bytes=SIZE))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [3, READ + 3])  # in the first read, or the second
def test_a_wrong_byte_is_found(bad: int) -> None:
    assert read_slots(Copies(bad=bad)).wrong == {3: 17}
    assert read_slots(Copies()).wrong == {}


@pytest.mark.parametrize(
    ("error", "limit", "words"),
    [("the link went down", 1000, "failed: the link"), (None, 0, "did not end within 0 s")],
)
def test_a_read_that_fails_or_hangs(
    error: str | None, limit: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_read, "READ_S", limit)
    with pytest.raises(ReadFailed, match=words):
        read_slots(Copies(error))


# ---------------------------------------------------------------- the listener


def ask(port: int, message: Any, answered: bool = True) -> Offer | None:
    with zmq.Context() as context, context.socket(zmq.REQ) as asking:
        asking.connect(f"tcp://127.0.0.1:{port}")
        asking.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))
        if not answered:
            return None
        assert asking.poll(20_000)
        return msgspec.msgpack.decode(asking.recv(), type=Offer)


def test_strangers_do_not_end_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each doctor is told why it gets nothing; then comes the peer."""

    def side(_wire: Wire, host: str) -> Any:
        """One with slots that need no transport."""
        if host != ASK.host:
            raise OSError(f"no address {host} here")
        plane = SimpleNamespace(endpoint=b"endpoint")
        return SimpleNamespace(
            plane=plane, address=lambda _: 64, slot_bytes=SIZE, memory="host", put=print
        )

    monkeypatch.delenv("SGLANG_MIXKV_DATA_PLANE", raising=False)
    monkeypatch.setattr(doctor_read, "Side", side)
    reports: queue.Queue[Any] = queue.Queue()
    threading.Thread(
        target=lambda: reports.put(doctor_read.serve("*", 0, SMALL, reports.put)), daemon=True
    ).start()
    port = reports.get(timeout=20)
    for hello in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b""):
        with socket.create_connection(("127.0.0.1", port), 10) as stranger:
            stranger.sendall(hello)
    for message, words in (
        (b'{"hello": "another doctor"}', "expected the same release"),
        (Ask("nixl", "127.0.0.1"), "expected reads over mooncake"),
        (Ask("mooncake", "10.9.9.9"), "no address 10.9.9.9 here"),
    ):
        offer = ask(port, message)
        assert offer is not None
        assert words in offer.failed
    for _ in range(2):  # the second may come after a peer that died
        assert ask(port, ASK) == Offer(b"endpoint", 64, SIZE)
    ask(port, Ask("mooncake", "127.0.0.1", {3: 17}), answered=False)
    assert reports.get(timeout=20).wrong == {3: 17}


def test_a_port_that_is_taken_and_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ReadFailed, match=r"cannot listen on port \d+: Address already in use"):
            doctor_read.serve("127.0.0.1", port, SMALL, print)
    with pytest.raises(ReadFailed, match="no connection"):
        doctor_read.read("127.0.0.1", port, SMALL)


# ---------------------------------------------------------------- processes


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_process_that_does_not_end_is_ended() -> None:
    with Children() as children:
        children.start("serve", "127.0.0.1", 0, SMALL)
        port = children.wait("serve")
        with pytest.raises(ReadFailed, match="no end after 0 s"):
            children.wait("serve", 0.1)
    assert not listens(port)


def test_a_process_that_dies_is_a_failure_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a transport ends it."""
    monkeypatch.setenv("SGLANG_MIXKV_DATA_PLANE", "mooncake")
    with Children() as children:
        children.start("serve", "127.0.0.1", 0, SMALL)
        children.wait("serve")
        ((_, process, log),) = children._running.values()
        with open(log.name, "a") as file:
            file.write("terminate called\n")
        process.terminate()
        with pytest.raises(ReadFailed, match=r"ended with status -15: terminate called"):
            children.wait("serve")


def test_a_listener_ends_with_the_doctor_that_started_it() -> None:
    """Also where that is killed: the port is free for the next one."""
    program = (
        "import os\nfrom sglang_mixkv.tools.doctor_read import Children, Wire\n"
        "children = Children()\nchildren.start('serve', '127.0.0.1', 0, Wire())\n"
        "print(children.wait('serve'), flush=True)\nos._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    deadline = time.monotonic() + 20
    while listens(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


# ---------------------------------------------------------------- real reads


@pytest.mark.parametrize("plane", ["mooncake", "nixl"])
def test_a_real_read_between_two_processes(plane: str) -> None:
    pytest.importorskip(plane)
    found = doctor_read.result(Wire(config=Config(staging_mb=8, data_plane=plane)))
    assert (found.bytes, found.wrong) == (READ * ((128 << 10) + 4096), {})
    assert 0 < found.seconds < 30
    assert found.memory.endswith("64 slots of 132 KiB")


@pytest.mark.parametrize("uses", [False, True])
def test_over_ipv6_mooncakes_variable_is_named(uses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mooncake")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 address here")
    monkeypatch.delenv("MC_USE_IPV6", raising=False)
    if uses:
        monkeypatch.setenv("MC_USE_IPV6", "1")
    with Children() as children:
        children.start("serve", "*", 0, SMALL)
        children.start("read", "::1", children.wait("serve"), SMALL)
        with nullcontext() if uses else pytest.raises(ReadFailed, match="it needs MC_USE_IPV6=1"):
            assert children.wait("read").wrong == {}
