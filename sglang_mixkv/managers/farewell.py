"""Tell a prefill server that a refused request will not be fetched.

Stock learns of a room's end by the room's own messages; a decode rank that refuses a server
before it has registered would leave the prefill's half waiting for its bootstrap timeout.
Best effort, in the background: the prefill may not have opened the room yet, so it is told several
times.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from dataclasses import dataclass
from typing import Any

import requests
import zmq
from sglang.srt.disaggregation.common.conn import AbortNotification
from sglang.srt.utils.network import NetworkAddress

from sglang_mixkv.managers.background import Background

logger = logging.getLogger(__name__)

DELAYS_S = (0.0, 0.5, 2.0, 5.0, 10.0)  # of each time after the one before
TIMEOUT_S = 2
RETRY_S = 1.0  # a server whose ranks could not be had is asked again
MAX_RANKS = 4096  # more than a server can have
KEPT_S = 10.0  # ranks are looked up again: the server may have restarted


@dataclass
class Directory:
    """A prefill server's ranks, by DP rank. `by_room`: it places a room by the room's number."""

    asked: float
    ranks: dict[int, list[NetworkAddress]]
    by_room: bool = False

    def of_room(self, room: int, dp_rank: int) -> list[NetworkAddress]:
        """The ranks that can have this room. `dp_rank` is what the request names, or 0: SGLang
        cannot know it of a server that is refused."""
        dp_ranks = {dp_rank, room % len(self.ranks)} if self.by_room else self.ranks.keys()
        return [rank for dp in dp_ranks for rank in self.ranks.get(dp, ())]


class Farewells:
    """Sends ABORT for rooms of refused requests; all but `tell` runs in the background."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._directories: dict[str, Directory] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._session: requests.Session | None = None

    def tell(self, bootstrap_addr: str, room: int, dp_rank: int) -> None:
        """Let that server's half of the room's request end now rather than by timeout."""
        self._background.submit(self._tell, bootstrap_addr, room, dp_rank, DELAYS_S[1:])

    def _tell(self, addr: str, room: int, dp_rank: int, delays: tuple[float, ...]) -> None:
        if delays:
            self._background.submit(self._tell, addr, room, dp_rank, delays[1:], delay=delays[0])
        directory = self._directory(addr)
        if directory.ranks:
            message = AbortNotification(room=room).to_zmq()
            for rank in directory.of_room(room, dp_rank):
                self._send(rank, message)

    def _send(self, rank: NetworkAddress, message: list[bytes]) -> None:
        endpoint = rank.to_tcp()
        try:
            if endpoint not in self._sockets:
                self._sockets[endpoint] = self._connect(rank, endpoint)
            self._sockets[endpoint].send_multipart(message, zmq.NOBLOCK)
        except zmq.ZMQError as error:  # nobody takes it: its queue is full
            logger.debug("could not tell %s: %s", endpoint, error)

    def _connect(self, rank: NetworkAddress, endpoint: str) -> zmq.Socket[bytes]:
        self._context = self._context or zmq.Context()
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.IPV6, int(rank.is_ipv6))
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        return socket

    def _directory(self, addr: str) -> Directory:
        """That server's ranks as they were looked up last, none where they could not be had."""
        known, now = self._directories.get(addr), time.monotonic()
        if known is None or now - known.asked > (KEPT_S if known.ranks else RETRY_S):
            known = self._directories[addr] = self._look_up(addr)
            self._close_unused()
        return known

    def _close_unused(self) -> None:
        """Close the sockets of ranks that are no more, and forget servers long unasked."""
        oldest = time.monotonic() - sum(DELAYS_S) - KEPT_S
        for addr in [a for a, d in self._directories.items() if d.asked < oldest]:
            del self._directories[addr]
        lists = [ranks for d in self._directories.values() for ranks in d.ranks.values()]
        used = {rank.to_tcp() for ranks in lists for rank in ranks}
        for endpoint in self._sockets.keys() - used:
            self._sockets.pop(endpoint).close()

    def _look_up(self, addr: str) -> Directory:
        try:
            info = self._get(addr, -1, -1, -1, -1)
            names = ("dp_size", "attn_cp_size", "attn_tp_size", "pp_size")
            sizes = [int(info[name]) for name in names]
            if math.prod(sizes) > MAX_RANKS:
                raise ValueError(f"{sizes} ranks")
            ranks: dict[int, list[NetworkAddress]] = {dp: [] for dp in range(sizes[0])}
            for dp, *rank in itertools.product(*map(range, sizes)):
                found = self._get(addr, dp, *rank)
                ranks[dp].append(NetworkAddress(found["rank_ip"], int(found["rank_port"])))
            return Directory(time.monotonic(), ranks, bool(info["follow_bootstrap_room"]))
        except Exception as error:  # its ranks may not all have registered yet
            logger.debug("could not look the ranks of %s up: %r", addr, error)
            return Directory(time.monotonic(), {})

    def _get(self, addr: str, dp: int, cp: int, tp: int, pp: int) -> dict[str, Any]:
        """One answer of the bootstrap server (common/conn.py _handle_route_get)."""
        self._session = self._session or requests.Session()
        answer = self._session.get(
            f"http://{addr}/route",
            params={
                "prefill_dp_rank": dp,
                "prefill_cp_rank": cp,
                "target_tp_rank": tp,
                "target_pp_rank": pp,
            },
            timeout=TIMEOUT_S,
        )
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found
