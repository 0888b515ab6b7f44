"""What strangers send to both sides of the channel, over real sockets, while it serves others."""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median
from types import SimpleNamespace

from rig import stranger
from rig.resources import leaks, resources
from rig.threads import Channel, wait_for

from sglang_mixkv.channel.messages import draw_instance
from sglang_mixkv.channel.times import Times
from sglang_mixkv.prefill.waiting import MAX_ALL

SECONDS, REQUESTS = 5, 200
PATIENCE = 30  # a busy machine of two cores, and all threads of both sides share the GIL
SLACK = {"rss_mib": 256}  # MAX_ALL rooms that wait, and as many that have ended, take half of it


def test_strangers_cost_nobody_a_request() -> None:
    """Rooms without end, foreign ACKs, slots and tokens that do not exist, READYs of rooms that are
    none, as fast as they can be sent."""
    with Channel(Times(PATIENCE)) as channel:
        assert channel.request(1) == ("warm", "")
        outbox, inbox = channel.prefill.outbox, channel.decode.inbox
        command = [
            sys.executable, stranger.__file__, outbox.address, channel.prefill.instance.hex(),
            str(SECONDS),
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            row = SimpleNamespace(
                instance=draw_instance(), address=process.stdout.readline().strip(),
                staging=channel.prefill.row.staging,
            )  # fmt: skip
            inbox.connect(row)
            assert wait_for(lambda: inbox.knows(row.instance))
            warm = resources()
            cheated = channel.decode.open(2, 20, row.instance)
            seconds, most = list[float](), 0
            while process.poll() is None or len(seconds) < REQUESTS:
                began = time.monotonic()
                assert channel.request(3 + len(seconds), arrived=True) == ("warm", "")
                seconds.append(time.monotonic() - began)
                most = max(most, outbox.left().get("waiting", 0))
            sent = process.stdout.read().split()
        assert channel.state(cheated) == ("cold", "protocol")
        inbox.close(cheated)
        print(
            f"{' + '.join(sent)} messages beside {len(seconds)} requests, the typical one of "
            f"{median(seconds) * 1e3:.0f} ms, the slowest of {max(seconds) * 1e3:.0f}; "
            f"{most} rooms waited"
        )
        assert 1000 < most <= 2 * MAX_ALL
        assert len(sent) == 3
        assert min(map(int, sent)) > 1000
        assert wait_for(lambda: not inbox.left())
        assert wait_for(lambda: set(outbox.left()) <= {"waiting", "parts"})
        assert leaks(warm, resources, SLACK) == []
