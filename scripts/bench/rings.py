"""A ring of ranks for the benchmarks. Each rank is one of tests/rig in its own process, which
serves one request after another on command.

    stock      SGLang alone
    channel    with the plugin
    target     SGLang alone, without a drafter

A ring's `way` is one of these words. Rings of several ways run side by side, so that their requests
can take turns; an idle ring sleeps. The main thread of a rank calls SGLang's sender or receiver as
SGLang's scheduler does. Times are seconds of CLOCK_MONOTONIC, which all processes share. The target
is small: 24 bytes per token.
"""

from __future__ import annotations

import inspect
import itertools
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import common  # noqa: F401  # puts the rig in the path
import numpy as np
from rig.process import forks
from rig.ring import load, model, special  # load sets what SGLang's import reads
from rig.ring import rank as rig

from mixkv_demo.ports import free_port

SIDES = ("prefill", "decode")
LAYOUTS = ("runs", "random")
PAGE, HEADS, HEAD_BYTES = 64, 8, 256
TOKEN_BYTES = 2 * HEADS * HEAD_BYTES  # of the whole drafter: K and V of one layer
FAILED, WAITING, SUCCESS = 0, 2, 4  # values of SGLang's KVPoll
POLL_S, LIMIT_S = 2e-4, 60.0
FORK = mp.get_context("fork")


def load_sglang() -> None:
    """Load SGLang; call this once, before the first ring."""
    os.environ.setdefault("SGLANG_MIXKV_PATIENCE", "10")  # a cold drafter gives no figure
    load.load_sglang()


# ---------------------------------------------------------------- a rank


class TransferFailed(RuntimeError):
    """SGLang's own transfer has failed."""


class Member(rig.Rank):
    """A rank and its request, of which the ring calls one step after another. `handle`: SGLang's
    sender or receiver. `cpu`: seconds of this thread in the request's calls."""

    handle: Any = None
    cpu = 0.0

    def settings(self, config: Any) -> Any:
        return config  # both sides' buffers are as large as by default

    def metered(self, call: Callable[[], Any]) -> Any:
        start = time.thread_time()
        result = call()
        self.cpu += time.thread_time() - start
        return result

    def asked_class(self, kind: str) -> Any:
        """Get a sender's or receiver's class as SGLang's scheduler does for each request."""
        from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

        get = get_kv_class if self.plugin is not None else inspect.unwrap(get_kv_class)
        return get(TransferBackend(self.case.backend), KVClassType(kind))

    def pages(self, side: str, tokens: int, layout: str) -> np.ndarray[Any, Any]:
        """Choose a request's pages on a side, from those that the largest request needs."""
        asked = model.Request(tokens), self.case.requests[0]
        count, most = (self.case.pages(request) for request in asked)
        if layout == "runs":
            return np.arange(count, dtype=np.int32)
        order = np.random.default_rng([tokens, side == "decode"]).permutation(most)
        return order[:count].astype(np.int32)

    def wait_for(self, what: Callable[[], Any]) -> None:
        until = time.monotonic() + LIMIT_S
        while not what():
            room = getattr(self.handle, "bootstrap_room", None)
            if self.manager.request_status.get(room) == FAILED:
                raise TransferFailed(f"{self.side} {self.rank}")
            if time.monotonic() > until:
                raise TimeoutError(f"{self.side} {self.rank}: not within {LIMIT_S} s")
            time.sleep(POLL_S)

    def target_came(self) -> bool:
        """Return whether SGLang's own transfer has succeeded."""
        return bool(self.manager.request_status.get(self.handle.bootstrap_room) == SUCCESS)

    def last_poll(self) -> None:
        """Wait for Success. Only the poll that returns Success is counted."""
        before = self.cpu

        def succeeded() -> bool:
            self.cpu = before  # earlier polls are not counted
            return bool(self.metered(self.handle.poll) == SUCCESS)

        self.wait_for(succeeded)

    def clear(self) -> float:
        self.metered(self.handle.clear)
        return self.cpu


class PrefillMember(Member):
    def open_room(self, room: int, tokens: int, layout: str) -> None:
        """Make the sender, and wait until decode's metadata has arrived."""
        self.cpu, arguments = 0.0, (self.manager, self.address(0), room, True)
        self.handle = self.metered(lambda: self.asked_class("sender")(*arguments))
        self.chunk = self.pages("prefill", tokens, layout)
        self.wait_for(lambda: self.handle.poll() in (WAITING, SUCCESS))
        self.metered(lambda: self.handle.init(len(self.chunk), 0))

    def send(self) -> float:
        """Send the chunk; return the time at which `send` was called."""
        now = time.monotonic()
        self.metered(lambda: self.handle.send(self.chunk))
        self.wait_for(self.target_came)
        return now

    def conclude(self) -> None:
        self.last_poll()
        self.metered(self.handle.get_transfer_metric)


class DecodeMember(Member):
    @property
    def draft(self) -> Any:
        """Return the plugin's ReceiveHandle for the request, or None in stock."""
        return getattr(self.handle, "handle", None)

    def open_room(self, room: int, tokens: int, layout: str) -> None:
        self.cpu, arguments = 0.0, (self.manager, self.address(0), room)

        def made() -> Any:
            receiver = self.asked_class("receiver")(*arguments)
            receiver.init(0)
            return receiver

        self.wait_for(lambda: self.is_known(0))
        self.handle, pages = self.metered(made), self.pages("decode", tokens, layout)
        self.opened = (tokens, layout)
        self.metered(lambda: self.handle.send_metadata(pages, 1, decode_prefix_len=0))

    def draft_came(self) -> bool:
        return self.draft is None or self.draft.state is not None

    def finish(self) -> float:
        """Wait until the draft KV is in place, and return the time."""
        self.wait_for(self.draft_came)
        return time.monotonic()

    def conclude(self) -> float:
        """Poll once everything has arrived, so that the poll waits for no other process. Return the
        time at which the poll returned Success."""
        from sglang.srt.managers.schedule_batch import Req

        if self.case.backend == "mooncake":  # NIXL's notifications are read in the poll
            self.wait_for(lambda: self.target_came() and self.draft_came())
        if self.draft is not None:
            self.draft.request = request = Req.__new__(Req)  # with the fields that the plugin reads
            request.rid, request.finished_reason = str(self.handle.bootstrap_room), None
            request.spec_correct_drafts_histogram = []
        self.last_poll()
        return time.monotonic()

    def empty(self) -> None:
        for entries in self.pools.values():
            for entry in entries:
                entry.fill(0)

    def wrong(self) -> int:
        """Count the bytes of the request's pages that differ from prefill's."""
        if self.draft is not None and self.draft.reason:
            raise RuntimeError(f"a cold drafter: {self.draft.reason}")
        there, here = (self.pages(side, *self.opened) for side in SIDES)
        return sum(
            int((row[there] != entry[here]).sum())
            for name, pool in self.pools.items()
            for row, entry in zip(self._rows(name, 0), pool, strict=True)
        )


member: Any = None  # in a rank's process


def start(case: Any, side: str, number: int, ports: list[int]) -> None:
    """Start a rank in its process."""
    global member
    forks.die_with_parent()
    kind = PrefillMember if side == "prefill" else DecodeMember
    member = kind(case, side, number, ports)
    member.start_manager()


def on_member(call: Callable[..., Any], *args: Any) -> Any:
    return call(member, *args)


# ---------------------------------------------------------------- all ranks


class Ring:
    """All ranks of one way, for requests of up to `most` tokens. `given`: fields of the case to
    change."""

    def __init__(self, way: str, prefill_tp: int, decode_tp: int, most: int, **given: Any) -> None:
        draft = model.Cache("mha", heads=HEADS, k_bytes=HEAD_BYTES, v_bytes=HEAD_BYTES)
        given = {"draft": draft, "page_size": PAGE, **given}
        if way == "target":
            given["draft"] = None
        self._case = model.Case(
            prefill_tp, decode_tp, target=model.Cache("mla", layers=1, k_bytes=24),
            requests=(model.Request(most),), shuffled=False, prefill_mixkv=way == "channel",
            decode_mixkv=way == "channel", **given,
        )  # fmt: skip
        self._rooms, self._told = itertools.count(10_000), dict[str, list[Future[Any]]]()
        self.start()

    def start(self) -> None:
        case, ports = replace(self._case, shared=special.Shared([FORK.Event()])), [free_port()]
        self._ranks = {
            side: [ProcessPoolExecutor(1, FORK, start, (case, side, n, ports)) for n in range(tp)]
            for side, tp in zip(SIDES, (case.prefill_tp, case.decode_tp), strict=True)
        }
        for rank in itertools.chain(*self._ranks.values()):
            rank.submit(int)  # starts its process

    def tell(self, side: str, call: Callable[..., Any], *args: Any) -> None:
        """Call a function with each Member of a side, and these arguments, in its process."""
        self._told[side] = [rank.submit(on_member, call, *args) for rank in self._ranks[side]]

    def hear(self, side: str) -> list[Any]:
        """Return the result of each rank of a side, by number."""
        return [result.result(2 * LIMIT_S) for result in self._told[side]]

    def ask(self, side: str, call: Callable[..., Any], *args: Any) -> list[Any]:
        self.tell(side, call, *args)
        return self.hear(side)

    def open(self, tokens: int, layout: str) -> None:
        """Open a request on both sides, without sending any of it."""
        request = (next(self._rooms), tokens, layout)
        self.tell("decode", DecodeMember.open_room, *request)
        self.ask("prefill", PrefillMember.open_room, *request)
        self.hear("decode")

    def clear(self) -> dict[str, float]:
        """End the request; return its calls' CPU seconds on each side's first rank."""
        self.ask("prefill", PrefillMember.conclude)
        return {side: self.ask(side, Member.clear)[0] for side in reversed(SIDES)}

    def request(self, tokens: int) -> dict[str, float]:
        """Run one request, and return the seconds of its calls."""
        self.open(tokens, "random")
        self.ask("prefill", PrefillMember.send)
        self.ask("decode", DecodeMember.conclude)
        return self.clear()

    def send(self, until: Callable[..., float]) -> tuple[float, float]:
        """Send the request. Return when the first prefill rank called `send`, and when all decode
        ranks had done `until`."""
        self.tell("decode", until)
        self.tell("prefill", PrefillMember.send)
        return min(self.hear("prefill")), max(self.hear("decode"))

    def transfer(self, tokens: int, layout: str) -> float:
        """Run one request; return the seconds until the draft KV is in place on all decode
        ranks."""
        self.open(tokens, layout)
        began, ended = self.send(DecodeMember.finish)
        self.clear()
        return ended - began

    def check(self, tokens: int, layout: str) -> None:
        """Run one request, and compare every byte. Raises RuntimeError if one is wrong."""
        self.ask("decode", DecodeMember.empty)
        self.open(tokens, layout)
        self.send(DecodeMember.conclude)
        wrong = sum(self.ask("decode", DecodeMember.wrong))
        self.clear()
        if wrong:
            raise RuntimeError(f"{wrong} wrong bytes")

    def close(self) -> None:
        for rank in itertools.chain(*self._ranks.values()):
            for process in rank._processes.values():
                process.kill()


@contextmanager
def rings(ways: tuple[str, ...], *sizes: int, **given: Any) -> Iterator[dict[str, Ring]]:
    """Make a ring for each of `ways`, with Ring's other arguments. Return them by way."""
    with ExitStack() as made:
        yield {way: made.enter_context(closing(Ring(way, *sizes, **given))) for way in ways}
