"""A process that a rank is not served by: what it sends means nothing to anybody.

Two sockets of it are connected to a prefill rank, of that instance, whose answers nobody reads:
one opens rooms without end, as one reader, and as another for each; the other sends ACKs and FAILs
of slots and rooms that are others' or nobody's. The third stands for a prefill rank: whoever
connects to it gets READYs of rooms, slots and tokens that do not exist. Now and then a message to
the prefill rank has several frames. It says its address, and at the end how many messages it has
sent: over each more than ENOUGH, however long that takes.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import zmq

from sglang_mixkv.channel import messages
from sglang_mixkv.channel.messages import (
    Ack,
    Announced,
    Fail,
    Message,
    Open,
    Ready,
    draw_instance,
)

BATCH, ENOUGH = 64, 1000
MORE = (0,) * 13 + (1, 2, 300)  # frames behind the first
FIRST_ROOM = 1 << 32  # nobody else's numbers


def draw() -> int:
    return random.randrange(1, 1 << 63)


def opens(prefill: bytes) -> Iterator[Message]:
    reader = draw_instance()
    for number in itertools.count(FIRST_ROOM):
        for whose in (reader, draw_instance()):
            yield Open(3, number, draw(), prefill, whose, 1, (0, 4), 0, 1024)


def others(slots: int) -> Iterator[Message]:
    while True:
        yield Ack(tuple((random.randrange(2 * slots), draw()) for _ in range(8)))
        yield Ack(((1 << 20, draw()),))
        yield Fail(random.randrange(FIRST_ROOM), draw(), "closed", "x" * 500)
        yield Fail(random.randrange(FIRST_ROOM), draw(), "closed")


def readies(generation: int) -> Iterator[Message]:
    """READYs of the room that was opened, with too many tokens, a slot twice and a slot that does
    not exist, and late READYs and FAILs of rooms that do not exist."""
    while True:
        for whose in (generation, draw()):
            yield Ready(1, whose, 0, 0, (Announced(1 << 20, draw(), 1 << 31),) * 8, False)
            yield Ready(1, whose, 1 << 31, 1 << 40, (Announced(0, draw(), 1),), True)
            yield Fail(1, draw(), "aborted", "x" * 500)


class Sender:
    """A connection that sends as many messages as its socket takes. `before`: frames in front of
    each message. `more`: how many further frames may repeat it."""

    def __init__(self, socket: zmq.Socket[bytes], what: Iterator[Message]) -> None:
        self._socket, self._what = socket, what
        self.before: list[bytes] = []
        self.more = MORE
        self.sent = 0

    def send(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            for message in itertools.islice(self._what, BATCH):
                frames = [messages.encode(message)] * (1 + random.choice(self.more))
                self._socket.send_multipart([*self.before, *frames], zmq.NOBLOCK)
                self.sent += 1


def run(pipe: Any, prefill: str, instance: bytes, seconds: float) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealers = [context.socket(zmq.DEALER) for _ in range(2)]
    for dealer in dealers:
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.setsockopt(zmq.RCVBUF, 4096)
        dealer.connect(prefill)
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    pipe.send(f"tcp://127.0.0.1:{port}")
    connection, frame = router.recv_multipart()
    opened = messages.decode(frame)
    assert isinstance(opened, Open)
    senders = [
        Sender(dealers[0], opens(instance)),
        Sender(dealers[1], others(8)),
        Sender(router, readies(opened.generation)),
    ]
    senders[2].before, senders[2].more = [connection], (0,)
    until = time.monotonic() + seconds
    while time.monotonic() < until or min(sender.sent for sender in senders) <= ENOUGH:
        for sender in senders:
            sender.send()
    pipe.send([sender.sent for sender in senders])
    context.destroy(linger=0)
