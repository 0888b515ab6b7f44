"""The prefill side of part_transfer, in a process of its own: it packs what it is asked for.

    [backend, dtype, tokens, seed]   ->  its row, once its slots are registered
    a room's number                  ->  seconds of all packing up to now, once the request is over

One JSON value a line, each way, over a socket: a pair's, or a connection to `listen`, which starts
a process for each. Who reaches its port can start one: listen between two hosts of your own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PLACES = [str(Path(__file__).resolve().parents[n]) for n in (0, 2)]
sys.path[:0] = [place for place in PLACES if place not in sys.path]

DRAFTER = 1  # of scene.DRAFTERS: DFLASH, 6 layers of 8 heads
LAYOUT = "pages of 64"


class Lines:
    """JSON both ways. `host`: this side's address."""

    def __init__(self, connection: socket.socket) -> None:
        is_pair = connection.family == socket.AF_UNIX
        self.host = "127.0.0.1" if is_pair else str(connection.getsockname()[0])
        self._file = connection.makefile("rw")

    def put(self, value: Any) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()

    def get(self) -> Any:
        """None where the other side has ended."""
        line = self._file.readline()
        return json.loads(line) if line else None


def plane_of(backend: str, host: str) -> Any:
    """As on a server; over TCP where there is no RDMA device."""
    import needs

    if not needs.rdma():
        os.environ.setdefault("MC_FORCE_TCP", "1")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    if backend == "mooncake":
        from sglang_mixkv.channel.mooncake import Mooncake

        return Mooncake(host)
    from sglang_mixkv.channel.nixl import Nixl

    return Nixl()


def pool(dtype: str, rows: int, device: Any, seed: int) -> Any:
    """Drawn on the host, so that both sides have the same whatever their GPUs."""
    import scene

    drafter = scene.DRAFTERS[DRAFTER]
    drawn = scene.pool(drafter.layers, drafter.heads, rows, dtype, "cpu", seed)
    return [entry.to(device) for entry in drawn]


class Packer:
    def __init__(self, options: argparse.Namespace, host: str, asked: list[Any]) -> None:
        import channel
        import scene
        from sglang_mixkv.prefill.outbox import Pages

        from sglang_mixkv.draft.rows import DraftRows

        backend, dtype, self._tokens, seed = asked
        page = scene.LAYOUTS[LAYOUT]
        pages = scene.pages_of(self._tokens, page, seed)
        entries = pool(dtype, len(pages) * page, scene.device_of(options), seed)
        rows = DraftRows(entries, range(scene.DRAFTERS[DRAFTER].heads))
        staging, plane = channel.staged(rows, plane_of(backend, host))
        self._prefill = channel.Prefill(rows, staging, plane, host)
        self._pages = Pages(pages, page)
        self.row = self._prefill.row

    def pack(self, room: int) -> float:
        self._prefill.end(self._prefill.send(room, self._tokens, self._pages))
        return self._prefill.notes.seconds


def serve(options: argparse.Namespace) -> None:
    """Until the other side ends."""
    import msgspec

    lines = Lines(socket.socket(fileno=options.fd))
    packer = Packer(options, lines.host, lines.get())
    lines.put(msgspec.to_builtins(packer.row))
    while (room := lines.get()) is not None:
        lines.put(packer.pack(room))
    os._exit(0)  # whatever an engine's threads do


def child(options: argparse.Namespace, gpu: int, connection: socket.socket) -> Any:
    """A process for this connection, which is the caller's no more."""
    with connection:
        command = [sys.executable, __file__, "--device", options.device, "--gpu", str(gpu)]
        command += ["--fd", str(connection.fileno())]
        return subprocess.Popen(command, pass_fds=[connection.fileno()])


def listen(options: argparse.Namespace) -> None:
    """Until it is interrupted."""
    host, _, port = options.listen.rpartition(":")
    with socket.create_server((host, int(port))) as server:
        print(f"listening on {host}:{port}", flush=True)
        while True:
            connection, peer = server.accept()
            print(f"{peer[0]} is served", flush=True)
            child(options, options.gpu, connection)


if __name__ == "__main__":
    given = argparse.ArgumentParser()
    given.add_argument("--device")
    given.add_argument("--gpu", type=int)
    given.add_argument("--fd", type=int)
    serve(given.parse_args())
