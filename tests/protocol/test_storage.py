"""Test HiCache's storage tier with draft KV: SGLang's MooncakeStore on a real Mooncake master, used
by servers of two attention-TP sizes.

Without the plugin, both sizes use the same object names, and reading half a page counts as a
success.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rig.process import forks
from rig.process.store import store

from mixkv_demo.processes import Fleet
from sglang_mixkv import plugin
from sglang_mixkv.config import ATTRIBUTE, Config
from sglang_mixkv.engine import storage

pytestmark = pytest.mark.mooncake_only

HEADS, HEAD_BYTES, PAGE, PAGES = 4, 256, 4, 3
KEYS = [f"page{number}" for number in range(PAGES)]
MLA = "mla"


@pytest.fixture(scope="module")
def shared() -> Iterator[dict[str, Any]]:
    with Fleet() as fleet:
        yield store(fleet)


def opt_in(patch: pytest.MonkeyPatch, algorithm: str | None = "EAGLE3", **config: bool) -> None:
    # --tp-size differs from the attention-TP size that splits the heads (Rank's `tp`).
    published = SimpleNamespace(speculative_algorithm=algorithm, tp_size=8)
    setattr(published, ATTRIBUTE, Config(**{"enabled": True, **config}))
    patch.setattr(plugin, "_published", lambda: published)
    patch.setattr(storage, "get_server_args", lambda: published)


class HostPool:
    """A host pool with contiguous pages, like SGLang's. `parts`: 2 for K and V, 1 for MLA."""

    def __init__(self, parts: int, heads: int, value: int) -> None:
        import torch

        self.page_size, self.parts = PAGE, parts
        self.kv_buffer = torch.zeros(PAGES, parts, PAGE, heads * HEAD_BYTES, dtype=torch.uint8)
        self.kv_buffer += value

    def get_ksize_per_token(self) -> int:
        return int(self.kv_buffer.shape[-1])

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        part = self.kv_buffer[0, 0].nbytes
        rows = [int(index) // PAGE * self.parts + one for index in indices[::PAGE]
                for one in range(self.parts)]  # fmt: skip
        return [self.kv_buffer.data_ptr() + row * part for row in rows], [part] * len(rows)


class Rank:
    """A rank's store with pages of target and drafter. `value`: the byte that fills its heads."""

    def __init__(
        self, shared: dict[str, Any], tag: str, tp: int, rank: int, *, gqa: bool = False,
        draft: bool = True, pp: int = 1, **config: Any,
    ) -> None:  # fmt: skip
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
        from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

        extra = {**shared, "extra_backend_tag": tag}
        fields: dict[str, Any] = {
            "tp_rank": rank, "tp_size": tp, "pp_rank": pp - 1, "pp_size": pp, "attn_cp_rank": 0,
            "attn_cp_size": 1, "is_mla_model": not gqa, "enable_storage_metrics": False,
            "is_page_first_layout": True, "model_name": "m", "extra_config": extra,
        }  # fmt: skip
        self.value = 10 * tp + rank
        heads = HEADS // tp
        self.target = HostPool(2, heads, self.value) if gqa else HostPool(1, 1, 1)
        self.draft = HostPool(2, heads, self.value)
        self.store = MooncakeStore(HiCacheStorageConfig(**fields, **config), self.target)
        self.store.register_mem_pool_host(self.target)
        if draft:
            self.store.register_mem_host_pool_v2(self.draft, PoolName.DRAFT)

    def of_draft(self, pages: int = PAGES) -> Any:
        import torch
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        indices = torch.arange(pages * PAGE)
        return PoolTransfer(PoolName.DRAFT, host_indices=indices, keys=KEYS[:pages])

    def write_target(self) -> None:
        import torch

        assert all(self.store.batch_set_v1(KEYS, torch.arange(PAGES * PAGE)))

    def write_draft(self, pages: int = PAGES) -> None:
        assert all(self.store.batch_set_v2([self.of_draft(pages)])["draft"])

    def hits(self) -> tuple[int, int]:
        """Return the number of pages found for the target alone, and for target and drafter."""
        found = self.store.batch_exists_v2(KEYS, [self.of_draft()])
        return self.store.batch_exists(KEYS), found.kv_hit_pages

    def read_draft(self) -> tuple[bool, set[int]]:
        """Return whether the store reports success, and the values in the rows afterwards."""
        self.draft.kv_buffer.fill_(0)
        successes = self.store.batch_get_v2([self.of_draft()])["draft"]
        return all(successes), set(np.unique(self.draft.kv_buffer.numpy()).tolist())


def in_order(shared: dict[str, Any], tag: str) -> dict[str, Any]:
    """Return what a server of two ranks and one of a single rank find in a shared store, step by
    step: the two ranks write, the single rank writes one page and then all, and all ranks read."""
    first, second = (Rank(shared, tag, 2, rank) for rank in (0, 1))
    other = Rank(shared, tag, 1, 0)
    seen: dict[str, Any] = {"nobody wrote": other.hits()}
    first.write_target()
    seen["a target alone"] = first.hits()
    for rank in (first, second):
        rank.write_draft()
    seen["two wrote"] = [rank.hits() for rank in (first, second, other)]
    seen["read before it wrote"] = other.read_draft()
    other.draft.kv_buffer.fill_(other.value)
    other.write_draft(1)
    seen["one wrote a page"] = other.hits()
    other.write_draft()
    seen["one wrote"] = other.hits()
    seen["read"] = [rank.read_draft() for rank in (first, second, other)]
    return seen


def test_each_size_has_its_own_objects_and_a_gap_ends_the_hit(
    shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opt_in(monkeypatch)
    assert forks.in_fork(lambda: in_order(shared, "plugin")) == {
        "nobody wrote": (0, 0),
        "a target alone": (PAGES, 0),
        "two wrote": [(PAGES, PAGES), (PAGES, PAGES), (PAGES, 0)],
        "read before it wrote": (False, {0}),
        "one wrote a page": (PAGES, 1),
        "one wrote": (PAGES, PAGES),
        "read": [(True, {20}), (True, {21}), (True, {10})],
    }


def test_stock_reads_half_a_page_of_wrong_heads_as_a_success(
    shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opt_in(monkeypatch, enabled=False)
    seen = forks.in_fork(lambda: in_order(shared, "stock"))
    assert seen["two wrote"] == [(PAGES, PAGES)] * 3
    assert seen["read before it wrote"] == (True, {0, 20})
    assert seen["read"][-1] == (True, {0, 20})


def test_with_a_drafter_only_mooncakes_storage_can_be_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`PUT /hicache/storage-backend` for another storage is rejected with the reason. Without a
    drafter, SGLang handles the request."""
    from sglang.srt.managers.scheduler import Scheduler

    scheduler, answers = SimpleNamespace(enable_hierarchical_cache=False), dict[Any, str]()
    for algorithm in ("EAGLE3", "NGRAM", None):
        opt_in(monkeypatch, algorithm)
        for name in ("file", "mooncake"):
            asked = SimpleNamespace(hicache_storage_backend=name)
            answer = Scheduler.attach_hicache_storage_wrapped(scheduler, asked)
            assert not answer.success
            answers[name, algorithm] = answer.message
    assert answers.pop(("file", "EAGLE3")).startswith("[MIXKV-START-03] --hicache-storage-backend ")
    assert set(answers.values()) == {"Hierarchical cache is not enabled."}


def suffixes(shared: dict[str, Any], tag: str) -> dict[str, Any]:
    """Return the names of a page's objects."""
    heads = {"gqa": Rank(shared, tag, 2, 1, gqa=True), "pp": Rank(shared, tag, 2, 1, pp=2)}
    split = Rank(shared, tag, 2, 1, gqa=True, should_split_heads=True, tp_lcm_size=4)
    mla = Rank(shared, tag, 2, 1)
    names = {
        name: rank.store._get_hybrid_page_component_keys([""], rank.of_draft())[0]
        for name, rank in {**heads, "mla": mla, "split": split}.items()
    }
    return names | {
        "target": {
            name: (rank.store.mla_suffix, rank.store.mha_suffix)
            for name, rank in {**heads, "mla": mla, "split": split}.items()
        }
    }


@pytest.mark.parametrize("algorithm", ["EAGLE3", None])
def test_names_of_objects_with_heads_contain_the_tp_size(
    algorithm: str | None, shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects with heads have the TP size in their names. SGLang's names are kept for MLA rows, for
    servers without a drafter, and for heads that SGLang itself splits by the least common multiple
    of the sizes."""
    opt_in(monkeypatch, algorithm)
    size = "tp2_" if algorithm else ""
    parts = ["2", "3"]
    assert forks.in_fork(lambda: suffixes(shared, f"names-{algorithm}")) == {
        **{name: [f"_{size}{rank}_draft_{part}" for part in "kv"]
           for name, rank in {"gqa": "1", "pp": "1_1", "mla": "1"}.items()},
        "split": [f"_{parts}_draft_{part}" for part in "kv"],
        "target": {
            "gqa": ("", f"{size}1"), "pp": ("1", f"{size}1_1"), "mla": ("", f"{size}1"),
            "split": ("", parts),
        },
    }  # fmt: skip
