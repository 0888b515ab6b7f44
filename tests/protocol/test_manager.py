"""What a decode rank forgets when a prefill server is gone, or another is in its place."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_mixkv.channel.slots import slot_bytes
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode.events import peer_of
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout
from sglang_mixkv.engine import rank as ranks
from sglang_mixkv.engine.manager import DraftManager
from sglang_mixkv.errors import MixKVError

from .test_response_counts import ADDRESS, Scene, published  # noqa: F401

OTHER = "127.0.0.1:2"


class Known:
    """PrefillServers, as far as its manager asks. `gone`: addresses that were forgotten."""

    def __init__(self) -> None:
        self.gone: list[str] = []

    def forget(self, address: str) -> None:
        self.gone.append(address)


def manager_with_connections() -> Any:
    """One whose receivers have met a server: SGLang itself has filled its tables."""
    scene = Scene(2, 1, 0)
    scene.receiver(0)
    manager = scene.manager
    assert ADDRESS in manager.prefill_info_table
    assert manager.connection_pool
    manager.connection_pool[f"{OTHER}_0_0_0"] = []
    manager.servers = Known()
    return manager


def test_a_server_of_which_a_rank_was_restarted_is_asked_anew() -> None:
    """SGLang's heartbeats may not have noticed."""
    manager = manager_with_connections()
    manager._forget_server = lambda address: DraftManager._forget_server(manager, address)
    DraftManager._forget_peer(manager, peer_of(b"restarte", ADDRESS))
    assert manager.servers.gone == [ADDRESS]
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
    assert ranks.times(1.0) == Times()
    for name in names:
        monkeypatch.setenv(name, "600")
    assert ranks.times(2.0) == Times(2.0, 1200)
