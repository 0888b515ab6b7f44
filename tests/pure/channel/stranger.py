"""A process that belongs to no server and floods both sides of a channel with useless messages.

Two of its sockets connect to a prefill rank and read no answers. The first opens new rooms, half of
them as one reader and half as a new reader each. The second sends ACKs and FAILs for slots and
rooms of other readers, or for ones that do not exist. Some of these messages have several frames.

The third socket acts as a prefill rank: a decode rank that connects gets READYs with rooms, slots
and tokens that do not exist.

The process sends its address through a pipe. At the end it sends the number of messages per socket,
each more than ENOUGH.
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
MORE = (0,) * 13 + (1, 2, 300)  # numbers of extra frames to draw from
FIRST_ROOM = 1 << 32  # no other request has room numbers from here on


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
    """Yield READYs of the opened room with too many tokens, a repeated slot and an invalid slot.

    Also yield READYs and FAILs of rooms that do not exist.
    """
    while True:
        for whose in (generation, draw()):
            yield Ready(1, whose, 0, 0, (Announced(1 << 20, draw(), 1 << 31),) * 8, False)
            yield Ready(1, whose, 1 << 31, 1 << 40, (Announced(0, draw(), 1),), True)
            yield Fail(1, draw(), "aborted", "x" * 500)


class Sender:
    """A connection that sends as many messages as its socket accepts.

    `before`: frames before each message. `more`: numbers of extra copies of a message's frame to
    draw from.
    """

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
