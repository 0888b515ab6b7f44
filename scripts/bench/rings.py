"""Pairs of ranks for the benchmarks: one ring a way, asked for one request after the other.

    stock      SGLang alone
    channel    with the draft channel
    unchecked  with the draft channel, without its checksums

Each rank has a process of its own (members.py). Rings of several ways stand side by side, so that
their requests can take turns; one that is not asked sleeps. Times are seconds of CLOCK_MONOTONIC,
which all processes share. The target is small: 24 bytes per token.
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from members import LIMIT_S, PAGE, SIDES, Meter, load, model, rig, serve
from rig.special import Shared, Special

WAYS = ("stock", "channel")
LAYOUTS = ("runs", "random")
PATIENCE = "SGLANG_MIXKV_PATIENCE", "10"  # a cold drafter is no figure
HEADS, HEAD_BYTES = 8, 256
TOKEN_BYTES = 2 * HEADS * HEAD_BYTES  # of the whole drafter: K and V of one layer
FIRST_ROOM = 10_000


def load_sglang() -> None:
    """Once, before the first ring."""
    os.environ.setdefault(*PATIENCE)
    load.load_sglang()


class Ring:
    """All ranks of one way. `starts`: seconds that each rank's manager took, by side."""

    def __init__(self, way: str, prefill_tp: int, decode_tp: int, backend: str, most: int) -> None:
        plugin, context = way != "stock", mp.get_context("fork")
        case = model.Case(
            prefill_tp, decode_tp, target=model.Cache("mla", layers=1, k_bytes=24),
            draft=model.Cache("mha", heads=HEADS, k_bytes=HEAD_BYTES, v_bytes=HEAD_BYTES),
            requests=(model.Request(most),), page_size=PAGE, shuffled=False, backend=backend,
            prefill_mixkv=plugin, decode_mixkv=plugin,
            shared=Shared([context.Event()]),
            special=Special(config={"verify": "off"} if way == "unchecked" else {}),
        )  # fmt: skip
        self._rooms, self._pipes, self._processes = itertools.count(FIRST_ROOM), {}, []
        ports = [rig.free_port()]
        for side, count in (("prefill", prefill_tp), ("decode", decode_tp)):
            for number in range(count):
                here, there = context.Pipe()
                arguments = (case, side, number, ports, there, os.getpid())
                process = context.Process(target=serve, args=arguments, daemon=True)
                process.start()
                there.close()
                self._processes.append(process)
                self._pipes[side, number] = here
        self.starts = {side: self.hear(side) for side in SIDES}
        self.ask("decode", "resolve")

    def tell(self, side: str, name: str, *args: Any) -> None:
        for (whose, _), pipe in self._pipes.items():
            if whose == side:
                pipe.send((name, *args))

    def hear(self, side: str) -> list[Any]:
        """What each rank of a side returned, by number."""
        found = []
        for (whose, number), pipe in self._pipes.items():
            if whose != side:
                continue
            if not pipe.poll(2 * LIMIT_S):
                raise TimeoutError(f"{side} {number} does not answer")
            found.append(pipe.recv())
            if isinstance(found[-1], Exception):
                raise found[-1]
        return found

    def ask(self, side: str, name: str, *args: Any) -> list[Any]:
        self.tell(side, name, *args)
        return self.hear(side)

    def open(self, tokens: int, layout: str, polls: int = 0) -> list[float]:
        """A request that both sides know, and nothing of which is sent."""
        request = (next(self._rooms), tokens, layout, polls)
        opened = self.ask("decode", "open", *request)
        self.ask("prefill", "begin", *request)
        return opened

    def clear(self) -> tuple[Meter, Meter]:
        """The first ranks' meters of the request."""
        self.ask("prefill", "conclude")
        decode, *_ = self.ask("decode", "clear")
        prefill, *_ = self.ask("prefill", "clear")
        return prefill, decode

    def calls(self, tokens: int, polls: int) -> tuple[Meter, Meter]:
        """A request whose calls are metered, on the first prefill rank and the first decode rank:
        `made`, `init`, `send`, `metric`; `init`, `send_metadata`; on both `poll` while it waits,
        `last poll`, which follows when everything is there, and `clear`."""
        self.open(tokens, "random", polls)
        self.ask("prefill", "send")
        self.ask("decode", "conclude")
        return self.clear()

    def awaited_poll(self, tokens: int, polls: int) -> float:
        """Thread seconds of decode's poll after SGLang's transfer and before the draft KV."""
        self.open(tokens, "random")
        self.ask("decode", "await_draft", polls)
        self.ask("prefill", "send")
        self.ask("decode", "conclude")
        return float(self.clear()[1].thread["awaited poll"])

    def transfer(self, tokens: int, layout: str) -> dict[str, float]:
        """Seconds from the first prefill rank's `send`: until the draft KV is in place on all
        decode ranks (over the channel), and until SGLang's poll says Success on all of them."""
        self.open(tokens, layout)
        self.tell("decode", "finish")
        self.tell("prefill", "send")
        sent, found = min(self.hear("prefill")), self.hear("decode")
        return {
            "draft": max(warm for warm, _ in found) - sent,
            "success": max(success for _, success in found) - sent,
        }

    def check(self, tokens: int, layout: str) -> None:
        """A request of which every byte is compared. RuntimeError at a wrong one."""
        self.ask("decode", "empty")
        self.transfer(tokens, layout)
        wrong = sum(self.ask("decode", "wrong"))
        if wrong:
            raise RuntimeError(f"{wrong} wrong bytes")
        self.clear()

    def sizes(self, side: str) -> list[dict[str, int]]:
        return self.ask(side, "size")

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


@contextmanager
def rings(
    ways: tuple[str, ...], prefill_tp: int, decode_tp: int, backend: str, most: int
) -> Iterator[dict[str, Ring]]:
    """One ring a way, by way, for requests of up to `most` tokens."""
    made: dict[str, Ring] = {}
    try:
        for way in ways:
            made[way] = Ring(way, prefill_tp, decode_tp, backend, most)
        yield made
    finally:
        for ring in made.values():
            ring.end()
