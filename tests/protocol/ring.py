"""Real managers, real bootstrap server, real ZMQ and Mooncake TCP: one forked process per rank.

Faults are injected by callables in `Case.extra`: "faults" maps (side, rank) to a function that
gets the Rank in its own process once its manager runs. A rank that ends early takes its server
with it where "restart" names its side: all ranks of the side are killed, as SGLang does, and
started anew with `life` 1, for the rounds from the second on.

SGLang is imported once, in the parent; each rank is a fork of it that publishes its own
ServerArgs and rank numbers, builds SGLang's own KV pools and KV args, and drives the
classes that get_kv_class hands out, as SGLang's schedulers do.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import multiprocessing as mp
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from protocol import model
from protocol.model import Cache, Case

from sglang_mixkv.prefill import packing as packed

LIMIT_S = 60
RESTART_S = 4  # a server that is started anew is away for longer than a heartbeat
# As MetadataBuffers lays them out: six rows, the drafter's three, the room.
AUX_LENS = (32, 8, 8, 8, 8, 8, 8, 16, 24, 16)
DRAFT_AUX = (6, 7, 8)


@dataclass
class RankReport:
    """What one rank says at the end. `wrong`: byte differences, in words. `seconds`: for each
    status, from the fault (if one struck while the request was open), else its start."""

    side: str
    rank: int
    status: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    stats: dict[str, int] = field(default_factory=dict)
    error: str = ""


@dataclass
class Outcome:
    prefill: list[RankReport]
    decode: list[RankReport]

    @property
    def wrong(self) -> list[str]:
        return [w for r in self.prefill + self.decode for w in (*r.wrong, r.error) if w]

    @property
    def statuses(self) -> set[str]:
        return {s for r in self.prefill + self.decode for s in r.status}

    @property
    def reasons(self) -> str:
        return "\n".join(reason for r in self.prefill + self.decode for reason in r.reasons)

    def total(self, key: str) -> int:
        return sum(r.stats.get(key, 0) for r in self.prefill + self.decode)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------- one rank, in its own process


class Rank:
    """One rank's pools, KV args and manager."""

    def __init__(self, case: Case, side: str, rank: int, ports: list[int], life: int = 0) -> None:
        self.case, self.side, self.rank, self.ports, self.life = case, side, rank, ports, life
        self.tp = case.prefill_tp if side == "prefill" else case.decode_tp
        self.dp_size = case.prefill_dp if side == "prefill" else case.decode_dp
        self.pp_size = case.prefill_pp if side == "prefill" else 1
        per_stage = self.tp * self.dp_size
        self.server, local = divmod(rank, per_stage * self.pp_size)
        self.stage, tp_rank = divmod(local, per_stage)
        self.dp_rank, self.attn_rank = divmod(tp_rank, self.tp)
        self.report = RankReport(side, rank)
        package = case.extra.get("package", {}).get(side)
        if package is not None:
            take_package(package)
        self._publish(tp_rank)
        self.sglang_pools: dict[str, Any] = {}
        self.pools = self._pools()
        self.state = self._state()
        self.aux = [
            np.random.default_rng([rank, side == "decode", i]).integers(
                0, 256, (len(case.requests) + 1, n), np.uint8
            )
            for i, n in enumerate(self._aux_lens())
        ]

    def _aux_lens(self) -> list[int]:
        """Without speculation the drafter's rows have another length."""
        longer = 0 if self._has_draft() else 8 * bool(self.case.extra.get("cold"))
        return [n + longer * (i in DRAFT_AUX) for i, n in enumerate(AUX_LENS)]

    def _publish(self, tp_rank: int) -> None:
        from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
            init_mooncake_transfer_engine,
        )
        from sglang.srt.runtime_context import get_parallel, publish
        from sglang.srt.server_args import ServerArgs

        from sglang_mixkv.config import ATTRIBUTE, Config

        case = self.case
        args = ServerArgs(
            model_path="dummy",
            tp_size=self.tp * self.dp_size,
            dp_size=self.dp_size,
            enable_dp_attention=self.dp_size > 1,
            pp_size=self.pp_size,
            page_size=case.page_size,
            disaggregation_mode=self.side,
            disaggregation_transfer_backend="mooncake",
            disaggregation_bootstrap_port=self.ports[self.server],
            disaggregation_decode_enable_radix_cache=case.decode_radix and self.side == "decode",
            enable_metrics=case.extra.get("metrics", False),
        )
        enabled = case.prefill_mixkv if self.side == "prefill" else case.decode_mixkv
        setattr(args, ATTRIBUTE, Config(enabled=enabled, **case.extra.get("config", {})))
        if case.extra.get("small_rounds"):  # as chunks of MiB have them
            packed.FIRST_ROUND, packed.MANY_ROUNDS = 64, 1
        publish(args, role="tokenizer")
        get_parallel().override_permanently(
            tp_rank=tp_rank, pp_rank=self.stage, attn_tp_rank=self.attn_rank,
            attn_dp_rank=self.dp_rank, attn_cp_rank=0, moe_ep_rank=0, dp_rank=None,
            pp_group=self._pp_group(),
        )  # fmt: skip
        init_mooncake_transfer_engine(hostname="127.0.0.1")

    def _pp_group(self) -> Any:
        per_stage = self.tp * self.dp_size
        key = self.server * per_stage + self.rank % per_stage
        return self.case.extra.get("pp_groups", {}).get(key)

    def _stage_layers(self) -> range:
        per_stage = self.case.target.layers // self.pp_size
        return range(self.stage * per_stage, (self.stage + 1) * per_stage)

    def _has_draft(self) -> bool:
        wanted = self.case.extra.get("draft_on", {}).get(self.side, True)
        return self.case.draft is not None and wanted and self.stage == self.pp_size - 1

    def _pools(self) -> dict[str, list[np.ndarray]]:
        """Views of SGLang's own pools: canary everywhere, on prefill also every request's rows."""
        caches = {"target": self.case.target, "draft": self.case.draft}
        views = {}
        for name, cache in caches.items():
            if cache is None or (name == "draft" and not self._has_draft()):
                continue
            layers = self._stage_layers() if name == "target" else range(cache.layers)
            pool = model.sglang_pool(
                self.case, cache, self.tp, self.attn_rank, len(layers), layers.start
            )
            if name == "target" and self.case.hybrid:
                pool = model.hybrid_pool(self.case, pool, self.tp, self._stage_layers())
            self.sglang_pools[name] = pool
            whole = getattr(pool, "full_kv_pool", pool)
            views[name] = model.entries_of(self.case, whole, cache, self.tp, self.attn_rank)
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
        """For each request, its pages in the pool of that name."""
        return model.page_tables(self.case, self.side, int(name == "window"))

    def _rows(self, name: str, number: int) -> list[np.ndarray]:
        """What this rank holds of a request once it has all of it, per entry."""
        cache = self._cache(name)
        return model.cut(
            cache, model.whole(self.case, name, cache, number), self.tp, self.attn_rank
        )

    def _on_stage(self, name: str, cache: Cache, rows: list[np.ndarray]) -> list[np.ndarray]:
        """Of the whole model's entries, those of this pipeline stage."""
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
        """Views of a hybrid pool's state: canary, on prefill every request's rows."""
        if not self.case.hybrid:
            return {}
        state = model.state_of(self.case, self.sglang_pools["target"])
        for key, slots in state.items():
            slots[:] = model.canary([self.rank, self.side == "decode", *key], slots.shape)
        if self.side == "prefill":
            self._write_state(state, {n: n for n in range(len(self.case.requests))})
        return state

    def _write_state(self, state: dict[tuple[int, int], np.ndarray], slots: dict[int, int]) -> None:
        """Write the truth of requests into their slots."""
        for key, rows in state.items():
            for number, slot in slots.items():
                rows[slot] = model.state_rows(
                    self.case, number, key, rows.shape[2], self.tp, self.attn_rank
                )

    def kv_args(self) -> Any:
        """KV args as SGLang's _init_kv_manager fills them from its pools."""
        from sglang.srt.disaggregation import utils
        from sglang.srt.disaggregation.base.conn import KVArgs

        case = self.case
        args = KVArgs()
        infos = [p.get_contiguous_buf_infos() for p in self.sglang_pools.values()]
        args.engine_rank = (
            self.dp_rank * self.tp + self.attn_rank if self.side == "prefill" else self.attn_rank
        )
        args.kv_data_ptrs = [p for ptrs, _, _ in infos for p in ptrs]
        args.kv_data_lens = [n for _, lens, _ in infos for n in lens]
        args.kv_item_lens = [n for _, _, items in infos for n in items]
        args.num_draft_entries = len(self.pools.get("draft", ()))
        args.kv_cache_dtype_str = case.extra.get(f"{self.side}_dtype", "bf16")
        args.aux_data_ptrs = [a.ctypes.data for a in self.aux]
        args.aux_data_lens = [a.nbytes for a in self.aux]
        args.aux_item_lens = [a[0].nbytes for a in self.aux]
        target, draft = (self.sglang_pools.get(name) for name in ("target", "draft"))
        args.kv_layer_ids = utils.build_kv_layer_ids(
            token_to_kv_pool=target, draft_token_to_kv_pool=draft,
            num_draft_entries=args.num_draft_entries, num_hidden_layers=100,
        )  # fmt: skip
        # SGLang's own, without the plugin's hook, which would read the models' configurations.
        inspect.unwrap(utils.setup_state_kv_args)(args, target, draft, 100)
        args.ib_device, args.gpu_id = "", 0
        args.page_size = case.page_size
        args.system_dp_rank = 0
        args.pp_rank = self.stage
        args.prefill_start_layer = self._stage_layers().start
        args.prefill_end_layer = self._stage_layers().stop
        if not case.target.is_mla:
            args.kv_head_num = self.pools["target"][0].shape[2]
            args.total_kv_head_num = case.target.heads
        if self._has_draft():
            self._describe_draft(args)
        return args

    def _describe_draft(self, args: Any) -> None:
        draft = self.case.draft
        assert draft is not None
        args.is_draft_mla_backend = draft.is_mla
        args.draft_window = self.case.draft_window
        if not draft.is_mla:
            args.draft_kv_head_num = self.pools["draft"][0].shape[2]
            args.draft_total_kv_head_num = draft.heads

    def start_manager(self) -> None:
        from sglang.srt.disaggregation.utils import (
            DisaggregationMode,
            KVClassType,
            TransferBackend,
            get_kv_class,
        )
        from sglang.srt.runtime_context import get_server_args

        def kv_class(kind: KVClassType) -> Any:
            return get_kv_class(TransferBackend.MOONCAKE, kind)

        if self.side in self.case.extra.get("package", {}):
            self.kv_class = importlib.import_module("sglang_mixkv.managers").CLASSES
        else:
            self.kv_class = {k.value: kv_class(k) for k in KVClassType}
        up, port = self.case.extra["bootstrap_up"], self.ports[self.server]
        if self.side == "prefill" and self.stage == self.dp_rank == self.attn_rank == 0:
            self.bootstrap = self.kv_class["bootstrap_server"]("127.0.0.1", port)
            wait_for_port(port)
            up[self.server].set()
        for one in up if self.side == "decode" else up[self.server : self.server + 1]:
            one.wait(LIMIT_S)
        self.case.extra.get("before", {}).get((self.side, self.rank), lambda _: None)(self)
        other_facts = self.case.extra.get("facts", {}).get(self.side)
        if other_facts is not None:
            tell_other_facts(other_facts)
        self.manager = self.kv_class["manager"](
            self.kv_args(),
            DisaggregationMode(self.side),
            get_server_args(),
            self.case.target.is_mla and not self.case.hybrid,
        )
        self.releases = Releases()
        self.published: list[Any] = []  # receivers whose metadata went out

    @property
    def plugin(self) -> Any:
        """The plugin's side of this rank; None where SGLang runs alone."""
        return getattr(self.manager, "side", None)

    def on_transfer(self, change: Callable[[Callable[..., int]], Callable[..., int]]) -> None:
        """Put `change(real)` in the place of the call that each write of this rank waits for:
        (session, source addresses, destinations, lengths) -> code."""
        transport = self.plugin.transport
        transport.transfer = change(transport.transfer)

    # -- requests

    def rooms(self) -> list[int]:
        return self.case.extra.get("rooms") or [100 + i for i in range(len(self.case.requests))]

    def mine(self, number: int) -> bool:
        """Whether this rank takes part in the request."""
        if self.side == "prefill" and self.case.prefill_of(number) != self.server:
            return False
        return self.case.turn(number) % self.dp_size == self.dp_rank

    def address(self, number: int) -> str:
        """The bootstrap server of the request's prefill server."""
        return f"127.0.0.1:{self.ports[self.case.prefill_of(number)]}"

    def numbers(self) -> list[int]:
        """This rank's requests, in the order in which they are concluded."""
        return [n for group in self.rounds() for n in group if self.mine(n)]

    def rounds(self) -> tuple[tuple[int, ...], ...]:
        """A restarted rank knows nothing of the first round."""
        return self.case.all_rounds()[self.life :]

    def strike(self) -> None:
        """The fault happens now."""
        self.case.extra["struck"].value = time.monotonic()

    def conclude(self, handle: Any, began: float) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        deadline = time.monotonic() + LIMIT_S / 2
        status = handle.poll()
        while status not in (KVPoll.Success, KVPoll.Failed) and time.monotonic() < deadline:
            time.sleep(0.001)
            self.releases.resolve()
            status = handle.poll()
        self.report.seconds.append(time.monotonic() - max(began, self.case.extra["struck"].value))
        names = {KVPoll.Success: "success", KVPoll.Failed: "failed"}
        self.report.status.append(names.get(status, f"stuck in {status}"))
        if status == KVPoll.Failed:
            self.report.reasons.append(f"{self.side} {self.rank}: {reason_of(handle)}")
            if handle in self.published:
                self.releases.hold(handle)
        else:
            handle.clear()

    def run_prefill(self) -> None:
        tables = model.page_tables(self.case, "prefill")
        for group in self.rounds():
            began, numbers = time.monotonic(), [n for n in group if self.mine(n)]
            senders = {n: self._sender(n, tables) for n in numbers}
            self._send_all(senders, {n: self._chunks(n, tables) for n in numbers})
            for sender in senders.values():
                self.conclude(sender, began)
            time.sleep(self.case.extra.get("pause", 0))
            self._lockstep()

    def _lockstep(self) -> None:
        """Wait for all ranks of both sides, where a case asks for it: SGLang's ranks are in
        lockstep, so a request does not start on one while another still concludes the last."""
        if self.case.extra.get("lockstep"):
            self.case.extra["ranks"].wait(LIMIT_S)

    def _sender(self, number: int, tables: list[np.ndarray]) -> Any:
        sender = self.kv_class["sender"](
            self.manager, self.address(number), self.rooms()[number],
            req_has_disagg_prefill_dp_rank=True,
        )  # fmt: skip
        sender.init(len(tables[number]), number)
        return sender

    def _send_all(self, senders: dict[int, Any], pending: dict[int, list[np.ndarray]]) -> None:
        """Send the chunks of several requests in turns, as a scheduler interleaves them."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        deadline = time.monotonic() + LIMIT_S / 2
        while any(pending.values()) and time.monotonic() < deadline:
            for number, chunks in pending.items():
                status = senders[number].poll()
                if status == KVPoll.Failed:
                    chunks.clear()
                elif chunks and status >= KVPoll.WaitingForInput:
                    chunk = chunks.pop(0)
                    state = None if chunks else self.state_indices(number)
                    hand_over = self.case.extra.get("send", send)
                    if hand_over(self, senders[number], chunk, state) is NOT_YET:
                        chunks.insert(0, chunk)
            time.sleep(0.0005)

    def state_indices(self, number: int) -> list[np.ndarray] | None:
        """What names a request's state on this side, kind by kind: pages of its window, a slot,
        pages of its index keys."""
        found = []
        if self.case.target_window:
            found.append(self._tables("window")[number][model.window_start(self.case, number) :])
        if self.case.hybrid:
            found.append(np.array([number + (self.side == "decode")], np.int32))
        if self.case.target.index_k:
            found.append(self._tables("target")[number])
        return found or None

    def _chunks(self, number: int, tables: list[np.ndarray]) -> list[np.ndarray]:
        pages = tables[number]
        step = self.case.requests[number].chunk_pages or len(pages)
        return [pages[i : i + step] for i in range(0, len(pages), step)]

    def run_decode(self) -> None:
        case = self.case
        before = {name: [e.copy() for e in pool] for name, pool in self.pools.items()}
        aux_before = [a.copy() for a in self.aux]
        state_before = {key: slots.copy() for key, slots in self.state.items()}
        tables = model.page_tables(case, "decode")
        for group in self.rounds():
            began = time.monotonic()
            receivers = {n: self._receiver(n) for n in group if self.mine(n)}
            for number, receiver in receivers.items():
                if receiver.conclude_state is None:
                    prefix = case.requests[number].prefix_pages * case.page_size
                    self.published.append(receiver)
                    state = self.state_indices(number)
                    receiver.send_metadata(
                        tables[number], number + 1, state, decode_prefix_len=prefix
                    )
            for receiver in receivers.values():
                self.conclude(receiver, began)
            self.releases.wait(self.case.extra.get("pause", 0))
            self._lockstep()
        self.releases.wait()
        self.case.extra["all_sent"].wait(LIMIT_S)
        done = [
            n for n, s in zip(self.numbers(), self.report.status, strict=True) if s == "success"
        ]
        self._excuse_failed(before, aux_before, done)
        self.compare(before, aux_before, done)
        self._check_shared_prefixes(tables, done)
        self._write_state(state_before, {number: number + 1 for number in done})
        for key, want in state_before.items():
            for number in set(self.numbers()) - set(done):  # a failed request's slot
                want[number + 1] = self.state[key][number + 1]
            self._differ(f"state {key}", want, self.state[key])

    def _excuse_failed(
        self, before: dict[str, list[np.ndarray]], aux_before: list[np.ndarray], done: list[int]
    ) -> None:
        """Pages and aux rows of failed requests may hold anything; all others may not."""
        if self.case.extra.get("failed_rooms_stay_clean"):
            return
        for number in set(self.numbers()) - set(done):
            for name, pool in before.items():
                pages = self._tables(name)[number]
                for want, got in zip(pool, self.pools[name], strict=True):
                    want[pages] = got[pages]
            for want, got in zip(aux_before, self.aux, strict=True):
                want[number + 1] = got[number + 1]

    def _receiver(self, number: int) -> Any:
        address = self.address(number)
        deadline = time.monotonic() + LIMIT_S / 2
        while not self.manager.try_ensure_parallel_info(address):
            if time.monotonic() > deadline:
                raise TimeoutError("prefill facts never came")
            time.sleep(0.02)
        receiver = self.kv_class["receiver"](self.manager, address, self.rooms()[number])
        receiver.init(self.case.turn(number) % self.case.prefill_dp)
        return receiver

    def compare(
        self, before: dict[str, list[np.ndarray]], aux_before: list[np.ndarray], done: list[int]
    ) -> None:
        """Every byte of every buffer: done requests hold the truth, all else its canary."""
        for name, pool in before.items():
            for number in done:
                cold = name == "draft" and self.case.extra.get("cold")
                pages, first = self._tables(name)[number], self._first_page(name, number)
                for entry, row in zip(pool, self._rows(name, number), strict=True):
                    entry[pages[first:]] = 0 if cold else row[first:]
            for index, (want, got) in enumerate(zip(pool, self.pools[name], strict=True)):
                self._differ(f"{name} entry {index}", want, got)
        one_sender = self.case.draft is not None and self.case.prefill_mixkv
        several_senders = not one_sender and (
            not self.case.target.is_mla or self.case.hybrid or self.case.prefill_pp > 1
        )
        for index, (want, got) in enumerate(zip(aux_before, self.aux, strict=True)):
            if several_senders:  # stock: each of them writes the row, one after the other
                break
            for number in done:
                if self.case.extra.get("cold") and index in DRAFT_AUX:
                    want[number + 1] = 0 if self._has_draft() else want[number + 1]
                    continue
                sender = self._aux_sender(number)
                want[number + 1] = np.random.default_rng([sender, False, index]).integers(
                    0, 256, (len(self.case.requests) + 1, AUX_LENS[index]), np.uint8
                )[number]
            self._differ(f"aux {index}", want, got)

    def _first_page(self, name: str, number: int) -> int:
        """The request's first page that is sent: with a window those in its reach, but all of
        the drafter where the decode side's radix cache is on."""
        if name == "window":
            return model.window_start(self.case, number)
        if name != "draft" or self.case.decode_radix:
            return 0
        return self._draft_reach(self.case.pages(self.case.requests[number]))

    def _check_shared_prefixes(self, tables: list[np.ndarray], done: list[int]) -> None:
        """What the drafter reads of a prefix that another request left is that one's truth."""
        for number in done:
            request = self.case.requests[number]
            if request.prefix_of is None:
                continue
            pages = [tables[request.prefix_of][: request.prefix_pages], tables[number]]
            reach = self._draft_reach(sum(map(len, pages)))
            rows = [self._rows("draft", n) for n in (request.prefix_of, number)]
            for index, (theirs, own) in enumerate(zip(*rows, strict=True)):
                want = np.concatenate([theirs[: request.prefix_pages], own])
                got = self.pools["draft"][index][np.concatenate(pages)]
                self._differ(f"request {number} draft entry {index}", want[reach:], got[reach:])

    def _draft_reach(self, total: int) -> int:
        """Pages before this one are outside the drafter's window, with SGLang's own tokens
        before the window's edge added."""
        if not self.case.draft_window:
            return 0
        oldest_read = (total - 1) * self.case.page_size + 1 - self.case.draft_window - 2
        return max(0, oldest_read // self.case.page_size)

    def _aux_sender(self, number: int) -> int:
        """The prefill process whose aux rows this rank must get: stock's target_tp_ranks[0]."""
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

    def _differ(self, what: str, want: np.ndarray, got: np.ndarray) -> None:
        bad = np.argwhere(want != got)
        if len(bad):
            pages = sorted(set(bad[:, 0].tolist()))
            self.report.wrong.append(
                f"decode rank {self.rank} {what}: {len(bad)} bytes differ, pages {pages[:9]}"
            )


def take_package(folder: Path) -> None:
    """From now on the plugin is the one in this folder, a version of it, in this process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang_mixkv"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))


def stock_class(rank: Rank, kind: str) -> Any:
    """SGLang's class of a backend that one of the plugin's is made of."""
    return next(c for c in rank.kv_class[kind].__mro__ if c.__module__.startswith("sglang."))


NOT_YET = object()


def send(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> Any:
    """Hand one chunk to a sender, as SGLang's scheduler does; NOT_YET: offer it again."""
    sender.send(chunk, state)


def reason_of(handle: Any) -> str:
    """Why a sender or receiver failed; ends it, as SGLang's schedulers do."""
    try:
        handle.failure_exception()
    except Exception as error:
        return str(error)
    return ""


class Releases:
    """What failed requests of a decode rank hold until no write to it can be in flight.

    SGLang's own deferred release decides: DecodeTransferQueue._defer_release and
    resolve_deferred_releases (disaggregation/decode.py), here without a scheduler around them.
    """

    def __init__(self) -> None:
        from sglang.srt.disaggregation import decode
        from sglang.srt.environ import envs

        decode.all_reduce_flags = lambda flags, **_: flags  # each rank here decides for itself
        queue = decode.DecodeTransferQueue.__new__(decode.DecodeTransferQueue)
        queue._deferred_releases = []
        queue.deferred_kv_release_timeout = (
            envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get()
        )
        queue.enable_staging, queue.gloo_group = False, None
        queue._is_host_destination = lambda _: False
        queue._release_request = lambda request: request.free()
        queue._observe_deferred_kv_release = lambda *_, **__: None
        queue.metadata_buffers = SimpleNamespace(clear_slot=lambda _: None)
        queue.req_to_metadata_buffer_idx_allocator = SimpleNamespace(free=lambda _: None)
        self.queue = queue

    def __len__(self) -> int:
        return int(self.queue.num_pending_deferred_releases())

    def hold(self, receiver: Any, free: Callable[[], None] = lambda: None) -> None:
        """As pop_transferred does with a failed request. `free`: its pages may be used again."""
        if not receiver.abort_notified:
            receiver.ensure_abort_notified(force_arm=True)
        req = SimpleNamespace(bootstrap_room=receiver.bootstrap_room)
        self.queue._defer_release(
            SimpleNamespace(req=req, kv_receiver=receiver, metadata_buffer_index=0, free=free)
        )

    def resolve(self) -> None:
        """Release what is drained or overdue."""
        self.queue.resolve_deferred_releases()

    def wait(self, seconds: float | None = None) -> None:
        """Until all is released; with `seconds`, so long in any case."""
        end = time.monotonic() + (seconds or 0)
        while time.monotonic() < end or (seconds is None and len(self)):
            self.resolve()
            time.sleep(0.005)


class Stages:
    """What PPConsensusStore needs of SGLang's PP group: one broadcast from stage 0."""

    def __init__(self, queue: Any, size: int) -> None:
        self._queue, self._size = queue, size

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        if value is None:
            return self._queue.get(timeout=LIMIT_S)
        for _ in range(self._size - 1):
            self._queue.put(value)
        return value


def tell_other_facts(change: Any) -> None:
    """Managers of this process announce, and compare with, changed facts."""
    from sglang_mixkv.engine import sides

    real = sides.local_facts

    class Holder:
        facts: Any = None

    def facts(*args: Any) -> Any:
        holder = Holder()
        holder.facts = real(*args)
        change(holder)
        return holder.facts

    sides.local_facts = facts


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
            return
        time.sleep(0.01)
    raise TimeoutError(f"nothing listens on {port}")


def _rank_main(
    case: Case, side: str, rank: int, ports: list[int], pipe: Any, go: Any, life: int
) -> None:
    report = RankReport(side, rank)
    try:
        one = Rank(case, side, rank, ports, life)
        report = one.report
        one.start_manager()
        if not life:
            case.extra.get("faults", {}).get((side, rank), lambda _: None)(one)
        one.run_prefill() if side == "prefill" else one.run_decode()
        report.stats = one.plugin.stats.snapshot() if one.plugin is not None else {}
        report.wrong += left_behind(one.manager)
    except BaseException:
        report.error = traceback.format_exc()
    pipe.send(report)
    go.wait(LIMIT_S)
    os._exit(0)


def left_behind(manager: Any, seconds: float = 2) -> list[str]:
    """What an idle manager should not have, once its workers have had time to tidy up."""
    check = getattr(manager, "check_integrity", None)
    if check is None:
        return [f"thread {t.name} has ended" for t in manager._worker_threads if not t.is_alive()]
    deadline = time.monotonic() + seconds
    while (found := check()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [f"left behind: {line}" for line in found]


# ---------------------------------------------------------------- the parent


def run(case: Case) -> Outcome:
    """Run one case; every rank's process has ended when this returns."""
    context = mp.get_context("fork")
    ports = [free_port() for _ in range(case.prefills)]
    case.extra.update(
        bootstrap_up=[context.Event() for _ in ports],
        all_sent=context.Event(),
        ranks=context.Barrier(
            case.prefills * case.prefill_tp * case.prefill_dp * case.prefill_pp
            + case.decode_tp * case.decode_dp
        ),
        struck=context.Value("d", 0.0),
        pp_groups={
            i: Stages(context.Queue(), case.prefill_pp)
            for i in range(case.prefills * case.prefill_tp * case.prefill_dp)
        },
    )
    servers = Servers(case, context, ports)
    try:
        reports = servers.reports()
    finally:
        servers.end()
    return Outcome(
        [report for (side, _), report in reports.items() if side == "prefill"],
        [report for (side, _), report in reports.items() if side == "decode"],
    )


Key = tuple[str, int]


class Servers:
    """All ranks of a case: their processes, and the pipes on which they report."""

    def __init__(
        self, case: Case, context: Any, ports: list[int], main: Callable[..., None] = _rank_main
    ) -> None:
        self._case, self._context, self._main = case, context, main
        self._ports, self._go = ports, context.Event()
        prefill = case.prefills * case.prefill_tp * case.prefill_dp * case.prefill_pp
        self._keys: list[Key] = [
            *(("prefill", r) for r in range(prefill)),
            *(("decode", r) for r in range(case.decode_tp * case.decode_dp)),
        ]
        self._processes: dict[Key, Any] = {}
        self._pipes: dict[Key, Any] = {}
        for key in self._keys:
            self._start(key, 0)

    def _start(self, key: Key, life: int) -> None:
        here, there = self._context.Pipe()
        arguments = (self._case, *key, self._ports, there, self._go, life)
        self._processes[key] = self._context.Process(target=self._main, args=arguments)
        self._processes[key].start()
        there.close()
        self._pipes[key] = here

    def reports(self, limit_s: float = LIMIT_S) -> dict[Key, RankReport]:
        """All reports. Decode ranks compare only after every prefill rank has reported."""
        found: dict[Key, RankReport] = {}
        restart = {self._case.extra.get("restart")}
        while len(found) < len(self._keys):
            if all(key in found for key in self._keys if key[0] == "prefill"):
                self._case.extra["all_sent"].set()
            waiting = {self._pipes[key]: key for key in self._keys if key not in found}
            ready = wait(list(waiting), limit_s)
            for pipe in ready or waiting:
                key = waiting[pipe]
                if self._pipes[key] is not pipe:
                    continue  # restarted meanwhile
                report = self._take(key) if ready else None
                if report is None and ready and key[0] in restart:
                    restart.remove(key[0])
                    self._restart(key[0])
                    continue
                found[key] = report or RankReport(*key, error=f"{key} did not report")
        return {key: found[key] for key in self._keys}

    def _take(self, key: Key) -> RankReport | None:
        """A rank's report; None when it ended without one."""
        try:
            return self._pipes[key].recv()
        except EOFError:
            return None

    def _restart(self, side: str) -> None:
        """A server of which one process ends is ended by SGLang; an operator starts it anew."""
        keys = [key for key in self._keys if key[0] == side]
        for key in keys:
            self._processes[key].kill()
            self._processes[key].join()
        if side == "prefill":
            for up in self._case.extra["bootstrap_up"]:
                up.clear()
        time.sleep(RESTART_S)
        for key in keys:
            self._start(key, 1)

    def end(self) -> None:
        self._go.set()
        for process in self._processes.values():
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
