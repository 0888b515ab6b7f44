"""The channel waits for each CUDA event before it copies KV that may not be written yet.

The tests replace SGLang's events: each completes some time after it was recorded, and the rows are
written just before that. A plugin that does not wait would move wrong bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rig.ring.model import Cache, Case, Request, page_tables
from rig.ring.rank import Rank, send, tokens_in
from rig.ring.run import right, run
from rig.ring.special import Special

from sglang_mixkv.engine.gpu import forward_event

pytestmark = pytest.mark.transports(1)

DELAY_S, FORWARD_S = 0.05, 0.4
REQUESTS = (Request(23, chunk_pages=2), Request(8))


class Late:
    """A stand-in for a torch.cuda.Event. `then`: the stream's work before the event, which runs
    even if no thread waits for the event."""

    def __init__(self, then: Callable[[], None], seconds: float = DELAY_S) -> None:
        self._then, self._done = then, threading.Event()
        timer = threading.Timer(seconds, self._run)
        timer.daemon = True
        timer.start()

    def _run(self) -> None:
        self._then()
        self._done.set()

    def query(self) -> bool:
        return self._done.is_set()

    def synchronize(self) -> None:
        self._done.wait()


def written_late(rank: Rank, pages: np.ndarray) -> Late:
    """Invert the drafter's rows in these pages, and restore them when the returned event is
    done."""
    entries = rank.pools["draft"]
    truth = [entry[pages].copy() for entry in entries]
    for entry in entries:
        entry[pages] ^= 0xFF

    def write() -> None:
        for entry, rows in zip(entries, truth, strict=True):
            entry[pages] = rows

    return Late(write)


def early(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
    sender._early_send_wait_event = written_late(rank, chunk)
    send(rank, sender, chunk, state)


def indices(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
    """Send page numbers in an array that is filled later, like the pinned tensor with Mooncake."""
    filled, tokens = np.zeros_like(chunk), tokens_in(rank, sender, chunk)
    event = Late(partial(np.copyto, filled, chunk))
    sender.send(filled, state, num_kv_tokens=tokens, indices_event=event)


def test_an_early_chunk_waits_for_the_forward_that_writes_it() -> None:
    """SGLang sends an early chunk in maybe_send_cached_prefix_chunk (prefill.py)."""
    right(Case(2, 1, requests=REQUESTS, special=Special(send=early)))


@pytest.mark.mooncake_only
def test_page_numbers_are_read_after_their_event() -> None:
    """SGLang passes unfinished page numbers in prefill.py, _send_kv_chunk, if the sender has
    supports_host_tensor_indices."""
    right(Case(2, 1, requests=REQUESTS, special=Special(send=indices)))


def a_forward_under_way(rank: Rank) -> None:
    """Write the rows of the last pipeline stage late. With pipeline stages, SGLang sends a chunk
    while its forward may still run (process_prefill_chunk)."""
    from sglang_mixkv.engine import sender as module

    real = module.DraftSender.send

    def send(self: Any, pages: np.ndarray, *args: Any, **kwargs: Any) -> None:
        event = written_late(rank, pages)
        module.forward_event = lambda _scheduler: event
        real(self, pages, *args, **kwargs)

    if rank.stage == rank.pp_size - 1:
        module.DraftSender.send = send  # type: ignore[method-assign]


def test_a_pipeline_stages_chunk_waits_for_its_forward() -> None:
    faults = {("prefill", number): a_forward_under_way for number in range(2)}
    target = Cache("mla", layers=4, k_bytes=24)
    special = Special(faults=faults)
    right(Case(1, 1, prefill_pp=2, target=target, requests=REQUESTS, special=special))


def an_earlier_forward(rank: Rank) -> None:
    """Write to a new request's pages after its metadata are sent, as a finished request's last
    forward may do (decode.py)."""
    from sglang_mixkv.engine import receiver as module

    tables = page_tables(rank.case, "decode")
    real = module.DraftReceiver.send_metadata

    def write(number: int) -> None:
        for entry in rank.pools["draft"]:
            entry[tables[number]] = 0xEE

    def send_metadata(self: Any, pages: np.ndarray, *args: Any, **kwargs: Any) -> None:
        number = rank.rooms().index(self.bootstrap_room)
        event = Late(partial(write, number), FORWARD_S)
        module.forward_event = lambda _scheduler: event
        real(self, pages, *args, **kwargs)

    module.DraftReceiver.send_metadata = send_metadata  # type: ignore[method-assign]


@pytest.mark.parametrize("lack", [None, "prefill"], ids=["warm", "cold"])
def test_rows_wait_for_a_forward_that_may_still_write_them(lack: str | None) -> None:
    """The channel neither unpacks rows nor, if prefill has no drafter, zeroes them before the
    earlier forward has ended."""
    special = Special(faults={("decode", 0): an_earlier_forward}, pause=2 * FORWARD_S)
    if lack is not None:
        special.draft_on = {lack: False}
    requests = (
        Request(24, chunk_pages=2),
        Request(8),
    )  # whole pages, since the forward writes all rows
    outcome = run(Case(2, 1, requests=requests, special=special))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}


def test_the_event_of_a_forward_is_recorded_on_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event is recorded on the scheduler's forward stream, not on its current stream. Without a
    forward stream there is no event."""

    class Stream: ...

    class Event:
        def __init__(self) -> None:
            self.recorded = list[Any]()

        def record(self, stream: Any = "the current one") -> None:
            self.recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    scheduler = SimpleNamespace(forward_stream=Stream(), copy_stream=Stream())
    events = [forward_event(scheduler) for _ in range(2)]
    assert [event.recorded for event in events] == [[scheduler.forward_stream]] * 2
    assert events[0] is not events[1], "recording an event again would move it"
    assert forward_event(SimpleNamespace(forward_stream=nullcontext())) is None
    assert forward_event(SimpleNamespace()) is None
