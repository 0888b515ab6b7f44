"""The doctor's read: its protocol and its verdict, and real reads between two processes."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from rig.threads import wait_for

from sglang_mixkv.channel.data_plane import Extent
from sglang_mixkv.config import Config
from sglang_mixkv.tools import doctor_read
from sglang_mixkv.tools.doctor_read import READ, Ask, Offer, ReadFailed, Result, Wire

SMALL = Wire(config=Config(staging_mb=8))
SIZE, HOST = 4096, "127.0.0.1"
ASK = Ask("mooncake", HOST)


@pytest.fixture
def port() -> int:
    """A free one."""
    with socket.create_server((HOST, 0)) as free:
        return int(free.getsockname()[1])


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


def test_a_wrong_byte_is_found_and_a_read_that_fails_or_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [doctor_read.pattern(n, 1 << 16).view(np.uint64) for n in range(READ)]
    assert len(np.unique(np.concatenate(words))) == READ << 13  # a foreign piece is a wrong byte
    assert read_slots(Copies()).wrong == []
    for bad in (3, READ + 3):  # in the first read, or the second
        assert read_slots(Copies(bad=bad)).wrong == ["byte 17 of slot 3"]
    with pytest.raises(ReadFailed, match="failed: the link"):
        read_slots(Copies("the link went down"))
    monkeypatch.setattr(doctor_read, "READ_S", 0)
    with pytest.raises(ReadFailed, match="did not end within 0 s"):
        read_slots(Copies(None))


def ask(port: int, message: Any, answered: bool = True) -> Offer | None:
    with zmq.Context() as context, context.socket(zmq.REQ) as asking:
        asking.connect(f"tcp://{HOST}:{port}")
        asking.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))
        if not answered:
            return None
        assert asking.poll(20_000)
        return msgspec.msgpack.decode(asking.recv(), type=Offer)


def test_strangers_do_not_end_the_listener(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each doctor is told why it gets nothing; then comes the peer."""

    def side(_wire: Wire, host: str) -> Any:
        """One with slots that need no transport."""
        if host != ASK.host:
            raise OSError(f"no address {host} here")
        plane = SimpleNamespace(endpoint=b"endpoint")
        return SimpleNamespace(
            plane=plane, address=lambda _: 64, slot_bytes=SIZE, memory="host", fill=print
        )

    monkeypatch.delenv("SGLANG_MIXKV_DATA_PLANE", raising=False)
    monkeypatch.setattr(doctor_read, "Side", side)
    reports: queue.Queue[Any] = queue.Queue()
    threading.Thread(
        target=lambda: reports.put(doctor_read.serve("*", port, SMALL)), daemon=True
    ).start()
    assert wait_for(lambda: listens(port))
    for hello in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b""):
        with socket.create_connection((HOST, port), 10) as stranger:
            stranger.sendall(hello)
    for message, words in (
        (b'{"hello": "another doctor"}', "expected the same release"),
        (Ask("nixl", HOST), "expected reads over mooncake"),
        (Ask("mooncake", "10.9.9.9"), "no address 10.9.9.9 here"),
    ):
        offer = ask(port, message)
        assert offer is not None
        assert words in offer.failed
    for _ in range(2):  # the second may come after a peer that died
        assert ask(port, ASK) == Offer(b"endpoint", 64, SIZE)
    ask(port, Ask("mooncake", HOST, ["byte 17 of slot 3"]), answered=False)
    assert reports.get(timeout=20).wrong == ["byte 17 of slot 3"]


def test_a_port_that_is_taken_and_nobody_there(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = pytest.raises(ReadFailed, match=r"cannot listen on port \d+: Address already in use")
    with socket.create_server((HOST, port)), taken:
        doctor_read.serve(HOST, port, SMALL)
    monkeypatch.setattr(doctor_read, "Side", lambda *_: None)
    monkeypatch.setattr(doctor_read, "ANSWER_S", 0)
    monkeypatch.setattr(doctor_read, "LINGER_MS", 0)
    with pytest.raises(ReadFailed, match="start it, and open its port"):
        doctor_read.read(HOST, port, SMALL)


def test_the_devices_that_a_process_has_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, verbs = tmp_path / "fd", tmp_path / "verbs" / "uverbs1"
    for folder in (files, verbs):
        folder.mkdir(parents=True)
    (verbs / "ibdev").write_text("mlx5_1\n")
    monkeypatch.setattr(doctor_read, "FILES", files)
    monkeypatch.setattr(doctor_read, "VERBS", verbs.parent)
    (files / "1").symlink_to("/dev/infiniband/rdma_cm")
    assert doctor_read.devices_in_use() == []
    (files / "7").symlink_to("/dev/infiniband/uverbs1")
    assert doctor_read.devices_in_use() == ["mlx5_1"]


# ---------------------------------------------------------------- processes


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def abort(*_: Any) -> Result:
    os.write(1, b"terminate called\n")
    os.abort()


def hang(*_: Any) -> Result:
    time.sleep(100)
    raise AssertionError


def test_a_process_that_dies_or_hangs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a transport ends it, whose last words are told."""
    for role, seconds, words in (
        (abort, 600, "died.*terminate called"), (hang, 3, "took 3 s")
    ):  # fmt: skip
        monkeypatch.setattr(doctor_read, "serve", role)
        monkeypatch.setattr(doctor_read, "LISTEN_S", seconds)
        with pytest.raises(ReadFailed, match=words):
            doctor_read.result(SMALL, listen=1)


def test_a_listener_ends_with_the_doctor_that_started_it(port: int) -> None:
    """Also where that is killed: the port is free for the next one."""
    command = [sys.executable, "-m", "sglang_mixkv", "doctor", "--no-seams", "--listen", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as doctor:
        assert doctor.stderr is not None
        assert b"listening" in doctor.stderr.readline()
        doctor.kill()
    assert wait_for(lambda: not listens(port))


# ---------------------------------------------------------------- real reads


def test_a_real_read_between_two_processes() -> None:
    """Over NIXL; over Mooncake two doctors read in tests/docs/test_commands.py."""
    pytest.importorskip("nixl")
    found = doctor_read.result(Wire(config=Config(staging_mb=8, data_plane="nixl")))
    assert (found.bytes, found.wrong) == (READ * ((128 << 10) + 4096), [])
    assert 0 < found.seconds < 30
    assert found.memory.endswith("64 slots of 132 KiB")
