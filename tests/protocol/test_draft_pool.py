"""The channel moves only SGLang's draft pools with KV heads, and publishes facts about them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rig.process import forks
from rig.ring.model import Cache, Case, Request, sglang_pool

import mixkv_demo
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout
from sglang_mixkv.engine import draft_pool, pool_hooks
from sglang_mixkv.errors import MixKVError

MODELS = Path(mixkv_demo.__file__).parent / "models"
CASE = Case(4, 1, requests=(Request(8),))
BLOCK_DRAFTERS = {"DFLASH": "DFlashDraftModel", "DSPARK": "Qwen3DSparkModel"}


def in_fork(what: Callable[[], Any]) -> Any:
    """Call the function in a fork, so that its global changes stay there, and return its result or
    the exception's text."""
    return forks.in_fork(what, lambda error: f"{type(error).__name__}: {error}")


def plain_pool(cache: Cache, tp: int) -> Any:
    """Make the kind of pool that SGLang builds for nearly every drafter."""
    return sglang_pool(CASE, cache, tp, 0, cache.layers)


def larger_pages(cache: Cache, tp: int) -> Any:
    """Make the drafter's pool of a server with a DCP size of 2."""
    return sglang_pool(CASE, cache, tp, 0, cache.layers, dcp=2)


def drafter(tmp_path: Path, **changed: Any) -> Path:
    """Write the demo drafter's configuration with these changes, and return its folder."""
    config = json.loads((MODELS / "mla" / "drafter" / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def made_of(
    pool: Callable[[Cache, int], Any], cache: Cache, tp: int, drafter: Path, algorithm: str,
    flags: dict[str, Any],
) -> Any:  # fmt: skip
    """Return the layout, page size, bytes per head and window that rank 0 of a decode server of TP
    `tp` derives from this pool."""
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.runtime_context import get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=str(MODELS / "mla" / "target"), tp_size=tp, device="cpu",
        disaggregation_mode="decode", speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(drafter), speculative_num_steps=3,
        speculative_eagle_topk=1, speculative_num_draft_tokens=4,
        attention_backend="torch_native", disable_overlap_schedule=True,
    )  # fmt: skip
    args.resolve_once()
    declare_resolution(args, "test", speculative_algorithm=algorithm, **flags)
    publish(args, role="tokenizer")
    get_parallel().override_permanently(attn_tp_size=tp, attn_tp_rank=0)
    made = draft_pool.of_pool(pool(cache, tp))
    return made.layout, made.page_size, made.rows.bytes_per_head, made.window


def found(
    tmp_path: Path, cache: Cache, tp: int = 2, build: Callable[[Cache, int], Any] = plain_pool,
    algorithm: str = "EAGLE3", flags: dict[str, Any] | None = None, **config: Any,
) -> Any:  # fmt: skip
    path = drafter(tmp_path, **config)
    return in_fork(lambda: made_of(build, cache, tp, path, algorithm, flags or {}))


@pytest.mark.parametrize(("tp", "heads"), [(1, 4), (2, 4), (4, 4), (8, 4), (4, 8), (8, 2)])
def test_total_heads_come_from_the_model_configuration(tmp_path: Path, tp: int, heads: int) -> None:
    """The total comes from the model's configuration. Heads per rank times TP would be too many if
    heads are replicated: 8 ranks with one head each may have 4 heads in total."""
    cache = Cache("mha", heads=heads)
    layout, page_size, width, _ = found(tmp_path, cache, tp, num_key_value_heads=heads)
    assert layout.facts.total_heads == heads
    assert len(layout.heads) == max(1, heads // tp)
    assert layout.facts.architecture == "LlamaForCausalLMEagle3"
    assert (page_size, width) == (CASE.page_size, sum(cache.widths()))
    assert len(layout.facts.head_bytes) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_dtypes_are_distinguished(tmp_path: Path, dtype: str) -> None:
    """The published dtype is that of the pool, not of its buffers: SGLang stores every 8-bit dtype
    as uint8."""
    layout, *_ = found(tmp_path, Cache("mha", heads=4, dtype=dtype), num_key_value_heads=4)
    assert layout.facts.dtype == dtype
    assert layout.facts.head_bytes == (8, 8)


@pytest.mark.parametrize("algorithm", BLOCK_DRAFTERS)
def test_a_block_drafter_publishes_all_its_layers(tmp_path: Path, algorithm: str) -> None:
    """A pool's entries are K of each layer, then V of each layer."""
    config = {"architectures": [BLOCK_DRAFTERS[algorithm]], "model_type": "qwen3",
              "num_hidden_layers": 6, "num_key_value_heads": 8}  # fmt: skip
    cache = Cache("mha", layers=6, heads=8)
    layout, *_ = found(tmp_path, cache, algorithm=algorithm, **config)
    assert (len(layout.heads), layout.facts.total_heads) == (4, 8)
    assert (layout.facts.algorithm, len(layout.facts.head_bytes)) == (algorithm, 12)


def test_a_drafters_pages_are_larger_with_dcp(tmp_path: Path) -> None:
    _, page_size, *_ = found(tmp_path, Cache("mha", heads=4), build=larger_pages)
    assert page_size == 2 * CASE.page_size


SLIDING, FULL = "sliding_attention", "full_attention"
W, FA3 = {"speculative_draft_window_size": 512}, {"attention_backend": "fa3"}
FLASHINFER = {"attention_backend": "flashinfer"}
BLOCK = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 128}


@pytest.mark.parametrize(
    ("algorithm", "flags", "config", "window"),
    [
        ("EAGLE3", FA3, {}, None),
        ("EAGLE3", W | FA3, {}, 512),
        ("EAGLE3", W | FLASHINFER | {"speculative_draft_attention_backend": "fa3"}, {}, 512),
        ("EAGLE3", W | FA3 | {"speculative_draft_attention_backend": "flashinfer"}, {}, None),
        ("EAGLE3", W | FA3 | {"decode_attention_backend": "flashinfer"}, {}, None),
        ("EAGLE3", W | {"attention_backend": "triton"}, {}, None),
        ("EAGLE3", W | FA3 | {"speculative_eagle_topk": 4}, {}, None),
        ("EAGLE3", W | FA3 | {"speculative_draft_sink_size": 4}, {}, None),
        ("EAGLE3", W | FA3 | {"disaggregation_decode_enable_radix_cache": True}, {}, None),
        ("EAGLE3", W | FA3, {"architectures": ["Qwen3ForCausalLMEagle3"]}, None),
        ("DFLASH", W | FLASHINFER, {"layer_types": [FULL]}, 512),
        ("DFLASH", FA3, {"layer_types": [SLIDING]}, 127),
        ("DFLASH", FA3, {"layer_types": [SLIDING, FULL], "num_hidden_layers": 2}, None),
        ("DFLASH", FLASHINFER, {"layer_types": [SLIDING]}, None),
        ("DSPARK", W | FA3, {"layer_types": [SLIDING]}, 127),
    ],
)
def test_the_window_of_a_drafter(
    tmp_path: Path, algorithm: str, flags: Any, config: Any, window: int | None
) -> None:
    """A window of None means the whole prompt, and is also the result if the window is unknown."""
    if algorithm in BLOCK_DRAFTERS:
        config = BLOCK | {"architectures": [BLOCK_DRAFTERS[algorithm]], **config}
    cache = Cache("mha", heads=4)
    *_, reads = found(tmp_path, cache, algorithm=algorithm, flags=flags, **config)
    assert reads == window


def changed(**attributes: Any) -> Callable[[Cache, int], Any]:
    """Make a plain pool with these attributes."""

    def build(cache: Cache, tp: int) -> Any:
        pool = plain_pool(cache, tp)
        vars(pool).update(attributes)
        return pool

    return build


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (changed(k_scale_buffer=[None]), "have block scales"),
        (changed(kv_cache_layout="hnd"), "SGLANG_USE_HND_KVCACHE"),
        (changed(head_num=4), "a pool of 4 heads where rank 0 of 2 should have 2 of 4"),
    ],
    ids=["scales", "another layout", "other heads"],
)
def test_a_pool_that_cannot_be_split_by_heads_is_refused(
    tmp_path: Path, build: Callable[[Cache, int], Any], reason: str
) -> None:
    answer = found(tmp_path, Cache("mha", heads=4), build=build)
    assert answer.startswith("MixKVError: [MIXKV-START-05]")
    assert reason in answer


@pytest.mark.parametrize("scale", draft_pool.SCALES)
def test_a_pool_with_scales_of_any_name_is_refused(scale: str) -> None:
    pool = plain_pool(Cache("mha", heads=4), 2)
    setattr(pool, scale, [])
    with pytest.raises(MixKVError, match=r"MIXKV-START-05.*block scales"):
        draft_pool.of_pool(pool)


def test_a_pool_without_a_known_layout_is_refused() -> None:
    with pytest.raises(MixKVError, match=r"MIXKV-START-05.*SimpleNamespace with layout None"):
        draft_pool.of_pool(SimpleNamespace())


@pytest.mark.parametrize("algorithm", ["EAGLE3", None])
def test_each_fact_comes_from_its_own_source(
    algorithm: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On rank 3 of 4, with V narrower than K, all sources of facts have different values."""
    cache = Cache("mha", layers=2, heads=8, k_bytes=16)
    pool = sglang_pool(CASE, cache, 4, 3, cache.layers)
    pool.maybe_get_custom_mem_pool = lambda: "its memory"
    config = SimpleNamespace(architectures=["First", "Second"])
    model = SimpleNamespace(hf_config=config, get_total_num_kv_heads=lambda: 8)
    spec = SimpleNamespace(speculative_algorithm=algorithm)
    for name, value in {
        "model_config": model, "get_spec": spec, "get_server_args": "the arguments",
        "get_parallel": SimpleNamespace(attn_tp_size=4, attn_tp_rank=3),
    }.items():  # fmt: skip
        monkeypatch.setattr(draft_pool, name, lambda value=value: value)
    monkeypatch.setattr(draft_pool, "resolved_view", lambda args: f"{args}, resolved")
    monkeypatch.setattr(draft_pool, "window_of", lambda *given: given)
    made = draft_pool.of_pool(pool)
    facts = DraftFacts("First", algorithm or "", 8, (16, 16, 8, 8), "bfloat16")
    assert made.layout == DraftLayout(facts, 4, 3)
    assert made.window == ("the arguments, resolved", config)
    assert (made.page_size, made.mem_pool) == (CASE.page_size, "its memory")
    entries = [e.data_ptr() for e in (*pool.k_buffer, *pool.v_buffer)]
    assert [e.data_ptr() for e in made.rows.entries] == entries
    assert (made.rows.head_bytes, made.rows.heads) == (facts.head_bytes, range(6, 8))


def test_the_drafters_configuration_is_loaded_as_sglang_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = {"speculative_draft_model_path": "a path", "speculative_draft_model_revision": "main"}
    monkeypatch.setattr(draft_pool, "get_spec", lambda: SimpleNamespace(**spec))
    monkeypatch.setattr(draft_pool, "get_server_args", lambda: "the arguments")
    asked = SimpleNamespace(from_server_args=lambda *args, **kwargs: (args, kwargs))
    monkeypatch.setattr(draft_pool, "ModelConfig", asked)
    args, kwargs = draft_pool.model_config()
    assert args == ("the arguments",)
    assert kwargs == {"model_path": "a path", "model_revision": "main", "is_draft_model": True}


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("mla", [True, False])
@pytest.mark.parametrize("count", [0, 2])
def test_sglang_moves_a_drafter_only_with_an_mla_target(
    count: int, mla: bool, hybrid: bool
) -> None:
    kv_args = SimpleNamespace(num_draft_entries=count, is_hybrid_mla_backend=hybrid)
    is_served = not count or mla or hybrid
    with nullcontext() if is_served else pytest.raises(MixKVError, match=r"START-05.*2 drafter"):
        draft_pool.check_appended(kv_args, mla)


# ---------------------------------------------------------------- which pools are hidden


class Queue:
    """A stand-in for SGLang's queue with this draft pool. `seen`: the queue's pool and the current
    pool context during `_init_kv_manager`."""

    def __init__(self, pool: Any) -> None:
        self.draft_token_to_kv_pool, self.seen = pool, None
        self.scheduler = SimpleNamespace()

    def init(self) -> Any:
        self.seen = self.draft_token_to_kv_pool, pool_hooks.current()
        return manager_of([1, 2], [[3]])


def manager_of(entries: list[int], state: list[list[int]], **local: Any) -> Any:
    """Make a stand-in for the plugin's manager with these pointers."""
    args = SimpleNamespace(kv_data_ptrs=entries, state_data_ptrs=state)
    return SimpleNamespace(kv_args=args, **({"local": None} | local))


def hidden(pool: Any) -> bool:
    queue = Queue(pool)
    pool_hooks.around_init(Queue.init, queue)
    seen, handed = queue.seen
    assert queue.draft_token_to_kv_pool is pool
    assert handed.scheduler is queue.scheduler
    assert pool_hooks.current().pool is None
    whole = getattr(pool, "full_kv_pool", pool)
    assert (seen, handed.pool) == ((None, whole) if handed.pool is not None else (pool, None))
    return handed.pool is not None


def of_heads() -> Any:
    return plain_pool(Cache("mha", heads=4), 2)


def of_mla(cache: Cache) -> Any:
    return sglang_pool(Case(4, 1, page_size=64), cache, 2, 0, cache.layers)


@pytest.mark.parametrize(
    ("pool", "is_hidden"),
    [
        (of_heads, True),
        (lambda: SimpleNamespace(full_kv_pool=of_heads()), True),  # nested in a hybrid pool
        (lambda: of_mla(Cache("mla")), False),
        (lambda: of_mla(Cache("mla", k_bytes=24, index_k=(True,))), False),  # sent as state
        (lambda: None, False),
        (lambda: SimpleNamespace(windows=[128]), False),  # DeepSeek-V4's, which has no heads
    ],
    ids=["heads", "hybrid", "mla", "index keys", "none", "windows"],
)
@forks.in_own_process
def test_only_a_pool_with_heads_is_hidden_from_sglang(
    pool: Callable[[], Any], is_hidden: bool
) -> None:
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path="dummy"), role="tokenizer")
    assert hidden(pool()) == is_hidden


@pytest.mark.parametrize("inner", [of_heads, lambda: of_mla(Cache("mla"))], ids=["heads", "mla"])
@forks.in_own_process
def test_a_pool_with_sliding_window_layers_is_refused(
    inner: Callable[[], Any],
) -> None:
    """SWAKVPool keeps its full-attention layers in an inner pool, and the channel would move only
    that pool."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path="dummy"), role="tokenizer")
    queue = Queue(pool := SWAKVPool.__new__(SWAKVPool))
    pool.full_kv_pool = inner()
    with (
        pytest.raises(MixKVError, match=r"MIXKV-START-05.*SWAKVPool: its sliding-window layers")
        if inner is of_heads
        else nullcontext()
    ):
        pool_hooks.around_init(Queue.init, queue)
    assert queue.draft_token_to_kv_pool is pool
    assert (queue.seen is None) == (inner is of_heads), (
        "SGLang's function must not run for a refused pool"
    )


def test_the_pool_is_restored_if_sglang_raises() -> None:
    def fails(_queue: Queue) -> None:
        raise ZeroDivisionError

    queue = Queue(pool := of_heads())
    with pytest.raises(ZeroDivisionError):
        pool_hooks.around_init(fails, queue)
    assert queue.draft_token_to_kv_pool is pool
    assert pool_hooks.current().pool is None


@pytest.mark.parametrize("shape", ["a component of state", "an entry", "another plugin's manager"])
def test_a_manager_that_still_moves_a_hidden_pool_is_refused(shape: str) -> None:
    """The cases occur in branches of SGLang and in other projects: a drafter's KV that is sent as
    state, and a manager that wraps the class from `get_kv_class`."""
    pool = of_heads()
    value = pool.v_buffer[-1].data_ptr()

    def builds(_: Queue) -> Any:
        made = manager_of([1, value * (shape == "an entry")], [[2], [3, value]])
        if shape != "a component of state":
            made.kv_args.state_data_ptrs = []
        if shape == "another plugin's manager":
            del made.local
        return made

    queue = Queue(pool)
    with pytest.raises(MixKVError, match=r"MIXKV-START-05.*SimpleNamespace") as raised:
        pool_hooks.around_init(builds, queue)
    count = shape != "another plugin's manager"
    assert f"with {count:d} of the drafter's buffers" in str(raised.value)
    assert queue.draft_token_to_kv_pool is pool


def test_no_pool_is_hidden_without_opting_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_mixkv import plugin

    monkeypatch.setattr(plugin, "_published", lambda: None)
    queue = Queue(pool := plain_pool(Cache("mha", heads=4), 2))
    plugin._around("engine.pool_hooks.around_init", Queue.init, queue)
    assert queue.seen[0] is pool
