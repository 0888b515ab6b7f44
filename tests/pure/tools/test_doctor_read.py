"""The read that doctor makes: its protocol, its verdict, and a real read between two processes."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import zmq
from rig.channel.threads import Reads, wait_for

from sglang_mixkv.channel.data_plane import Read
from sglang_mixkv.channel.handshake import StagingFacts
from sglang_mixkv.config import Config
from sglang_mixkv.tools import doctor_read
from sglang_mixkv.tools.doctor_read import READ, Ask, Offer, ReadFailed, Result, Wire

SMALL = Wire(config=Config(staging_mb=8))
SIZE, HOST = (128 << 10) + 4096, "127.0.0.1"


@pytest.fixture
def port() -> int:
    """Return a free port."""
    with socket.create_server((HOST, 0)) as free:
        return int(free.getsockname()[1])


class Copies(Reads):
    """A data plane that accepts only this host's address.

    `state`: attributes that make it fail, as in Reads. `bad`: the read in which byte 17 of each
    slot is wrong.
    """

    state: ClassVar[dict[str, Any]] = {}
    bad: int | None = None

    def __init__(self, _name: str, host: str, *_: Any) -> None:
        super().__init__()
        vars(self).update(self.state)
        if host != HOST:
            raise OSError(f"no address {host} here")

    def _check(self, read: Read) -> str | None:
        self.damage = [17] * (read.tag == self.bad)
        return super()._check(read)


def ask(port: int, message: Any) -> Offer:
    with zmq.Context() as context, context.socket(zmq.REQ) as asking:
        asking.connect(f"tcp://{HOST}:{port}")
        asking.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))
        assert asking.poll(20_000)
        return msgspec.msgpack.decode(asking.recv(), type=Offer)


@pytest.fixture
def reports(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[queue.Queue[Result]]:
    """Start a doctor that listens in this process, and yield a queue of its results. It ends after
    the test: a thread that receives from ZeroMQ while the process exits may abort it."""
    monkeypatch.delenv("SGLANG_MIXKV_DATA_PLANE", raising=False)
    monkeypatch.setattr(doctor_read.planes, "make", Copies)
    found: queue.Queue[Result] = queue.Queue()
    serve = partial(doctor_read.serve, "*", port, SMALL)
    doctor = threading.Thread(target=lambda: found.put(serve()), daemon=True)
    doctor.start()
    assert wait_for(lambda: listens(port))
    yield found
    if doctor.is_alive():
        with zmq.Context() as context, context.socket(zmq.REQ) as asking:
            asking.connect(f"tcp://{HOST}:{port}")
            asking.send(msgspec.msgpack.encode(Ask("mooncake", HOST, [])))
    doctor.join(20)
    assert not doctor.is_alive()


def test_a_listener_survives_invalid_messages_and_reads(
    port: int, reports: queue.Queue[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener survives invalid messages and failed reads, and ends after a successful read.

    Each doctor whose read is refused gets the reason.
    """
    for hello in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b""):
        with socket.create_connection((HOST, port), 10) as stranger:
            stranger.sendall(hello)
    for message, words in (
        (b'{"hello": "another doctor"}', "expected the same release"),
        (Ask("nixl", HOST), "expected reads over mooncake"),
        (Ask("mooncake", "10.9.9.9"), "no address 10.9.9.9 here"),
    ):
        assert words in ask(port, message)
    for state, why in (({"broken": 1}, "failed: broken"), ({"held": True}, "not end within 0 s")):
        with monkeypatch.context() as failing:
            failing.setattr(Copies, "state", state)
            failing.setattr(doctor_read, "READ_S", 0)
            with pytest.raises(ReadFailed, match=why):
                doctor_read.read(HOST, port, SMALL)
    other = Wire(config=Config(staging_mb=8, data_plane="nixl"))
    with pytest.raises(ReadFailed, match="on the other side: expected reads over mooncake"):
        doctor_read.read(HOST, port, other)
    assert reports.empty()
    found = doctor_read.read(HOST, port, SMALL)
    assert (found.bytes, found.wrong, reports.get(timeout=20).wrong) == (READ * SIZE, [], [])


@pytest.mark.parametrize("staging_mb", [4, 16])
def test_buffers_of_two_sizes_are_read_up_to_the_smaller_slot(
    port: int, reports: queue.Queue[Result], staging_mb: int
) -> None:
    """The sides' buffers may differ, as those of two servers. The listener's has 8 MiB."""
    found = doctor_read.read(HOST, port, Wire(config=Config(staging_mb=staging_mb)))
    smaller = (min(staging_mb, 8) << 20) // 64 + 4096
    assert (found.bytes, found.wrong, reports.get(timeout=20).wrong) == (READ * smaller, [], [])


def test_each_side_uses_its_own_address_of_the_route(
    port: int, reports: queue.Queue[Result]
) -> None:
    """The listener's address is the one that the reader was given. `Copies` accepts only HOST."""
    with pytest.raises(ReadFailed, match=r"on the other side: no address 127\.0\.0\.2 here"):
        doctor_read.read("127.0.0.2", port, SMALL)
    assert reports.empty()


def test_the_faster_of_two_reads_counts(
    port: int, reports: queue.Queue[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first read also connects, but another program may disturb the second."""
    for first, second in ((5.0, 2.0), (2.0, 5.0)):
        times = iter((0.0, first, 100.0, 100.0 + second))
        clock = SimpleNamespace(monotonic=times.__next__, sleep=time.sleep)
        monkeypatch.setattr(doctor_read, "time", clock)
        side = doctor_read.LocalEnd(SMALL, HOST)
        offer = ask(port, Ask("mooncake", HOST))
        assert isinstance(offer, StagingFacts)
        found = doctor_read._read_slots(side, side.plane.connect(offer.endpoint), offer)
        assert (found.seconds, found.wrong) == (2.0, [])
    assert reports.empty()


@pytest.mark.parametrize("bad", [0, READ])
def test_a_wrong_byte_is_reported_in_either_read(
    port: int, reports: queue.Queue[Result], bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [doctor_read.pattern(n, 1 << 16).view(np.uint64) for n in range(READ)]
    assert len(np.unique(np.concatenate(words))) == READ << 13  # so any misplaced word is noticed
    monkeypatch.setattr(Copies, "bad", bad)
    wrong = [f"byte 17 of slot {number}" for number in range(READ)]
    found = doctor_read.read(HOST, port, SMALL)
    assert (found.wrong, reports.get(timeout=20).wrong) == (wrong, wrong)


def test_a_used_port_and_a_missing_listener_are_errors(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = pytest.raises(ReadFailed, match=r"cannot listen on port \d+: Address already in use")
    with socket.create_server((HOST, port)), taken:
        doctor_read.serve(HOST, port, SMALL)
    monkeypatch.setattr(doctor_read, "LocalEnd", lambda *_: None)
    monkeypatch.setattr(doctor_read, "ANSWER_S", 0)
    monkeypatch.setattr(doctor_read, "LINGER_MS", 0)
    with pytest.raises(ReadFailed, match="start it, and open its port"):
        doctor_read.read(HOST, port, SMALL)


def test_the_rdma_devices_that_a_process_has_open(
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
    """A process that dies or hangs is reported as a failure, with its last output."""
    for role, seconds, words in (
        (abort, 600, "died.*terminate called"), (hang, 3, "took 3 s")
    ):  # fmt: skip
        monkeypatch.setattr(doctor_read, "serve", role)
        monkeypatch.setattr(doctor_read, "LISTEN_S", seconds)
        with pytest.raises(ReadFailed, match=words):
            doctor_read.result(SMALL, listen=1)


def test_a_reader_that_fails_ends_its_listener_too() -> None:
    """A reader that fails ends its listener at once, not after the listener's time limit."""
    began = time.monotonic()
    with pytest.raises(ReadFailed, match="invalid literal"):
        doctor_read.apart(100, [time.sleep, 100], [int, "none"])
    assert time.monotonic() - began < 50


def test_a_listener_ends_with_its_doctor(port: int) -> None:
    """A listening process ends with its doctor, even if doctor is killed, and frees the port."""
    command = [sys.executable, "-m", "sglang_mixkv", "doctor", "--no-seams", "--listen", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as doctor:
        assert doctor.stderr is not None
        assert b"listening" in doctor.stderr.readline()
        doctor.kill()
    assert wait_for(lambda: not listens(port))


# ---------------------------------------------------------------- real reads


def test_a_real_read_between_two_processes() -> None:
    """A read over NIXL succeeds. tests/docs/test_commands.py has a read over Mooncake."""
    pytest.importorskip("nixl")
    found = doctor_read.result(Wire(config=Config(staging_mb=8, data_plane="nixl")))
    assert (found.bytes, found.wrong) == (READ * SIZE, [])
    assert 0 < found.seconds < 30
    assert found.memory.endswith("64 slots of 132 KiB")
