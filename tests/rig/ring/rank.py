"""A rank in its own process: its memory, KV args and manager, called as by SGLang's scheduler."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from rig.channel.invariants import left_by
from rig.process.forks import STRETCH
from rig.process.watched_server import tables
from rig.ring import model
from rig.ring.memory import Ended, Memory
from rig.ring.model import Case
from rig.ring.releases import Releases

from mixkv_demo.series import totals

LIMIT_S = 60 * STRETCH
"""Time limit for waiting for another rank. The requests of a round must end within half of it."""
GPU = {"prefill": 3, "decode": 1}
PAUSE_S = {"prefill": 5e-4, "decode": 1e-3}


@dataclass
class OpenRequest:
    """A request in flight on a rank, with SGLang's sender or receiver. `chunks`: not sent yet by
    prefill. `published`: whether decode has sent its metadata."""

    handle: Any
    chunks: list[np.ndarray] = field(default_factory=list)
    published: bool = False
    since: float = field(default_factory=time.monotonic)

    @property
    def age(self) -> float:
        return time.monotonic() - self.since


class Rank(Memory):
    """A rank's memory and manager. `host`: the rank's address. `server_host`: rank 0's address."""

    host = server_host = "127.0.0.1"
    slack_s = 2.0 * STRETCH
    """Time limit within which an idle manager's workers must clean up."""

    def __init__(self, case: Case, side: str, rank: int, ports: list[int], life: int = 0) -> None:
        super().__init__(case, side, rank)
        if side in case.special.hosts:
            self.host = self.server_host = os.environ["SGLANG_HOST_IP"] = case.special.hosts[side]
        self.ports = ports
        self.open: dict[int, OpenRequest] = {}
        self._publish(self.tp_rank)
        self.allocate()

    def _publish(self, tp_rank: int) -> None:
        from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
        from sglang.srt.server_args import ServerArgs

        from sglang_mixkv.config import ATTRIBUTE, resolve

        case = self.case
        args = ServerArgs(
            model_path="dummy",
            host=self.server_host,
            tp_size=self.tp * self.dp_size,
            dp_size=self.dp_size,
            enable_dp_attention=self.dp_size > 1,
            pp_size=self.pp_size,
            page_size=case.page_size,
            dcp_size=self.dcp,
            disaggregation_mode=self.side,
            disaggregation_transfer_backend=case.backend,
            disaggregation_ib_device=case.special.ib_devices.get(self.side),
            device="cpu",
            disaggregation_bootstrap_port=self.ports[self.server],
            enable_metrics=case.special.metrics,
            speculative_algorithm=case.algorithm if self._speculates() else None,
        )
        enabled = case.prefill_mixkv if self.side == "prefill" else case.decode_mixkv
        enabled = enabled and (self.side, self.rank) not in case.special.stock_ranks
        config = self.settings(msgspec.structs.replace(resolve(None), enabled=enabled))
        setattr(args, ATTRIBUTE, config)
        world_rank = self.stage * self.tp * self.dp_size + tp_rank
        publish(args, role="tokenizer", ranks=SpawnRanks(world_rank, gpu_id=GPU[self.side]))
        get_parallel().override_permanently(
            tp_rank=tp_rank, pp_rank=self.stage, attn_tp_rank=self.attn_rank,
            attn_dp_rank=self.dp_rank, attn_cp_rank=0, moe_ep_rank=0, dp_rank=None,
            pp_group=self._pp_group(), dcp_rank=self.dcp_rank, attn_dcp_rank=self.dcp_rank,
        )  # fmt: skip
        if case.backend == "mooncake":
            start_mooncake(self.host, args.disaggregation_ib_device)

    def settings(self, config: Any) -> Any:
        """Return settings that differ from the other side's. The seed determines which side has the
        larger values."""
        larger = (self.case.seed + (self.side == "prefill")) % 2
        return msgspec.structs.replace(
            config, staging_mb=max(1, config.staging_mb // (2 - larger)),
            patience=config.patience * (10 + larger) / 10,
        )  # fmt: skip

    def _pp_group(self) -> Any:
        per_stage = self.tp * self.dp_size
        key = self.server * per_stage + self.rank % per_stage
        return self.case.shared.pp_groups.get(key)

    def _queue(self) -> SimpleNamespace:
        """Make a stand-in for SGLang's queue with the attributes that `_init_kv_manager` reads."""
        from sglang.srt.disaggregation.utils import TransferBackend
        from sglang.srt.runtime_context import get_server_args

        case, target = self.case, self.sglang_pools["target"]
        stages = self._stage_layers()
        target.start_layer = stages.start * (2 if case.hybrid else 1)  # as linear layers count
        target.end_layer = stages.stop
        is_hidden = self.draft_args() == "hidden"
        aux = [(rows.ctypes.data, rows.nbytes, rows[0].nbytes) for rows in self.aux]
        config = SimpleNamespace(
            num_hidden_layers=100, get_total_num_kv_heads=lambda: case.target.heads,
            hf_text_config=SimpleNamespace(full_attention_layer_ids=[*range(1, 100, 2)]),
        )  # fmt: skip
        runner = SimpleNamespace(kv_cache_dtype_str="bf16")
        scheduler = SimpleNamespace(
            rust_server=None, enable_hisparse=False, server_args=get_server_args(),
            model_config=config, tp_worker=SimpleNamespace(model_runner=runner),
        )  # fmt: skip
        return SimpleNamespace(
            transfer_backend=TransferBackend(case.backend), tp_rank=self.tp_rank,
            pp_rank=self.stage, token_to_kv_pool=target, scheduler=scheduler,
            draft_token_to_kv_pool=None if is_hidden else self.sglang_pools.get("draft"),
            is_mla_backend=case.target.is_mla and not case.hybrid, enable_staging=False,
            metadata_buffers=SimpleNamespace(
                get_buf_infos=lambda: [[*column] for column in zip(*aux, strict=True)]
            ),
        )  # fmt: skip

    def start_manager(self) -> None:
        """Let SGLang's queue make the manager, within the plugin's hook. The case determines the
        drafter's configuration and window."""
        from sglang.srt.disaggregation.decode import DecodePreallocQueue
        from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
        from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

        from sglang_mixkv.engine import draft_pool

        def kv_class(kind: KVClassType) -> Any:
            return get_kv_class(TransferBackend(self.case.backend), kind)

        self.kv_class = {k.value: kv_class(k) for k in KVClassType}
        up, port = self.case.shared.bootstrap_up, self.ports[self.server]
        if self.side == "prefill" and self.stage == self.dp_rank == self.attn_rank == 0:
            self.bootstrap = self.kv_class["bootstrap_server"](self.host, port)
            wait_for_port(port, self.host)
            up[self.server].set()
        for one in up if self.side == "decode" else up[self.server : self.server + 1]:
            one.wait(LIMIT_S)
        self.case.special.before.get((self.side, self.rank), lambda _: None)(self)
        draft, window = self.case.draft, self.case.draft_window or None
        draft_pool.model_config = lambda: SimpleNamespace(  # type: ignore[assignment, return-value]
            hf_config=SimpleNamespace(architectures=["Ring"]),
            get_total_num_kv_heads=lambda: draft.heads,
        )
        draft_pool.window_of = lambda *_: window
        queue: Any = {"prefill": PrefillBootstrapQueue, "decode": DecodePreallocQueue}[self.side]
        self.manager = queue._init_kv_manager(self._queue())
        self.releases = Releases()

    @property
    def plugin(self) -> Any:
        """Return the plugin's reporter on this rank, or None without the plugin."""
        local = getattr(self.manager, "local", None)
        return local.reporter if local is not None else None

    def counted(self) -> Counter[tuple[str, ...]]:
        """Return the plugin's metrics in this process; none without the plugin."""
        from prometheus_client import REGISTRY, generate_latest

        if self.plugin is None:
            return Counter()
        with self.plugin._counting:
            self.plugin._count_rooms()
            self.plugin._sample()
        return totals(generate_latest(REGISTRY).decode(), without="prefill")

    # -- requests

    def rooms(self) -> list[int]:
        return [*self.case.special.rooms] or [100 + i for i in range(len(self.case.requests))]

    def address(self, number: int) -> str:
        """Return the bootstrap address of the request's prefill server."""
        host = self.case.special.hosts.get("prefill", Rank.host)
        return f"{host}:{self.ports[self.case.prefill_of(number)]}"

    def run(self) -> None:
        """Run all requests, round by round, after every rank has injected its fault. On decode,
        compare every byte."""
        if faults := self.case.special.faults:
            faults.get((self.side, self.rank), lambda _: None)(self)
            self.case.shared.injected.wait(LIMIT_S / 2)
        if self.side == "decode":
            self.watch()
        for group in self.case.all_rounds():
            for number in filter(self.mine, group):
                self.begin(number)
            while self.open:
                self.step(LIMIT_S / 2)
                time.sleep(PAUSE_S[self.side])
            self.releases.wait(self.case.special.pause)
        if self.side == "decode":
            self.releases.wait()
            self.case.shared.all_sent.wait(LIMIT_S)
            self.compare()

    def begin(self, number: int) -> None:
        if self.side == "prefill":
            sender = self._sender(number, self._tables("target"))
            self.open[number] = OpenRequest(sender, self._chunks(number))
            return
        receiver = self._receiver(number, time.monotonic() + LIMIT_S / 2)
        one = self.open[number] = OpenRequest(receiver)
        if receiver.conclude_state is None:
            one.published = True
            prefix = self.case.requests[number].prefix_pages * self.case.page_size * self.dcp
            receiver.send_metadata(
                self._pages(number), number + 1, self.state_indices(number),
                decode_prefix_len=prefix,
            )  # fmt: skip

    def is_known(self, number: int) -> bool:
        """Return whether decode has a request's prefill server's facts. If it does not, call this
        again later."""
        return bool(self.manager.try_ensure_parallel_info(self.address(number)))

    def _receiver(self, number: int, deadline: float) -> Any:
        while not self.is_known(number):
            if time.monotonic() > deadline:
                raise TimeoutError("prefill's facts did not arrive")
            time.sleep(0.02)
        address = self.address(number)
        receiver = self.kv_class["receiver"](self.manager, address, self.rooms()[number])
        receiver.init(self.case.turn(number) % self.case.prefill_dp)
        return receiver

    def step(self, limit_s: float) -> None:
        """Poll all requests once, as SGLang's scheduler does. A request that takes longer than
        `limit_s` ends as stuck."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        names = {KVPoll.Success: "success", KVPoll.Failed: "failed"}
        for number, one in list(self.open.items()):
            status = one.handle.poll()
            if status in names or one.age > limit_s:
                del self.open[number]
                self._conclude(number, one, names.get(status, f"stuck in {status}"))
            elif one.chunks and status >= KVPoll.WaitingForInput:
                if not one.handle.curr_idx:  # as SGLang's scheduler does before the first chunk
                    one.handle.pop_decode_prefix_len()
                chunk = one.chunks.pop(0)
                state = None if one.chunks else self.state_indices(number)
                (self.case.special.send or send)(self, one.handle, chunk, state)
        self.releases.resolve()

    def _conclude(self, number: int, one: OpenRequest, status: str) -> None:
        seconds, handle = one.age, getattr(one.handle, "handle", None)
        state, reason = str(getattr(handle, "state", "") or ""), getattr(handle, "reason", "")
        if status == "failed":
            reason = reason_of(one.handle)
            self.report.reasons.append(f"{self.side} {self.rank}: {reason}")
            if one.published:  # prefill may still write to its pages
                self.releases.hold(one.handle)
        else:
            if (self.side, status) == ("decode", "success"):
                self.expect(number, state == "cold")
            one.handle.clear()
        self.report.ended.append(Ended(number, one.since, seconds, status, state, reason))

    def _sender(self, number: int, tables: list[np.ndarray]) -> Any:
        kind = self.kv_class["sender"]
        up_to_0_5_21 = {"dest_tp_ranks": [self.rank], "pp_rank": self.stage}
        takes = inspect.signature(stock_class(self, "sender")).parameters
        sender = kind(
            self.manager, self.address(number), self.rooms()[number],
            req_has_disagg_prefill_dp_rank=True,
            **{n: v for n, v in up_to_0_5_21.items() if n in takes},
        )  # fmt: skip
        surplus = model.surplus_pages(self.case, self.side, number)
        sender.init(len(tables[number]) + len(surplus), number)
        sender.ring_number = number
        return sender

    def _pages(self, number: int) -> np.ndarray:
        surplus = model.surplus_pages(self.case, self.side, number)
        return np.concatenate([self._tables("target")[number], surplus])

    def _chunks(self, number: int) -> list[np.ndarray]:
        pages = self._pages(number)
        step = self.case.requests[number].chunk_pages or len(pages) or 1
        return [pages[i : i + step] for i in range(0, len(pages), step)] or [pages]

    def state_indices(self, number: int) -> list[np.ndarray] | None:
        """Return the indices of a request's state on this side, one array per kind: pages of its
        window, its slot, pages of its index keys."""
        found = []
        if self.case.target_window:
            found.append(self._tables("window")[number][model.window_start(self.case, number) :])
        if self.case.hybrid:
            found.append(np.array([number + (self.side == "decode")], np.int32))
        if self.case.target.index_k:
            found.append(self._tables("target")[number])
        return found or None

    def left_behind(self) -> list[str]:
        """Return errors and leaks on this idle rank."""
        return left_behind(self.manager, self.slack_s)


def start_mooncake(host: str, devices: str | None = None) -> None:
    """Make Mooncake's engine. SGLang does this before it makes managers."""
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
        init_mooncake_transfer_engine,
    )

    init_mooncake_transfer_engine(hostname=host, ib_device=devices)


def stock_class(rank: Rank, kind: str) -> Any:
    """Return the SGLang class that the plugin's class of this kind is derived from."""
    return next(c for c in rank.kv_class[kind].__mro__ if c.__module__.startswith("sglang."))


def send(rank: Rank, sender: Any, chunk: np.ndarray, state: Any) -> None:
    """Pass one chunk to a sender, as SGLang's scheduler does."""
    sender.send(chunk, state, num_kv_tokens=tokens_in(rank, sender, chunk))


def tokens_in(rank: Rank, sender: Any, chunk: np.ndarray) -> int | None:
    """Return the number of the prompt's tokens in the next chunk, or None if whole pages are
    sent."""
    if not rank.case.by_token:
        return None
    size = rank.case.page_size * rank.case.prefill_dcp
    left = max(0, rank.case.requests[sender.ring_number].tokens - sender.curr_idx * size)
    return min(len(chunk) * size, left)


def reason_of(handle: Any) -> str:
    """Return why a sender or receiver failed, and close it, as SGLang's schedulers do."""
    try:
        handle.failure_exception()
    except Exception as error:
        return str(error)
    return ""


def wait_for_port(port: int, host: str = "127.0.0.1") -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, port), 0.2):
            return
        time.sleep(0.01)
    raise TimeoutError(f"nothing listens on {port}")


def left_behind(manager: Any, seconds: float) -> list[str]:
    """Return errors and leaks of an idle manager, after giving its workers time to clean up."""
    threads = getattr(manager, "_worker_threads", ())  # NIXL's manager has no such list
    ended = [f"thread {t.name} has ended" for t in threads if not t.is_alive()]
    deadline = time.monotonic() + seconds
    while (found := [*ended, *left_by(manager), *tables(manager)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [f"left behind: {line}" for line in found]
