"""One decode rank: what it decides about prefill servers and rooms.

    scheduler      resolve (once per prefill server) -> Source
                   begin -> prepare (before the metadata goes out) -> release
    decode thread  gate.may_pass; land, when all senders have answered; drained

All of it runs in SGLang's threads, which an exception would end without a word: engine/ lets
none of those that are raised here through.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from sglang_mixkv.config import Config
from sglang_mixkv.decode.cold import Clearer, clear_aux
from sglang_mixkv.decode.gate import Gate
from sglang_mixkv.decode.landing import Landing
from sglang_mixkv.decode.registrations import Registrations
from sglang_mixkv.decode.rooms import Room, Rooms, State
from sglang_mixkv.decode.sglang import SGLang
from sglang_mixkv.decode.slices import Sender
from sglang_mixkv.decode.source import Local, Sizes, Source, source_of
from sglang_mixkv.decode.sources import Sources
from sglang_mixkv.decode.verify import Asked, Verifier
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.protocol.extension import Extension, Grant
from sglang_mixkv.protocol.facts import Facts, cold_differences, differences
from sglang_mixkv.protocol.framing import Framing
from sglang_mixkv.protocol.messages import Poll
from sglang_mixkv.rows.host import Rows
from sglang_mixkv.stats import Stats
from sglang_mixkv.transport.base import Transport

logger = logging.getLogger(__name__)


class DecodeRank:
    """`sources`, `rooms`: what it knows; `gate`: its door; `landing`: where slices land."""

    def __init__(
        self, local: Local, config: Config, stats: Stats, rows: Rows, sglang: SGLang,
        framing: Framing, *, compares: bool, quarantine_s: float,
    ) -> None:  # fmt: skip
        """`compares`: SGLang's own --disaggregation-enable-kv-checksum is on. `quarantine_s`: how
        long what a failed room held stays out of use at most."""
        self.local, self.config, self.stats, self.rows = local, config, stats, rows
        self._sglang, self._compares = sglang, compares
        self.sources, self.rooms = Sources(stats), Rooms()
        self.verifier, self._clearer = Verifier(local.caches, rows), Clearer(rows)
        self.landing = Landing(rows, config, stats, quarantine_s)
        self.transport: Transport | None = None
        self.registrations = Registrations()
        aux = local.facts.aux_item_lens, local.aux_rows
        self.gate = Gate(self.rooms, self.registrations, sglang, local.has_draft, *aux, framing)

    def connect(self, transport: Transport) -> None:
        """Once SGLang has its engine."""
        self.transport = transport
        self.landing.connect(transport)

    # -- prefill servers, in the scheduler

    def learn(self, address: str, sizes: Sizes, facts: Facts, *, cold: bool) -> Source:
        """A prefill server that SGLang has resolved. Raises MixKVError for unsupported sizes."""
        if sizes.attn_cp != 1 and self.config.verify == "checksum":
            raise MixKVError(
                "MIXKV-PAIR-04",
                "--mixkv-verify checksum does not know attention CP; the prefill server has "
                f"{sizes.attn_cp}, so no request could be compared. Start this decode server "
                "with --mixkv-verify off, or the prefill without attention CP.",
            )
        verify = self._verifies(sizes)
        source = source_of(self.local, address, sizes, facts, cold=cold, verify=verify)
        self.sources.put(source)
        return source

    def is_cold(self, address: str, facts: Facts) -> bool:
        """Whether that server's requests go without draft KV. MixKVError when not even that."""
        found = differences(facts, self.local.facts)
        if not found:
            return False
        apart = cold_differences(facts, self.local.facts)
        if apart or self.config.on_draft_mismatch != "cold":
            raise MixKVError("MIXKV-PAIR-03", " ".join(apart or found))
        logger.warning(
            "[MIXKV-PAIR-06] sglang-mixkv serves requests of prefill server %s without draft KV "
            "(--mixkv-on-draft-mismatch cold): %s", address, " ".join(found),
        )  # fmt: skip
        return True

    def _verifies(self, sizes: Sizes) -> bool:
        """Whether requests from that server are compared: by our flag, or by SGLang's.

        --disaggregation-enable-kv-checksum compares what both sides digest alike; where layouts
        differ stock skips it (decode.py _kv_checksum_comparable), and ours steps in, but for
        context parallelism, which it does not know.
        """
        if self.config.verify == "checksum":
            return True
        if sizes.attn_cp != 1 or self.local.dcp_size != 1:
            return False
        apart = (sizes.attn_tp, sizes.pp) != (self.local.tp, self.local.pp_size)
        return self._compares and apart

    def extension(self, source: Source, prefill_rank: int, stage: int) -> Extension:
        """What that prefill rank is told at registration."""
        route = source.route(prefill_rank, stage)
        return source.extension(self.local, route, self.landing.span)

    def landing_span(self, address: str) -> tuple[int, int]:
        """Of the staging buffer that this server's ranks should know of. One that could not be
        had is asked for again, a minute after the last try."""
        source = self.sources.get(address)
        if source is not None and self.landing.asks_again:
            self.landing.prepare(source.target, source.draft)
        return self.landing.span

    # -- requests, in the scheduler

    def refusal(self, address: str, number: int) -> str | None:
        """Why a request cannot be served, None when it can."""
        reason = self.sources.why_not(address)
        if reason is not None:
            return reason
        if self.rooms.get(number) is not None or self._sglang.awaits_acks(number):
            return (
                f"[MIXKV-ROOM-03] room {number} still belongs to another request: bytes and "
                "answers to that one may arrive. Send each request with a bootstrap_room of its "
                "own, as SGLang's router does, and with n=1."
            )
        return None

    def begin(self, number: int, address: str) -> Room | None:
        """A request whose prefill ranks are known. None for a server that was not resolved."""
        source = self.sources.get(address)
        if source is None:
            return None
        self.landing.begin(number)
        return self.rooms.begin(number, source, self.landing.span)

    def prepare(self, room: Room, pages: Any, aux_row: int | None) -> Mapping[Sender, Grant]:
        """Before a room's metadata goes out: clear what will not come, note what is verified,
        hold what slices land in. What senders are told, by (prefill rank, stage)."""
        source, numbers = room.source, np.asarray(pages, np.int64)
        if source.cold:
            self._clear(numbers, aux_row)
        asked = None
        if source.verify and len(numbers):
            draft = None if source.cold else self.local.caches.draft
            asked = Asked(numbers, draft, source.kv_senders)
        self.rooms.ask(room, len(numbers), aux_row, asked)
        if not source.draft or not len(numbers):
            return {}
        return self.landing.grant(
            room.number, source.target, source.draft, numbers, told=room.span,
            knows_extents=source.knows_extents,
        )  # fmt: skip

    def _clear(self, pages: Any, aux_row: int | None) -> None:
        caches, facts = self.local.caches, self.local.facts
        if caches.draft is not None:
            self._clearer.clear(caches.draft, caches.draft_ptrs, pages)
            if aux_row is not None:
                clear_aux(self.local.aux_ptrs, facts.aux_item_lens, aux_row, facts.draft_aux)
        self.stats.cold()

    def received(self, room: Room) -> None:
        """A request succeeded. Count what it needed, as this rank's pool holds it."""
        self.registrations.worked(room.source.address)
        if self.local.has_draft:  # without a drafter the prefill side does not count
            target, draft = room.source.needed_bytes(self.local, room.pages)
            self.stats.add(target_bytes_needed=target, draft_bytes_needed=draft)
        self.stats.publish()

    def release(self, room: Room) -> None:
        """The request ended; nothing scatters when this has returned. What it held is free once
        all ranks have acknowledged, which some may have done before."""
        self.landing.release(room.number, room.source.contacted)
        self.drained(room.number)

    def end(self, room: Room) -> None:
        """Its receiver is cleared."""
        self.release(room)
        self.rooms.end(room)

    # -- in SGLang's decode thread

    def land(self, number: int) -> str | None:
        """All senders have answered: bring the room's KV in place. What went wrong, or None."""
        room = self.rooms.get(number)
        if room is None or room.state is not State.ASKED:  # a success that was said twice
            return None
        if self._sglang.statuses().get(number) == Poll.FAILED:
            return None
        try:
            self.landing.scatter(number)
            self.rooms.land(room)
            if room.verified is None:
                return None
            self.stats.add(rooms_verified=1)
            problem = self.verifier.problem(room.verified)
            # If the scheduler ended it meanwhile, its pages may be another request's by now.
            return problem if self.rooms.get(number) is room else None
        except Exception as error:
            logger.exception("[MIXKV-LAND-01] sglang-mixkv could not complete room %s", number)
            return f"[MIXKV-LAND-01] could not complete room {number}: {error!r}"

    def drained(self, number: int) -> None:
        """More prefill ranks have nothing of a failed room in flight any more."""
        self.landing.drained(number, self._sglang.acknowledged(number))

    def problems(self) -> list[str]:
        """What is wrong while no request runs."""
        return [*self.rooms.problems(), *self.landing.problems()]
