"""Where SGLang's KV lies in an allocator's memory the plugin's buffers do, or there are none."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rig.model import Cache, Case, Request, sglang_pool

from sglang_mixkv.config import Config

VARIABLE = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"
POOL = object()


def in_a_pool() -> Any:
    """SGLang's MLA pool, as it is where Mooncake has the allocator."""
    pool = sglang_pool(Case(1, 1, requests=(Request(8),)), Cache("mla"), 1, 0, 1)
    pool.custom_mem_pool = POOL
    return pool


def wrapped() -> Any:
    """Linear attention: the pool that KV is in is inside of it."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    pool = object.__new__(HybridLinearKVPool)
    pool.full_kv_pool = in_a_pool()
    return pool


@pytest.mark.parametrize("build", [in_a_pool, wrapped])
@pytest.mark.parametrize(
    ("asked", "kind"),
    [("True", "NVLINK"), ("BAREX", "BAREX"), ("INTRA_NODE_NVLINK", ""), ("0", ""), (None, "")],
)
def test_the_kvs_memory(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, kind: str, build: Any
) -> None:
    from sglang_mixkv.engine.kv_memory import custom_mem_pool, memory_of

    monkeypatch.delenv(VARIABLE, raising=False)
    if asked is not None:
        monkeypatch.setenv(VARIABLE, asked)
    found = custom_mem_pool(build())
    assert found is (POOL if kind else None)
    args = SimpleNamespace(num_draft_entries=2, custom_mem_pool=found)
    memory = memory_of(args, "mooncake")
    assert (memory.kind, memory.pool) == (kind, found)
    assert memory.fitting(Config()) == Config()


@pytest.mark.parametrize(
    ("entries", "backend", "direct"),
    [(2, "mooncake", True), (2, "nixl", False), (0, "mooncake", False)],
)
def test_without_the_pool_asked_for_there_are_no_buffers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, entries: int, backend: str,
    direct: bool,
) -> None:  # fmt: skip
    """Said once; neither NIXL nor a server without a drafter minds."""
    from sglang_mixkv.engine.kv_memory import memory_of

    monkeypatch.setenv(VARIABLE, "NVLINK")
    memory = memory_of(SimpleNamespace(num_draft_entries=entries), backend)
    assert memory.kind == ""
    assert (memory.fitting(Config()).draft_transfer == "direct") is direct
    assert caplog.text.count("MIXKV-MEM-01") == direct


def test_rows_on_a_gpu_are_allocated_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_mixkv.engine.kv_memory import KVMemory
    from sglang_mixkv.engine.sides import rows_for

    made = SimpleNamespace(CudaRows=lambda *given: given)
    monkeypatch.setitem(sys.modules, "sglang_mixkv.rows.cuda", made)
    assert rows_for("cuda", 3, KVMemory("NVLINK", POOL)) == (3, POOL)
