"""What the plugin adds to KV args where SGLang builds them: pools, configurations, refusals."""

from __future__ import annotations

import json
import multiprocessing as mp
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rig.model import Cache, Case, Request, sglang_pool
from rig.unserved import skip_unserved

import sglang_mixkv
from sglang_mixkv.config import ATTRIBUTE, Config

MODELS = Path(sglang_mixkv.__file__).parent / "demo" / "models"
CASE = Case(4, 1, requests=(Request(8),))


def in_fork(what: Callable[[], Any]) -> Any:
    """The value, or the exception's text: what is published stays in the fork."""

    def main(pipe: Any) -> None:
        try:
            pipe.send(what())
        except BaseException as error:
            pipe.send(f"{type(error).__name__}: {error}")

    here, there = mp.get_context("fork").Pipe()
    process = mp.get_context("fork").Process(target=main, args=(there,))
    process.start()
    said = here.recv() if here.poll(60) else "silence"
    process.join(10)
    return said


def plain_pool(cache: Cache, tp: int) -> Any:
    """A model's pool, as SGLang builds it for nearly every drafter; with DSA in pages of 64."""
    case = replace(CASE, page_size=64) if cache.index_k else CASE
    return sglang_pool(case, cache, tp, 0, cache.layers)


INTEL = {"attention_backend": "intel_amx"}


def described(
    tp: int, drafter: Path, cache: Cache, *, enabled: bool = True,
    build: Callable[[Cache, int], Any] = plain_pool, target_cache: Cache = CASE.target,
    algorithm: str = "EAGLE3", window: int | None = 512, dcp: int = 1,
    backends: dict[str, str] = INTEL,
) -> Any:  # fmt: skip
    """KV args after SGLang's own setup_state_kv_args, as both _init_kv_manager call it."""
    from sglang.srt.disaggregation import utils
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.runtime_context import get_context, publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=str(MODELS / "mla" / "target"), tp_size=tp, device="cpu",
        disaggregation_mode="decode", speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(drafter), speculative_num_steps=3,
        speculative_eagle_topk=1, speculative_num_draft_tokens=4,
        speculative_draft_window_size=window, attention_backend="torch_native",
        disable_overlap_schedule=True, dcp_size=dcp,
    )  # fmt: skip
    setattr(args, ATTRIBUTE, Config(enabled=enabled))
    publish(args, role="tokenizer")
    # Some do not run on a CPU.
    get_context().override("test", speculative_algorithm=algorithm, **backends)
    target = plain_pool(target_cache, tp)
    target.custom_mem_pool = "the target's"
    draft = build(cache, tp)
    kv_args = KVArgs()
    infos = [target.get_contiguous_buf_infos(), draft.get_contiguous_buf_infos()]
    kv_args.kv_data_ptrs, kv_args.kv_data_lens, kv_args.kv_item_lens = (
        [n for info in infos for n in info[i]] for i in range(3)
    )
    kv_args.num_draft_entries = len(infos[1][0])
    utils.setup_state_kv_args(kv_args, target, draft, CASE.target.layers)
    names = (
        "is_draft_mla_backend", "draft_kv_head_num", "draft_total_kv_head_num",
        "draft_architecture", "draft_window", "draft_windows", "custom_mem_pool",
    )  # fmt: skip
    return {name: getattr(kv_args, name, None) for name in names}


def drafter(tmp_path: Path, **changed: Any) -> Path:
    """The shipped drafter's configuration, changed."""
    config = json.loads((MODELS / "mla" / "drafter" / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(("tp", "heads"), [(1, 4), (2, 4), (4, 4), (8, 4), (4, 8), (8, 2)])
def test_the_total_is_the_configurations(tmp_path: Path, tp: int, heads: int) -> None:
    """With replicas heads per rank x TP would be wrong: 8 ranks of one head each, 4 heads."""
    path = drafter(tmp_path, num_key_value_heads=heads)
    found = in_fork(lambda: described(tp, path, Cache("mha", heads=heads)))
    assert found["draft_total_kv_head_num"] == heads
    assert found["draft_kv_head_num"] == max(1, heads // tp)
    assert found["is_draft_mla_backend"] is False
    assert found["draft_architecture"] == "LlamaForCausalLMEagle3"
    assert found["draft_windows"] == (512, 512)


def larger_pages(cache: Cache, tp: int) -> Any:
    """A drafter's pool beside two DCP ranks."""
    return sglang_pool(CASE, cache, tp, 0, cache.layers, dcp=2)


def test_the_targets_memory_pool_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "NVLINK")
    found = in_fork(lambda: described(2, drafter(tmp_path), Cache("mha", heads=4)))
    assert found["custom_mem_pool"] == "the target's"


def test_a_drafter_beside_context_parallelism(tmp_path: Path) -> None:
    """Its pages are larger than the target's; other state than linear attention's is not known."""
    skip_unserved("mooncake", "EAGLE3", dcp_size=2)
    path, cache = drafter(tmp_path), Cache("mha", heads=4)
    found = in_fork(lambda: described(2, path, cache, build=larger_pages, dcp=2))
    assert found["draft_kv_head_num"] == 2
    found = in_fork(lambda: described(2, path, cache, dcp=2))
    assert "a drafter with pages of 8 tokens" in found
    dsa = Cache("mla", layers=2, k_bytes=24, index_k=(True, True))
    found = in_fork(lambda: described(2, path, cache, target_cache=dsa, dcp=2))
    assert "state ['dsa']" in found


def test_a_drafter_that_windows_only_its_draft_steps_gets_everything(tmp_path: Path) -> None:
    path = drafter(tmp_path, architectures=["LlamaForCausalLM"])
    assert in_fork(lambda: described(2, path, Cache("mha", heads=4)))["draft_windows"] == (0, 0)


@pytest.mark.parametrize(
    ("backends", "reads"),
    [
        ({"attention_backend": "fa3"}, 512),
        ({"attention_backend": "flashinfer"}, 0),
        ({"attention_backend": "triton"}, 0),
        ({"attention_backend": "flashinfer", "speculative_draft_attention_backend": "fa3"}, 512),
        ({"attention_backend": "fa3", "speculative_draft_attention_backend": "flashinfer"}, 0),
        ({"attention_backend": "fa3", "decode_attention_backend": "flashinfer"}, 0),
        ({"attention_backend": "fa3", "speculative_eagle_topk": 4}, 0),
    ],
)
def test_a_window_counts_where_the_backend_keeps_to_it(
    tmp_path: Path, backends: dict[str, str], reads: int
) -> None:
    """Both sides compare it all the same: their backends may differ."""
    path = drafter(tmp_path)
    found = in_fork(lambda: described(2, path, Cache("mha", heads=4), backends=backends))
    assert (found["draft_window"], found["draft_windows"]) == (512, (reads, reads))


SLIDING, FULL = "sliding_attention", "full_attention"
BLOCK_DRAFTERS = {"DFLASH": "DFlashDraftModel", "DSPARK": "Qwen3DSparkModel"}


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize("algorithm", BLOCK_DRAFTERS)
def test_a_block_drafters_geometry_and_windows(tmp_path: Path, algorithm: str, full: int) -> None:
    """Of K of all layers, then of V. DSPARK ignores the flag."""
    types = [SLIDING] * (6 - full) + [FULL] * full
    path = drafter(
        tmp_path, architectures=[BLOCK_DRAFTERS[algorithm]], model_type="qwen3",
        num_hidden_layers=6, num_key_value_heads=8, sliding_window=100, layer_types=types,
        use_sliding_window=True,
    )  # fmt: skip
    cache = Cache("mha", layers=6, heads=8)
    found = in_fork(lambda: described(2, path, cache, algorithm=algorithm, window=64))
    assert (found["draft_kv_head_num"], found["draft_total_kv_head_num"]) == (4, 8)
    assert found["draft_architecture"] == BLOCK_DRAFTERS[algorithm]
    own = [99] * (6 - full) + [0] * full
    assert found["draft_windows"] == ((64,) * 12 if algorithm == "DFLASH" else (*own, *own))


@pytest.mark.parametrize(
    ("layer_types", "flag", "dspark", "dflash"),
    [
        (None, None, (0, 0, 0), (0, 0, 0)),
        ([FULL] * 3, None, (0, 0, 0), (0, 0, 0)),
        ([SLIDING] * 3, None, (99, 99, 99), (99, 99, 99)),  # without the query's own token
        ([SLIDING, FULL, SLIDING], None, (99, 0, 99), (99, 0, 99)),
        ([SLIDING] * 4 + [FULL], None, (99, 99, 99), (99, 99, 99)),  # more than it has layers
        ([SLIDING] * 2, None, (0, 0, 0), (0, 0, 0)),  # SGLang refuses it
        (None, 64, (0, 0, 0), (64, 64, 64)),
        ([SLIDING] * 3, 64, (99, 99, 99), (64, 64, 64)),
        ([SLIDING] * 3, 512, (99, 99, 99), (99, 99, 99)),
        ([SLIDING, SLIDING, FULL], 64, (99, 99, 0), (64, 64, 64)),
        ([SLIDING, SLIDING, FULL], 512, (99, 99, 0), (99, 99, 512)),
    ],
)
def test_how_far_each_layer_of_a_block_drafter_reads(
    layer_types: list[str] | None, flag: int | None, dspark: tuple[int, ...],
    dflash: tuple[int, ...],
) -> None:  # fmt: skip
    from sglang_mixkv.engine.draft_window import draft_windows

    config = SimpleNamespace(layer_types=layer_types, sliding_window=100)
    found = {
        name: draft_windows(name, model, config, flag, 3) for name, model in BLOCK_DRAFTERS.items()
    }
    assert found == {"DSPARK": dspark, "DFLASH": dflash}


def state_only_pool(cache: Cache, tp: int) -> Any:
    """DeepSeek-V4's drafter: windows without heads, sent as state; no entries of KV."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    pool = object.__new__(DeepSeekV4TokenToKVPool)
    pool.get_contiguous_buf_infos = lambda: ([], [], [])
    return pool


def test_a_drafter_without_kv_entries_is_left_to_sglang(tmp_path: Path) -> None:
    found = in_fork(
        lambda: described(2, drafter(tmp_path), Cache("mla"), build=state_only_pool,
                          algorithm="DSPARK", window=None)
    )  # fmt: skip
    assert found["is_draft_mla_backend"] is None


def test_an_mla_drafter_has_no_heads(tmp_path: Path) -> None:
    found = in_fork(lambda: described(2, drafter(tmp_path), Cache("mla")))
    assert found["is_draft_mla_backend"] is True
    assert found["draft_total_kv_head_num"] is None


def hybrid_pool(cache: Cache, tp: int) -> Any:
    """The pool of a drafter that is one full layer of a hybrid model."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    pool = HybridLinearKVPool.__new__(HybridLinearKVPool)
    pool.full_kv_pool = plain_pool(cache, tp)
    return pool


@pytest.mark.parametrize(
    ("cache", "is_mla"), [(Cache("mha", heads=4), False), (Cache("mla"), True)]
)
def test_a_drafter_in_a_hybrid_pool(tmp_path: Path, cache: Cache, is_mla: bool) -> None:
    found = in_fork(lambda: described(2, drafter(tmp_path), cache, build=hybrid_pool))
    assert found["is_draft_mla_backend"] is is_mla
    assert found["draft_kv_head_num"] == (None if is_mla else 2)


def windowed_pool(cache: Cache, tp: int) -> Any:
    return sglang_pool(Case(1, 1, target=cache, target_window=5), cache, tp, 0, cache.layers)


def scaled_pool(cache: Cache, tp: int) -> Any:
    pool = plain_pool(cache, tp)
    pool.k_scale_buffer = [pool.k_buffer[0]]
    return pool


@pytest.mark.parametrize(
    ("build", "reason"),
    [(windowed_pool, "sliding-window layers have pages of their own"),
     (scaled_pool, "would never send its scales")],
)  # fmt: skip
def test_a_drafter_that_sglang_sends_in_part_does_not_start(
    tmp_path: Path, build: Callable[[Cache, int], Any], reason: str
) -> None:
    cache = Cache("mha", heads=4)
    said = in_fork(lambda: described(2, drafter(tmp_path), cache, build=build))
    assert said.startswith("MixKVError")
    assert reason in said


DSA_TARGET = Cache("mla", layers=2, k_bytes=24, index_k=(True, False))
DSA_DRAFTER = Cache("mla", k_bytes=24, index_k=(True,))


def test_a_dsa_drafter_starts_beside_a_dsa_target(tmp_path: Path) -> None:
    found = in_fork(lambda: described(2, drafter(tmp_path), DSA_DRAFTER, target_cache=DSA_TARGET))
    assert found["is_draft_mla_backend"] is True


@pytest.mark.parametrize(
    ("build", "target"), [(plain_pool, CASE.target), (hybrid_pool, DSA_TARGET)]
)
def test_a_drafter_whose_index_keys_are_not_sent_does_not_start(
    tmp_path: Path, build: Callable[[Cache, int], Any], target: Cache
) -> None:
    """SGLang adds them to the target's, where both are DSA pools with nothing around them."""
    said = in_fork(
        lambda: described(2, drafter(tmp_path), DSA_DRAFTER, build=build, target_cache=target)
    )
    assert "index keys are sent with the target's" in said


def test_entries_by_compression_ratio_do_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V4's pools; its own drafter has no token KV, and is not concerned."""
    from sglang_mixkv.engine import kv_args

    real = kv_args.describe

    def with_ratios(args: Any, *pools: Any) -> None:
        args.mla_compression_ratios = [0, 4, 128]
        real(args, *pools)

    monkeypatch.setattr(kv_args, "describe", with_ratios)
    said = in_fork(lambda: described(2, drafter(tmp_path), Cache("mha", heads=4)))
    assert "ordered by compression ratio" in said


def test_not_opted_in_nothing_is_added(tmp_path: Path) -> None:
    found = in_fork(lambda: described(2, drafter(tmp_path), Cache("mha", heads=4), enabled=False))
    assert set(found.values()) == {None}


def test_a_pool_in_another_layout_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    real = MHATokenToKVPool.__init__

    def other(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.kv_cache_layout = "hnd"

    monkeypatch.setattr(MHATokenToKVPool, "__init__", other)
    said = in_fork(lambda: described(2, drafter(tmp_path), Cache("mha", heads=4)))
    assert said.startswith("MixKVError")
    assert "SGLANG_USE_HND_KVCACHE" in said
