"""Tell a prefill server that a refused request will not be fetched.

Stock learns of a room's end by the room's own messages; a decode rank that refuses a server
before it has registered would leave the prefill's half waiting for its bootstrap timeout.
Best effort, in the background: the prefill may not have opened the room yet.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import requests
from sglang.srt.disaggregation.common.conn import AbortNotification

logger = logging.getLogger(__name__)

DELAYS_S = (0.0, 0.5, 2.0, 5.0, 10.0)
TIMEOUT_S = 5


def tell(receiver: Any, bootstrap_addr: str, room: int, dp_rank: int) -> None:
    """Send ABORT for `room` to every rank of that prefill server's DP rank, several times."""
    ranks: list[dict[str, Any]] = []
    for delay in DELAYS_S:
        time.sleep(delay)
        try:
            ranks = ranks or _ranks(bootstrap_addr, dp_rank)
            for rank in ranks:
                socket, lock = receiver._connect_to_bootstrap_server(rank)
                with lock:
                    socket.send_multipart(AbortNotification(room=room).to_zmq())
        except Exception as error:  # its ranks may not all have registered yet
            logger.debug("room %s: could not tell %s: %r", room, bootstrap_addr, error)


def _ranks(bootstrap_addr: str, dp_rank: int) -> list[dict[str, Any]]:
    sizes = _get(bootstrap_addr, -1, -1, -1, -1)
    return [
        _get(bootstrap_addr, dp_rank, 0, tp_rank, stage)
        for tp_rank in range(int(sizes["attn_tp_size"]))
        for stage in range(int(sizes["pp_size"]))
    ]


def _get(addr: str, dp: int, cp: int, tp: int, pp: int) -> dict[str, Any]:
    """One answer of the bootstrap server (common/conn.py _handle_route_get)."""
    answer = requests.get(
        f"http://{addr}/route",
        {
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
