"""What a decode rank forgets when a prefill server is gone, or another is in its place."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import torch

import sglang_mixkv
from sglang_mixkv.channel import planes
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.channel.slots import SLOTS, slot_bytes
from sglang_mixkv.channel.times import Times
from sglang_mixkv.config import Config
from sglang_mixkv.draft import rows_gpu
from sglang_mixkv.draft.cuda import UnsafeError
from sglang_mixkv.draft.facts import StagingFacts, Target
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout
from sglang_mixkv.draft.rows import DraftRows
from sglang_mixkv.engine import rank as ranks
from sglang_mixkv.engine.draft_pool import Draft
from sglang_mixkv.engine.manager import DraftManager
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.series import ABORTED

FACTS = DraftFacts("Llama", "EAGLE3", 4, (16, 16), "uint8")
LAYOUT = DraftLayout(FACTS, 2, 1)
PLAIN = Config(enabled=True, staging_mb=1)


class Plane:
    """A data plane that takes what it is made of, and what is registered."""

    endpoint = b"endpoint"

    def __init__(self, *made_of: Any) -> None:
        (self.name, *_), self.made_of, self.registered = made_of, made_of, list[Any]()

    def register(self, *memory: Any) -> None:
        self.registered.append(memory)


@pytest.fixture
def rank_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Config], Any]:
    """This rank with a configuration: its context, its store and its row."""
    draft = Draft(
        LAYOUT, DraftRows([torch.zeros(8, 2, 16, dtype=torch.uint8)] * 2, LAYOUT.heads), 4
    )
    monkeypatch.setattr(ranks, "check_once", lambda _: None)
    monkeypatch.setattr(ranks, "reporter", lambda mode: SimpleNamespace(mode=mode))
    monkeypatch.setattr(ranks, "get_spec", lambda: SimpleNamespace(speculative_eagle_topk=3))
    monkeypatch.setattr(ranks, "sglang_version", lambda: "0.5.23")
    monkeypatch.setattr(ranks.handover, "take", lambda: ranks.handover.Handed(object(), None))
    monkeypatch.setattr(ranks.draft_pool, "of_pool", lambda _: draft)
    monkeypatch.setattr(planes, "make", Plane)
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    kv_args = SimpleNamespace(
        gpu_id=5,
        ib_device=None,
        kv_item_lens=[7, 8, 9],
        num_draft_entries=1,
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


def test_a_ranks_row_has_each_of_its_facts(rank_of: Callable[[Config], Any]) -> None:
    """Each of another value, so that none can stand in another's place."""
    one, store, row = rank_of(Config(enabled=True, staging_mb=2, patience=0.7))
    size = slot_bytes(2)
    assert msgspec.structs.asdict(row) == {
        "protocol": PROTOCOL, "plugin": sglang_mixkv.__version__, "engine": "0.5.23",
        "instance": one.instance, "rank_ip": "10.0.0.9", "rank_port": 9009,
        "address": "tcp://10.0.0.9:1", "attn_tp": 12, "attn_tp_rank": 11, "pp_rank": 10,
        "aux_item_lens": (1, 2), "backend": "mooncake", "topk": 3, "draft": LAYOUT, "patience": 0.7,
        "target": Target(6, 2, layer_ids=True, even=False, stages=13, dcp=14),
        "staging": StagingFacts("mooncake", b"endpoint", store.staging.address, size, SLOTS),
    }  # fmt: skip


SETTINGS = {
    "staging_mb": (3, lambda one, store, row: (
        one.slot_bytes, store.staging.slot_bytes, row.staging.slot_bytes), slot_bytes),
    "patience": (2.5, lambda one, store, row: (row.patience, one.times.patience), None),
    "port": (2000, lambda one, store, row: (one.port,), lambda port: port + 5),  # of GPU 5
    "data_plane": ("nixl", lambda one, store, row: (
        one.choice.name, store.plane.name, row.staging.data_plane), None),
    "nixl_params": ({"a": "b"}, lambda one, store, row: (store.plane.made_of[-1],), None),
}  # fmt: skip
ELSEWHERE = {
    "enabled": "plugin.py", "allow_untested_sglang": "engine/releases.py",
    "on_draft_mismatch": "engine/prefill_servers.py", "gpu_copies": "engine/rank.py, on a GPU",
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_reaches_all_that_depends_on_it(
    rank_of: Callable[[Config], Any], name: str
) -> None:
    value, look, meaning = SETTINGS[name]
    assert SETTINGS.keys() | ELSEWHERE.keys() == set(Config.__struct_fields__)
    expected = value if meaning is None else meaning(value)
    plain = look(*rank_of(PLAIN))
    found = look(*rank_of(msgspec.structs.replace(PLAIN, **{name: value})))
    assert found == (expected,) * len(found)
    assert all(one != expected for one in plain)


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
def test_nothing_takes_the_kernels_place_in_silence(
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
        assert ranks.kernels_of("rows", 64, "staging", asked) is found
    said = [(one.levelname, one.message) for one in caplog.records]
    assert len(said) == (starts and found is REASON)
    assert all(level == "WARNING" and "MIXKV-START-07" in text for level, text in said)


class Stock:
    """As far as SGLang's managers are overridden."""

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


def test_sglangs_table_has_no_server_before_it_is_connected_to() -> None:
    """The scheduler takes one that is there for ready."""
    manager = Manager()
    for address, info in ((ADDRESS, "its sizes"), (OTHER, None)):
        assert manager.resolve(address) == info
        assert manager.prefill_info_table == {}


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("reason", [ABORTED, "another", None])
def test_what_prefill_says_of_a_request_is_handed_on(deferred: bool, reason: Any) -> None:
    """An abort without deferred release is ignored, since SGLang may still write."""
    manager = Manager()
    manager.enable_deferred_decode_kv_release = deferred
    status = {"bootstrap_room": 7, "status": 0, "prefill_unique_rank": 1}
    manager.apply_prefill_status(failure_reason=reason, **status)
    is_ignored = reason == ABORTED and not deferred
    assert manager.applied == ([] if is_ignored else [(reason, status)])


ADDRESS, OTHER = "127.0.0.1:1", "127.0.0.1:10"  # begins alike


def test_a_server_of_which_a_rank_was_restarted_is_asked_anew() -> None:
    """SGLang's heartbeats may not have noticed. Its keys of a connection: as in
    CommonKVReceiver._setup_bootstrap_infos."""
    manager: Any = DraftManager.__new__(DraftManager)
    manager.servers = MagicMock()
    manager.connection_pool = {f"{ADDRESS}_0_0_0": [], f"{OTHER}_0_0_0": []}
    manager.connection_lock = threading.Lock()
    manager.forget_server(ADDRESS)
    manager.servers.forget.assert_called_once_with(ADDRESS)
    assert list(manager.connection_pool) == [f"{OTHER}_0_0_0"]


def test_a_slot_that_holds_no_token_is_refused_with_what_would() -> None:
    facts = DraftFacts("Llama", "EAGLE3", 8, (256,) * 16, "bfloat16")  # 32 KiB a token
    ranks.check_slots(DraftLayout(facts, 1, 0), slot_bytes(2))
    ranks.check_slots(DraftLayout(facts, 2, 0), slot_bytes(1))
    with pytest.raises(MixKVError, match=r"MIXKV-START-04.*--mixkv-staging-mb to be 2 or more"):
        ranks.check_slots(DraftLayout(facts, 1, 0), slot_bytes(1))


def test_an_open_waits_as_long_as_sglang_lets_a_request_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose error messages advise 600 s each where TTFT may be long."""
    names = [f"SGLANG_DISAGGREGATION_{of}_TIMEOUT" for of in ("WAITING", "BOOTSTRAP")]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert vars(ranks.times(1.0)) == vars(Times())
    for name in names:
        monkeypatch.setenv(name, "600")
    assert vars(ranks.times(2.0)) == vars(Times(2.0, 1200))


OF_GPUS = json.dumps({"0": "mlx5_0", "1": "mlx5_2,mlx5_3"})


@pytest.mark.parametrize(
    ("given", "taken"),
    [(OF_GPUS, "mlx5_2,mlx5_3"), ("FILE", "mlx5_2,mlx5_3"), ("mlx5_0,mlx5_1", "mlx5_0,mlx5_1"),
     (None, "")],
)  # fmt: skip
def test_the_data_plane_has_the_rdma_devices_of_its_gpu_as_sglang_has(
    given: str | None, taken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its NIXL joins them so, too (nixl/conn.py _resolve_ucx_device_list)."""
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.delenv(planes.NIXL_ENV, raising=False)
    if given == "FILE":
        given = str(tmp_path / "devices.json")
        Path(given).write_text(OF_GPUS)
    kv_args, params = SimpleNamespace(ib_device=given, gpu_id=1), dict[str, str]()
    devices = ranks.rdma_devices(kv_args)
    assert devices == taken
    _, found = planes.nixl_backend(devices, params)
    assert found == ({"device_list": taken.replace(",", ", ")} if taken else {})
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_9:1")  # SGLang leaves the choice to it
    assert planes.nixl_backend(devices, params) == ("UCX", {})
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    kv_args.gpu_id = 7  # SGLang does not look at it without RDMA
    assert ranks.rdma_devices(kv_args) == ""
