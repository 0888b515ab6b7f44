"""A rank's context and manager are built from SGLang's arguments, and a decode rank's manager keeps
track of prefill servers."""

from __future__ import annotations

import inspect
import json
import logging
import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import msgspec
import pytest
import torch
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.utils import DisaggregationMode

import sglang_mixkv
from sglang_mixkv.channel import planes
from sglang_mixkv.channel.data_plane import Memory
from sglang_mixkv.channel.handshake import StagingFacts, Target
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.channel.slots import slots_of
from sglang_mixkv.channel.times import Times
from sglang_mixkv.config import Config
from sglang_mixkv.decode.transfer import peer_of
from sglang_mixkv.draft import rows_gpu
from sglang_mixkv.draft.cuda import UnsafeError
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout
from sglang_mixkv.draft.rows import DraftRows
from sglang_mixkv.engine import gpu
from sglang_mixkv.engine import manager as managers
from sglang_mixkv.engine import rank as ranks
from sglang_mixkv.engine.bootstrap import KEY, SIZES
from sglang_mixkv.engine.draft_pool import Draft
from sglang_mixkv.engine.manager import MIXINS, DraftManager, mixed
from sglang_mixkv.engine.pool_hooks import DraftPoolContext
from sglang_mixkv.engine.prefill_servers import PrefillServers
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.guards.early_sends import EarlySends
from sglang_mixkv.series import ABORTED


def test_a_server_with_too_many_ranks_is_refused() -> None:
    listed = list[Any]()

    class Stock:
        def _resolve_rank_mapping(self, info: Any) -> None:
            listed.append(info)

    one = type("Mixed", (DraftManager, Stock), {"__init__": lambda _: None})()
    for sizes in ((1, 1, 1, 1), (4, 2, 8, 16)):
        names = zip(SIZES, sizes, strict=True)
        one._resolve_rank_mapping(SimpleNamespace(**dict(names)))
    assert len(listed) == 2
    for sizes in ((1, 1, 1025, 1), (4, 2, 8, 17), (1, 0, 1, 1), (1, -1, -1, 1)):
        with pytest.raises(MixKVError, match="MIXKV-PAIR-04"):
            one._resolve_rank_mapping(SimpleNamespace(**dict(zip(SIZES, sizes, strict=True))))
    assert len(listed) == 2


FACTS = DraftFacts("Llama", "EAGLE3", 4, (16, 16), "uint8")
LAYOUT = DraftLayout(FACTS, 2, 1)
PLAIN = Config(enabled=True, staging_mb=1)


class Plane:
    """A data plane that records its arguments and the memory registered with it."""

    endpoint = b"endpoint"

    def __init__(self, *made_of: Any) -> None:
        (self.name, *_), self.made_of, self.registered = made_of, made_of, list[Any]()

    def register(self, memory: Any) -> None:
        self.registered.append(memory)


@pytest.fixture
def rank_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Config], Any]:
    """Return a function that makes a rank with a configuration: its context, store and row."""
    draft = Draft(
        LAYOUT, DraftRows([torch.zeros(8, 2, 16, dtype=torch.uint8)] * 2, LAYOUT.heads), 4
    )
    monkeypatch.setattr(ranks, "check_once", lambda _: None)
    used: list[bool] = []
    monkeypatch.setattr(
        ranks, "reporter", lambda mode: SimpleNamespace(mode=mode, used=used, kernels=used.append)
    )
    monkeypatch.setattr(ranks, "get_spec", lambda: SimpleNamespace(speculative_eagle_topk=3))
    monkeypatch.setattr(ranks, "sglang_version", lambda: "0.5.23")
    monkeypatch.setattr(ranks.pool_hooks, "current", lambda: DraftPoolContext(object(), None))
    monkeypatch.setattr(ranks.draft_pool, "of_pool", lambda _: draft)
    monkeypatch.setattr(planes, "make", Plane)
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    kv_args = SimpleNamespace(
        gpu_id=5,
        ib_device=None,
        kv_item_lens=[7 * 16, 8 * 16, 9 * 16],
        num_draft_entries=1,
        page_size=16,
        state_types=[StateType.SWA],
        state_item_lens=[[17 * 16, 8 * 16]],
        state_dim_per_tensor=[[]],
        aux_item_lens=[1, 2],
        kv_layer_ids=[0, 1],
        total_kv_head_num=6,
    )
    manager = SimpleNamespace(
        local_ip="10.0.0.9", rank_port=9009, attn_tp_size=12, attn_tp_rank=11, pp_rank=10,
        pp_size=13, dcp_size=14, is_mla_backend=False, is_hybrid_mla_backend=False, kv_args=kv_args,
    )  # fmt: skip

    def make(config: Config) -> Any:
        one = ranks.RankContext(kv_args, SimpleNamespace(_mixkv=config), "prefill", "mooncake")
        store = one.store("10.0.0.8")
        return one, store, one.row(manager, "tcp://10.0.0.9:1", store)

    return make


def test_a_ranks_row_contains_all_facts(rank_of: Callable[[Config], Any]) -> None:
    """All values differ, so that no fact can be confused with another."""
    one, store, row = rank_of(Config(enabled=True, staging_mb=2, patience=0.7))
    slots, size = slots_of(2)
    assert msgspec.structs.asdict(row) == {
        "protocol": PROTOCOL, "plugin": sglang_mixkv.__version__, "engine": "0.5.23",
        "instance": one.instance, "rank_ip": "10.0.0.9", "rank_port": 9009,
        "address": "tcp://10.0.0.9:1", "attn_tp": 12, "attn_tp_rank": 11, "pp_rank": 10,
        "aux_item_lens": (1, 2), "backend": "mooncake", "topk": 3, "draft": LAYOUT, "patience": 0.7,
        "target": Target(
            6, 2, layer_ids=True, even=False, stages=13, dcp=14, states=("swa",), drafts=1,
            widths=(7, 8, 17),
        ),
        "staging": StagingFacts("mooncake", b"endpoint", store.staging.address, size, slots),
    }  # fmt: skip


SETTINGS = {
    "staging_mb": (300, lambda one, store, row: (
        (one.slots.count, one.slot_bytes), (store.staging.count, store.staging.slot_bytes),
        (row.staging.slots, row.staging.slot_bytes)), slots_of),
    "patience": (2.5, lambda one, store, row: (row.patience, one.times.patience), None),
    "port": (2000, lambda one, store, row: (one.port,), lambda port: port + 5),  # on GPU 5
    "data_plane": ("nixl", lambda one, store, row: (
        one.choice.name, store.plane.name, row.staging.data_plane), None),
    "nixl_params": ({"a": "b"}, lambda one, store, row: (store.plane.made_of[-1],), None),
}  # fmt: skip
ELSEWHERE = {
    "enabled": "plugin.py", "allow_untested_sglang": "engine/releases.py",
    "on_draft_mismatch": "engine/prefill_servers.py", "gpu_copies": "engine/rank.py, on a GPU",
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_reaches_every_place_that_uses_it(
    rank_of: Callable[[Config], Any], name: str
) -> None:
    value, look, meaning = SETTINGS[name]
    assert SETTINGS.keys() | ELSEWHERE.keys() == set(Config.__struct_fields__)
    expected = value if meaning is None else meaning(value)
    plain = look(*rank_of(PLAIN))
    found = look(*rank_of(msgspec.structs.replace(PLAIN, **{name: value})))
    assert found == (expected,) * len(found)
    assert all(one != expected for one in plain)


def test_the_staging_buffer_is_registered_with_the_data_plane(
    rank_of: Callable[[Config], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[Any] = []
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda one: pools.append(one) or nullcontext())
    one, store, _ = rank_of(PLAIN)
    address = store.staging.address
    assert store.plane.made_of == ("mooncake", "10.0.0.8", "", {})
    assert store.plane.registered == [Memory(address, math.prod(slots_of(1)))]
    assert pools == one.reporter.used == []
    monkeypatch.setattr(ranks.draft_pool, "of_pool", lambda _, of=ranks.draft_pool.of_pool:
        of(None)._replace(mem_pool="the KV's"))  # fmt: skip
    rank_of(PLAIN)
    assert pools == ["the KV's"]


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 2), (2, 1), (1, 5), (5, 1)])
def test_a_segment_fits_the_slots_of_both_sides(
    rank_of: Callable[[Config], Any], prefill: int, decode: int, heads: int
) -> None:
    one, _, _ = rank_of(msgspec.structs.replace(PLAIN, staging_mb=prefill))
    smaller = slots_of(min(prefill, decode))[1]
    assert one.segment_tokens(heads, slots_of(decode)[1]) == FACTS.tokens_in(smaller, heads)


# ---------------------------------------------------------------- other ranks


def other_rank(config: Config = PLAIN, **kv_args: Any) -> Any:
    return ranks.RankContext(
        SimpleNamespace(gpu_id=5, ib_device=None, aux_item_lens=[], **kv_args),
        SimpleNamespace(_mixkv=config), "decode", "nixl",
    )  # fmt: skip


@pytest.mark.usefixtures("rank_of")
def test_a_rank_without_a_drafter_has_no_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks.pool_hooks, "current", lambda: DraftPoolContext(None, "scheduler"))
    monkeypatch.setattr(ranks.draft_pool, "of_pool", lambda _: 1 // 0)
    one = other_rank()
    assert (one.draft, one.store("10.0.0.8")) == (None, None)
    assert one.pool_context.scheduler == "scheduler"
    assert one.banner().endswith("(SGLang 0.5.23): decode rank without draft KV of its own")


def test_a_rank_is_checked_with_its_arguments_slots_and_times(
    rank_of: Callable[[Config], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = list[Any]()
    monkeypatch.setattr(ranks, "check_once", checked.append)
    monkeypatch.setattr(ranks, "check_slots", lambda *args: checked.append(args))
    one = other_rank(config := msgspec.structs.replace(PLAIN, staging_mb=3, patience=3.0))
    assert checked[0]._mixkv is config is one.config
    assert checked[1:] == [(LAYOUT, slots_of(3)[1])]
    assert (one.mode, one.backend, one.reporter.mode) == ("decode", "nixl", "decode")
    assert one.reporter.slots is one.slots
    assert one.slots.count == slots_of(3)[0]
    assert vars(one.times) == vars(ranks.times(3.0))
    assert one.instance != other_rank().instance
    one, *_ = rank_of(PLAIN)
    assert one.banner() == (
        f"sglang-mixkv {sglang_mixkv.__version__} (SGLang 0.5.23): prefill attention-TP rank 1 of "
        f"2, draft heads 2-3 of 4, data plane mooncake ({one.choice.why}), copied on the host"
    )


@pytest.mark.usefixtures("rank_of")
@pytest.mark.parametrize(("gpu", "asked", "port"), [(5, 0, 0), (None, 0, 0), (None, 2000, 2000)])
def test_the_configured_port_is_used_or_any_free_one(gpu: Any, asked: int, port: int) -> None:
    config = msgspec.structs.replace(PLAIN, port=asked)
    one = ranks.RankContext(
        SimpleNamespace(gpu_id=gpu), SimpleNamespace(_mixkv=config), "prefill", "mooncake"
    )
    assert one.port == port


@pytest.mark.parametrize(
    ("manager", "kv_args", "expected"),
    [
        ({}, {}, {}),
        ({}, {"kv_item_lens": [7, 8, 7, 8, 1]}, {"even": True, "entries": 4}),
        (
            {},
            {"kv_item_lens": [7, 8, 7, 8], "num_draft_entries": 0},
            {"even": True, "entries": 4, "drafts": 0},
        ),
        ({}, {"num_draft_entries": 0}, {"entries": 3, "drafts": 0, "widths": (7, 8, 9)}),
        ({}, {"page_size": 4, "kv_item_lens": [48, 64, 12]}, {"widths": (12, 16)}),
        ({"is_mla_backend": True}, {}, {"heads": 0, "even": True}),
        ({"is_hybrid_mla_backend": True}, {}, {"heads": 0, "even": True}),
        ({}, {"kv_layer_ids": []}, {"layer_ids": False}),
        ({"pp_size": None, "pp_rank": None}, {}, {"stages": 1}),
        ({}, {"total_kv_head_num": None}, {"heads": 1}),
        (
            {},
            {
                "state_types": [StateType.SWA, StateType.MAMBA, StateType.DSA, StateType.SWA],
                "state_item_lens": [[30, 20], [96, 96, 5], [77], [20]],
                "state_dim_per_tensor": [[], [12, 4, 0], [], []],
            },
            {
                "states": ("swa", "mamba", "dsa"),
                "widths": (7, 8, 20, 30),
                "units": (5, 8, 24),
            },
        ),
    ],
)
@pytest.mark.usefixtures("rank_of")
def test_the_targets_facts_come_from_sglangs_kv_args(
    manager: dict[str, Any], kv_args: dict[str, Any], expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """If SGLang moves the drafter itself, its lists have the drafter's entries after those of the
    target. On decode, the lists lack the number of heads."""
    plain = {"kv_item_lens": [7, 8, 9], "num_draft_entries": 1, "kv_layer_ids": [0],
             "total_kv_head_num": 6, "page_size": 1, "state_types": [], "state_item_lens": [],
             "state_dim_per_tensor": []} | kv_args  # fmt: skip
    given = SimpleNamespace(**{k: v for k, v in plain.items() if v is not None})
    ours = SimpleNamespace(**{
        "local_ip": "", "rank_port": 1, "attn_tp_size": 2, "attn_tp_rank": 1, "pp_rank": 3,
        "pp_size": 13, "dcp_size": 14, "is_mla_backend": False, "is_hybrid_mla_backend": False,
        "kv_args": given} | manager)  # fmt: skip
    monkeypatch.setattr(ranks, "get_spec", lambda: SimpleNamespace(speculative_eagle_topk=None))
    row = other_rank().row(ours, "", None)
    wanted = {"heads": 6, "entries": 2, "layer_ids": True, "even": False, "stages": 13, "dcp": 14,
              "drafts": 1, "widths": (7, 8)}  # fmt: skip
    assert row.target == Target(**(wanted | expected))
    assert (row.topk, row.pp_rank, row.staging) == (0, ours.pp_rank or 0, None)


@pytest.mark.parametrize("kernels", ["why not", "kernels"])
@pytest.mark.parametrize("index", [None, 3])
def test_a_store_on_a_gpu_names_it_and_has_its_kernels(
    rank_of: Callable[[Config], Any], index: int | None, kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked, device = list[Any](), torch.device("cuda", index) if index else torch.device("cuda")
    rows, draft = SimpleNamespace(device=device), object() if kernels == "kernels" else kernels
    made = SimpleNamespace(
        address=1 << 20, size=7, slot_bytes=9, count=11, device=torch.device("cuda", index or 0)
    )
    monkeypatch.setattr(ranks, "Staging", lambda *args: asked.append(args) or made)
    monkeypatch.setattr(rows_gpu, "gpu_rows", lambda *args: asked.append(args) or draft)
    monkeypatch.setattr(ranks.draft_pool, "of_pool", lambda _: Draft(LAYOUT, rows, 4, "pool"))
    one, store, _ = rank_of(PLAIN)
    assert asked == [(*slots_of(1), device, "pool"), (rows, 4, made, "auto")]
    assert store.plane.registered == [Memory(1 << 20, 7, index or 0)]
    assert store.device is (None if kernels == "why not" else draft)
    assert one.reporter.used == [kernels == "kernels"]
    assert (store.rows, store.staging) == (rows, made)
    copying = "copied by torch (why not)" if kernels == "why not" else "kernels"
    assert one.banner().endswith(f", {copying}")


# ---------------------------------------------------------------- the manager


def built(
    monkeypatch: pytest.MonkeyPatch, mode: str = "prefill", drafting: bool = True, **rank: Any
) -> tuple[Any, Any]:
    """Build a manager, and return it with a record of the calls that built it. `rank`: attributes
    that SGLang's manager sets."""
    made = MagicMock()
    made.switch_off_early_sends.return_value = "; a note"
    made.RankContext.return_value.banner.return_value = "the banner"
    if not drafting:
        made.RankContext.return_value.store.return_value = None
    made.RankContext.return_value.row.return_value = {"row": 1}
    for name in ("RankContext", "AbortedRequests", "switch_off_early_sends", "PrefillServers",
                 "PrefillWorker", "DecodeWorker"):  # fmt: skip
        monkeypatch.setattr(managers, name, getattr(made, name))
    monkeypatch.setattr(managers.draft_pool, "check_appended", made.check_appended)
    monkeypatch.setattr(managers.prefill_machine, "Machine", made.PrefillMachine)
    monkeypatch.setattr(managers.decode_machine, "Machine", made.DecodeMachine)

    class Theirs:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.stock(*args, **kwargs)
            assert self.kv_status_msg_carries_reason, "SGLang reads it in its constructor"
            plain = {"pp_rank": None, "pp_size": None, "attn_tp_rank": 0, "attn_cp_rank": 0,
                     "attn_dp_rank": 0, "system_dp_rank": 0}  # fmt: skip
            vars(self).update(plain, local_ip="10.0.0.9", **rank)
            if mode == "prefill":
                self._register_topology_row("url", {"sglang's": 1})

        def _register_topology_row(self, url: str, payload: Any) -> None:
            made.register(url, payload)

    kind: Any = type("Made", (DraftManager, Theirs), {"backend": "nixl"})
    return kind("kv_args", DisaggregationMode(mode), "server_args", "is_mla", more=1), made


def arguments(kind: Any, made: Any) -> dict[str, Any]:
    """Return the arguments, by parameter name, with which `made`, a mock of `kind`, was called."""
    ((args, kwargs),) = [(one.args, one.kwargs) for one in made.call_args_list]
    return dict(inspect.signature(kind).bind(*args, **kwargs).arguments)


PREFILL = managers.prefill_machine.Machine, managers.PrefillWorker
DECODE = managers.decode_machine.Machine, managers.DecodeWorker


def test_a_prefill_manager_registers_its_channels_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager, made = built(monkeypatch)
    local = made.RankContext.return_value
    order = [name for name, *_ in made.mock_calls if "()" not in name]
    assert order == [
        "RankContext", "check_appended", "AbortedRequests", "stock", "PrefillMachine",
        "PrefillWorker", "register", "switch_off_early_sends",
    ]  # fmt: skip
    made.RankContext.assert_called_once_with("kv_args", "server_args", "prefill", "nixl")
    made.check_appended.assert_called_once_with("kv_args", "is_mla")
    made.switch_off_early_sends.assert_called_once_with(manager, managers.sglang_version())
    made.AbortedRequests.assert_called_once_with(manager)
    assert manager.aborted is made.AbortedRequests.return_value
    mode = DisaggregationMode.PREFILL
    made.stock.assert_called_once_with("kv_args", mode, "server_args", "is_mla", more=1)
    local.store.assert_called_once_with("10.0.0.9")
    store, given = local.store.return_value, arguments(PREFILL[0], made.PrefillMachine)
    draw = given.pop("draw_stamp")
    assert draw() != draw()
    assert given == {
        "instance": local.instance, "heads": store.rows.heads, "slots": local.slots,
        "segment_tokens": local.segment_tokens, "times": local.times,
    }  # fmt: skip
    assert arguments(PREFILL[1], made.PrefillWorker) == {
        "machine": made.PrefillMachine.return_value, "store": store, "times": local.times,
        "reporter": local.reporter, "host": "10.0.0.9", "port": local.port,
    }  # fmt: skip
    worker = made.PrefillWorker.return_value
    assert manager.prefill_channel is worker
    assert not hasattr(manager, "decode_channel")
    local.row.assert_called_once_with(manager, worker.address, store)
    made.register.assert_called_once_with("url", {"sglang's": 1, KEY: {"row": 1}})


def test_a_prefill_manager_without_a_drafter_has_no_channel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager, made = built(monkeypatch, drafting=False)
    assert manager.prefill_channel is None
    made.RankContext.return_value.row.assert_called_once_with(manager, "", None)
    made.register.assert_called_once_with("url", {"sglang's": 1, KEY: {"row": 1}})


@pytest.mark.parametrize("drafting", [True, False])
def test_a_decode_manager_has_a_channel_and_prefill_servers(
    drafting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a peer was restarted, the manager forgets its server; if a peer was lost, it checks the
    server again."""
    manager, made = built(monkeypatch, "decode", drafting)
    local = made.RankContext.return_value
    assert not made.switch_off_early_sends.mock_calls, "only prefill sends"
    local.store.assert_called_once_with("10.0.0.9")
    machine, store = made.DecodeMachine.return_value, local.store.return_value
    assert arguments(DECODE[0], made.DecodeMachine) == {
        "instance": local.instance, "slots": local.slots, "slot_bytes": local.slot_bytes,
        "times": local.times,
    }  # fmt: skip
    given = arguments(DECODE[1], made.DecodeWorker)
    forget, check = given.pop("forget_peer"), given.pop("check_peer")
    assert given == {
        "machine": machine,
        "store": store,
        "times": local.times,
        "reporter": local.reporter,
    }
    assert manager.decode_channel is made.DecodeWorker.return_value
    made.PrefillServers.assert_called_once_with(manager, local.row.return_value)
    local.row.assert_called_once_with(manager, "", store)
    peer = peer_of(b"instance", ADDRESS)
    assert (local.reporter.breaker, local.reporter.name_of(peer)) == (machine.breaker, ADDRESS)
    forget(peer)
    check(peer)
    assert made.PrefillServers.return_value.mock_calls == [
        call.forget(ADDRESS), call.check(ADDRESS)
    ]  # fmt: skip
    answer = manager.try_ensure_parallel_info(ADDRESS)
    assert answer is made.PrefillServers.return_value.ensure.return_value
    assert made.PrefillServers.return_value.mock_calls[2:] == [call.ensure(ADDRESS)]


RANK_NAMES = "attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "system_dp_rank"


@pytest.mark.parametrize(
    ("rank", "is_said"),
    [({}, True), ({"pp_rank": 0, "pp_size": 1}, True), ({"pp_rank": 2, "pp_size": 3}, True),
     ({"pp_rank": 0, "pp_size": 3}, False), *(({name: 1}, False) for name in RANK_NAMES)],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_one_rank_per_server_logs_its_banner_at_info(
    mode: str, rank: dict[str, Any], is_said: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The first rank of the drafter's stage logs its banner at INFO, and the others at DEBUG."""
    with caplog.at_level(logging.DEBUG, "sglang.sglang_mixkv.engine.manager"):
        built(monkeypatch, mode, **rank)
    ((level, text),) = [(one.levelno, one.getMessage()) for one in caplog.records]
    assert level == (logging.INFO if is_said else logging.DEBUG)
    assert text == "the banner" + ("; a note" if mode == "prefill" else "")


@pytest.mark.parametrize("kind", [*MIXINS, "kvargs"])
@pytest.mark.parametrize("backend", ["mooncake", "nixl", "fake"])
def test_sglangs_class_gets_the_plugins_mixin(backend: str, kind: str) -> None:
    class Theirs: ...

    found: Any = mixed(Theirs, backend, kind)
    if backend == "fake" or kind == "kvargs":
        assert found is Theirs
        return
    guards = (EarlySends,) if (backend, kind) == ("nixl", "manager") else ()
    assert found.__bases__ == (*guards, MIXINS[kind], Theirs)
    assert (found.__name__, found.backend) == ("DraftTheirs", backend)
    assert mixed(Theirs, backend, kind) is found, "the class must be made only once"
    assert found.__module__.startswith("sglang_mixkv.")


REASON = "PermissionError(13, 'TRITON_CACHE_DIR')"


@pytest.mark.parametrize(
    ("asked", "found", "starts"),
    [
        ("auto", object(), True),
        ("kernels", object(), True),
        ("auto", REASON, True),
        ("torch", REASON, True),
        ("kernels", REASON, False),
        ("auto", UnsafeError(REASON), False),
        ("torch", UnsafeError(REASON), False),
    ],
)
def test_torch_copies_replace_the_kernels_only_with_a_warning(
    asked: str, found: Any, starts: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def gpu_rows(*what: Any) -> Any:
        assert what == ("rows", 64, "staging", asked)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(rows_gpu, "gpu_rows", gpu_rows)
    error = nullcontext() if starts else pytest.raises(MixKVError, match=r"MIXKV-START-07.*CACHE")
    with error:
        assert gpu.kernels_of("rows", 64, "staging", asked) is found
    said = [(one.levelname, one.message) for one in caplog.records]
    assert len(said) == (asked == "auto" and found is REASON), (
        "an explicit setting needs no warning"
    )
    assert all(level == "WARNING" and "MIXKV-START-07" in text for level, text in said)


class Stock:
    """A stand-in for SGLang's manager with the methods that the plugin overrides."""

    def __init__(self) -> None:
        self.prefill_info_table: dict[str, Any] = {}
        self.applied: list[Any] = []

    def try_ensure_parallel_info(self, address: str) -> bool:
        if address == ADDRESS:
            self.prefill_info_table[address] = "its sizes"
        return address in self.prefill_info_table

    def apply_prefill_status(self, *, failure_reason: Any = None, **status: Any) -> None:
        self.applied.append((failure_reason, status))


class Manager(DraftManager, Stock):
    def __init__(self) -> None:
        Stock.__init__(self)


def test_a_server_enters_sglangs_table_only_once_connected() -> None:
    """The scheduler treats a server in `prefill_info_table` as ready."""
    manager = Manager()
    for address, info in ((ADDRESS, "its sizes"), (OTHER, None)):
        assert manager.resolve(address) == info
        assert manager.prefill_info_table == {}


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("reason", [ABORTED, "another", None])
def test_prefills_status_of_a_request_is_passed_to_sglang(deferred: bool, reason: Any) -> None:
    """The plugin passes every status from prefill to SGLang except an abort without deferred
    release, since prefill may still write to the pages then."""
    manager = Manager()
    manager.enable_deferred_decode_kv_release = deferred
    status = {"bootstrap_room": 7, "status": 0, "prefill_unique_rank": 1}
    manager.apply_prefill_status(failure_reason=reason, **status)
    is_ignored = reason == ABORTED and not deferred
    assert manager.applied == ([] if is_ignored else [(reason, status)])


ADDRESS, OTHER = "127.0.0.1:1", "127.0.0.1:10"  # one is a prefix of the other


class Locked(dict[str, Any]):
    """A dict that may be read or changed only with its lock held."""

    def __init__(self, lock: Any, **entries: Any) -> None:
        super().__init__(entries)
        self._lock = lock

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            assert self._lock.locked(), name
        return super().__getattribute__(name)

    def __iter__(self) -> Any:
        assert self._lock.locked()
        return super().__iter__()

    def __delitem__(self, key: str) -> None:
        assert self._lock.locked()
        super().__delitem__(key)


def test_a_server_with_a_restarted_rank_is_forgotten() -> None:
    """After a restart that SGLang's heartbeats may have missed, SGLang's cached connections to that
    server are dropped too. CommonKVReceiver._setup_bootstrap_infos makes the keys of these
    connections. SGLang's threads change their table under a lock."""
    lock, entries = threading.Lock(), {f"{ADDRESS}_0_0_0": [], f"{OTHER}_0_0_0": []}
    pool, table = Locked(lock, **entries), dict.fromkeys((ADDRESS, OTHER))
    manager: Any = SimpleNamespace(
        prefill_info_table=table, decode_channel="", connection_lock=lock, connection_pool=pool
    )
    PrefillServers(manager, own=None).forget(ADDRESS)  # type: ignore[arg-type]
    assert list(table) == [OTHER]
    with lock:  # blocks unless `forget` has released it
        assert list(pool) == [f"{OTHER}_0_0_0"]


def test_a_slot_smaller_than_a_token_is_refused_with_a_remedy() -> None:
    facts = DraftFacts("Llama", "EAGLE3", 8, (256,) * 16, "bfloat16")  # 32 KiB per token
    small, larger = slots_of(1)[1], slots_of(2)[1]
    ranks.check_slots(DraftLayout(facts, 1, 0), larger)
    ranks.check_slots(DraftLayout(facts, 2, 0), small)
    with pytest.raises(MixKVError, match=r"MIXKV-START-04.*--mixkv-staging-mb to be 2 or more"):
        ranks.check_slots(DraftLayout(facts, 1, 0), small)
    facts = msgspec.structs.replace(facts, head_bytes=(1 << 20,) * 5)  # larger than any slot
    with pytest.raises(MixKVError, match=r"MIXKV-START-04.*a token of 4 MiB at most"):
        ranks.check_slots(DraftLayout(facts, 8, 0), slots_of(16384)[1])


def test_an_open_is_retained_for_sglangs_request_timeouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's error messages advise 600 s for each timeout if TTFT may be long."""
    names = [f"SGLANG_DISAGGREGATION_{of}_TIMEOUT" for of in ("WAITING", "BOOTSTRAP")]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert vars(ranks.times(1.0)) == vars(Times())
    for name, seconds in zip(names, ("600", "70"), strict=True):
        monkeypatch.setenv(name, seconds)
    assert vars(ranks.times(2.0)) == vars(Times(2.0, 670))


OF_GPUS = json.dumps({"0": "mlx5_0", "1": "mlx5_2,mlx5_3"})


@pytest.mark.parametrize(
    ("given", "taken"),
    [(OF_GPUS, "mlx5_2,mlx5_3"), ("FILE", "mlx5_2,mlx5_3"), ("mlx5_0,mlx5_1", "mlx5_0,mlx5_1"),
     (None, "")],
)  # fmt: skip
def test_the_data_plane_uses_sglangs_rdma_devices_for_its_gpu(
    given: str | None, taken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plugin joins device names as SGLang's NIXL manager does (nixl/conn.py,
    _resolve_ucx_device_list)."""
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.delenv(planes.NIXL_ENV, raising=False)
    if given == "FILE":
        given = str(tmp_path / "devices.json")
        Path(given).write_text(OF_GPUS)
    kv_args, params = SimpleNamespace(ib_device=given, gpu_id=1), dict[str, str]()
    devices = gpu.rdma_devices(kv_args)
    assert devices == taken
    _, found = planes.nixl_backend(devices, params)
    assert found == ({"device_list": taken.replace(",", ", ")} if taken else {})
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_9:1")  # SGLang also passes no device list then
    assert planes.nixl_backend(devices, params) == ("UCX", {})
    monkeypatch.setenv("MC_FORCE_TCP", "0")  # Mooncake checks only whether MC_FORCE_TCP is set
    kv_args.gpu_id = 7  # the file lacks GPU 7, but is not read without RDMA
    assert gpu.rdma_devices(kv_args) == ""
