"""What a decode rank forgets when a prefill server is gone, or another is in its place."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from sglang_mixkv.channel import planes
from sglang_mixkv.channel.slots import slot_bytes
from sglang_mixkv.channel.times import Times
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout
from sglang_mixkv.engine import rank as ranks
from sglang_mixkv.engine.manager import DraftManager
from sglang_mixkv.errors import MixKVError

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
