"""A rank's memory: SGLang's own pools, filled with the expected bytes on prefill and with a canary
on decode. At the end, every byte on decode is compared.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rig.ring import model
from rig.ring.model import Cache, Case

# The layout of SGLang's MetadataBuffers: six rows, three for the drafter, and the room.
AUX_LENS = (32, 8, 8, 8, 8, 8, 8, 16, 24, 16)
SERVED_COLD = "success", "cold"


@dataclass
class Ended:
    """One request on one rank. `state`: warm or cold, on decode. `reason`: why it is cold, or why
    it failed."""

    number: int
    began: float
    seconds: float
    status: str
    state: str
    reason: str


@dataclass
class RankReport:
    """One rank's final report. `wrong`: byte differences, as text. `counted`: the plugin's metrics.
    `warm`: the resources of a rank that serves traffic, after its first requests."""

    side: str
    rank: int
    ended: list[Ended] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    counted: Counter[tuple[str, ...]] = field(default_factory=Counter)
    warm: dict[str, int] = field(default_factory=dict)
    error: str = ""

    @property
    def status(self) -> list[str]:
        """Return the status of each of this rank's requests, by number."""
        return [one.status for one in sorted(self.ended, key=lambda one: one.number)]

    @property
    def cold(self) -> set[int]:
        """Return the requests that were served without all of their draft KV."""
        return {one.number for one in self.ended if (one.status, one.state) == SERVED_COLD}


class Memory:
    """A rank's pools, model state and metadata. `report.wrong` lists the differences found."""

    def __init__(self, case: Case, side: str, rank: int) -> None:
        self.case, self.side, self.rank = case, side, rank
        self.tp = case.prefill_tp if side == "prefill" else case.decode_tp
        self.dp_size = case.prefill_dp if side == "prefill" else case.decode_dp
        self.pp_size = case.prefill_pp if side == "prefill" else 1
        per_stage = self.tp * self.dp_size
        self.server, local = divmod(rank, per_stage * self.pp_size)
        self.stage, self.tp_rank = divmod(local, per_stage)
        self.dp_rank, self.attn_rank = divmod(self.tp_rank, self.tp)
        self.dcp = case.dcp_of(side)
        self.dcp_rank = self.tp_rank % self.dcp  # runtime_context.py
        self.relays = case.prefill_dcp != case.dcp
        self._page_tables = [model.page_tables(case, side, pool) for pool in (0, 1)]
        self.report = RankReport(side, rank)

    def allocate(self) -> None:
        """Allocate and fill the memory. SGLang must have this rank's arguments and numbers."""
        self.sglang_pools: dict[str, Any] = {}
        self.pools = self._pools()
        self.state = self._state()
        number = self.rank if self.side == "decode" else self._aux_number(self.rank)
        self.aux = self._aux_rows(number, self.side == "decode")
        self.memory = {**self.pools, "aux": self.aux, "state": [*self.state.values()]}

    def _aux_rows(self, number: int, of_decode: bool) -> list[np.ndarray]:
        rows = len(self.case.requests) + 1
        return [
            np.random.default_rng([number, of_decode, i]).integers(0, 256, (rows, n), np.uint8)
            for i, n in enumerate(AUX_LENS)
        ]

    def draft_args(self, side: str = "") -> str:
        """Return the drafter's place in the KV args of this side (or the given one): `channel`, in
        the plugin's channel; `appended`, after the target, as in SGLang; `hidden`, nowhere."""
        side = side or self.side
        opted_in = getattr(self.case, f"{side}_mixkv")
        way = "channel" if opted_in else "appended"
        return self.case.special.draft_args.get(side, way)

    def _aux_number(self, rank: int) -> int:
        """Return the number that seeds a prefill rank's metadata rows. As in SGLang, all ranks that
        may send a request have the same rows."""
        tp, pp, dp = (getattr(self.case, f"prefill_{name}") for name in ("tp", "pp", "dp"))
        return rank // (tp * dp * pp) * dp + rank // tp % dp

    def _stage_layers(self) -> range:
        """Return this stage's layers. All stages have the same number of layers, unless the case
        sets `stage_layers`."""
        sizes = [self.case.target.layers // self.pp_size] * self.pp_size
        if self.pp_size > 1:
            sizes = [*self.case.special.stage_layers] or sizes
        first = sum(sizes[: self.stage])
        return range(first, first + sizes[self.stage])

    def _speculates(self) -> bool:
        wanted = self.case.special.draft_on.get(self.side, True)
        return wanted and (self.case.draft is not None or self.case.special.draft_is_state)

    def _has_draft(self) -> bool:
        drafts = self.case.draft is not None and self._speculates()
        return drafts and self.stage == self.pp_size - 1

    def _pools(self) -> dict[str, list[np.ndarray]]:
        """Build SGLang's own pools, and return views of them. They contain a canary, and on prefill
        every request's rows."""
        caches = {"target": self.case.target, "draft": self.case.draft}
        views = {}
        for name, cache in caches.items():
            if cache is None or (name == "draft" and not self._has_draft()):
                continue
            layers = self._stage_layers() if name == "target" else range(cache.layers)
            dcp = self.dcp if name == "draft" else 1
            pool = model.sglang_pool(
                self.case, cache, self.tp, self.attn_rank, len(layers), layers.start, dcp
            )
            if name == "target" and self.case.hybrid:
                pool = model.hybrid_pool(self.case, pool, self.tp, self._stage_layers())
            self.sglang_pools[name] = pool
            whole = getattr(pool, "full_kv_pool", pool)
            views[name] = model.entries_of(self.case, whole, cache, self.tp, self.attn_rank, dcp)
            if cache.index_k:
                views[f"{name} index"] = model.index_entries_of(self.case, whole)
        if self.case.target_window:
            window = self.sglang_pools["target"].swa_kv_pool
            views["window"] = model.entries_of(
                self.case, window, self._cache("window"), self.tp, self.attn_rank
            )
        for name, view in views.items():
            for index, entry in enumerate(view):
                seed = [self.case.seed, self.side == "decode", self.rank, len(name), index]
                entry[:] = model.canary(seed, entry.shape)
            if self.side == "prefill":
                self._write_truth(name, view)
        return views

    def _cache(self, name: str) -> Cache:
        cache = self.case.cache(name)
        assert cache is not None
        return cache

    def _tables(self, name: str) -> list[np.ndarray]:
        """Return each request's pages in the named pool."""
        return self._page_tables[name == "window"]

    def _rows(self, name: str, number: int) -> list[np.ndarray]:
        """Return this rank's part of a request's rows, per entry."""
        cache = self._cache(name)
        rows = model.cut(
            cache, model.whole(self.case, name, cache, number), self.tp, self.attn_rank
        )
        if self.dcp == 1:
            return rows
        rank = None if name == "draft" else self.dcp_rank
        return [model.on_dcp_rank(row, self.dcp, rank) for row in rows]

    def _sent(self, name: str, number: int, entry: int) -> np.ndarray:
        """Return which rows of a request are written on this rank, [pages, rows of a page]."""
        case, first = self.case, self._first_page(name, number)
        pages = case.pages(case.requests[number])
        sent = np.ones((pages, case.page_size), bool)
        if self.dcp == 1 or not self.relays:
            tables, rows = self._tables(name), self.pools[name][entry].shape[1]
            sent = np.repeat(np.arange(len(tables[number])) >= first, rows)
            if name == "draft" and case.by_token and not self._cache(name).is_mla:
                sent[case.requests[number].tokens :] = False
            return sent.reshape(-1, rows)
        sent[:first] = False
        sent.reshape(-1)[case.requests[number].tokens :] = False
        return model.on_dcp_rank(sent, self.dcp, None if name == "draft" else self.dcp_rank)

    def _on_stage(self, name: str, cache: Cache, rows: list[np.ndarray]) -> list[np.ndarray]:
        """Return the entries, out of the whole model's, that belong to this pipeline stage."""
        if not name.startswith("target") or self.pp_size == 1:
            return rows
        if name == "target index":
            layers = np.flatnonzero(self.case.target.index_k)
            return [r for i, r in zip(layers, rows, strict=True) if i in self._stage_layers()]
        groups = range(1 if cache.is_mla else 2)
        return [rows[g * cache.layers + i] for g in groups for i in self._stage_layers()]

    def _write_truth(self, name: str, pool: list[np.ndarray]) -> None:
        for number, pages in enumerate(self._tables(name)):
            rows = self._on_stage(name, self._cache(name), self._rows(name, number))
            for entry, row in zip(pool, rows, strict=True):
                entry[pages] = row

    def _state(self) -> dict[tuple[int, int], np.ndarray]:
        """Return views of a hybrid pool's state: a canary, and on prefill every request's rows."""
        if not self.case.hybrid:
            return {}
        state = model.state_of(self.case, self.sglang_pools["target"])
        for key, slots in state.items():
            slots[:] = model.canary([self.rank, self.side == "decode", *key], slots.shape)
            for number in range(len(self.case.requests)) if self.side == "prefill" else ():
                slots[number] = self._state_rows(number, key, slots)
        return state

    def _state_rows(self, number: int, key: tuple[int, int], slots: np.ndarray) -> np.ndarray:
        return model.state_rows(self.case, number, key, slots.shape[2], self.tp, self.attn_rank)

    def mine(self, number: int) -> bool:
        if self.side == "prefill" and self.case.prefill_of(number) != self.server:
            return False
        return self.case.turn(number) % self.dp_size == self.dp_rank

    def watch(self) -> None:
        """Copy all memory, since bytes that belong to no request must not change."""
        self.shadow = {name: [one.copy() for one in of] for name, of in self.memory.items()}

    def expect(self, number: int, is_cold: bool) -> None:
        """Check a request that has succeeded, and expect its bytes at the end as well. If it is
        cold, each token's draft rows may be zero instead."""
        ways = {self.draft_args(side) for side in ("prefill", "decode")}
        moved = ways <= {"appended", "channel"} and not self.case.special.draft_stays
        for name, shadow in self.shadow.items():
            if name.startswith("draft") and not moved:
                continue
            at, truth = self._places(name, number), self._truth(name, number)
            for index, (want, rows) in enumerate(zip(shadow, truth, strict=True)):
                got = self.memory[name][index][at]
                if name in self.pools:
                    sent = self._sent(name, number, index)[..., None, None]
                    rows = np.where(sent, rows, want[at])
                if name == "draft" and is_cold:
                    rows = np.where(got.any(axis=(2, 3), keepdims=True), rows, 0)
                want[at] = rows
                self._differ(f"{name} entry {index}", rows, got, f" of request {number}")

    def compare(self) -> None:
        """Compare every byte of every buffer with the expected bytes of successful requests and
        with the canary elsewhere. Failed requests' pages may contain anything, unless the case has
        `failed_rooms_stay_clean`."""
        failed = [one.number for one in self.report.ended if one.status != "success"]
        for name, shadow in self.shadow.items():
            for index, (want, got) in enumerate(zip(shadow, self.memory[name], strict=True)):
                for number in () if self.case.special.failed_rooms_stay_clean else failed:
                    at = self._places(name, number)
                    want[at] = got[at]
                self._differ(f"{name} entry {index}", want, got)

    def _places(self, name: str, number: int) -> np.ndarray:
        """Return a request's indices in decode's memory of that name."""
        return self._tables(name)[number] if name in self.pools else np.array([number + 1])

    def _truth(self, name: str, number: int) -> list[np.ndarray]:
        if name == "aux":
            sender = self._aux_number(self._aux_sender(number))
            return [rows[[number]] for rows in self._aux_rows(sender, False)]
        if name == "state":
            return [self._state_rows(number, *one)[None] for one in self.state.items()]
        return self._rows(name, number)

    def _first_page(self, name: str, number: int) -> int:
        """Return the first page that is sent for the request: with a window, the first page in
        it."""
        if name == "window":
            return model.window_start(self.case, number)
        return model.draft_start(self.case, number) if name == "draft" else 0

    def _aux_sender(self, number: int) -> int:
        """Return the prefill rank that sends the request's metadata row, which is
        target_tp_ranks[0] in SGLang."""
        case = self.case
        tp = case.prefill_tp
        rank = (
            self.attn_rank * (tp // case.decode_tp)
            if tp >= case.decode_tp
            else self.attn_rank // (case.decode_tp // tp)
        )
        stage = case.prefill_pp - 1
        server, dp_rank = case.prefill_of(number), case.turn(number) % case.prefill_dp
        return ((server * case.prefill_pp + stage) * case.prefill_dp + dp_rank) * tp + rank

    def _differ(self, what: str, want: np.ndarray, got: np.ndarray, whose: str = "") -> None:
        bad = np.argwhere(want != got)
        if len(bad):
            pages = sorted(set(bad[:, 0].tolist()))
            self.report.wrong.append(
                f"decode rank {self.rank} {what}: {len(bad)} bytes differ, pages {pages[:9]}{whose}"
            )
