"""SGLang alone moves the target right when its KV args have no drafter: the base of the draft
channel.

Each rank has a drafter's pool, and runs SGLang's own classes with KV args of the target alone. Of
the cases of test_matrix.py, test_random.py and test_dcp.py, compared to the last byte: target, aux
rows and model state have arrived, and decode's draft pool is as it was. Two ways lead to such KV
args: the drafter's pool is hidden while SGLang builds them, or its entries are cut out afterwards.

A sample runs by default, all cases with --full. What SGLang does not move, with a drafter or
without, is in `not_moved` and has tests of its own.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from rig import model
from rig.forks import in_own_process
from rig.model import Cache, Case, Request
from rig.rank import Rank, free_port, strip_drafter
from rig.ring import Outcome, run
from rig.special import Special

from sglang_mixkv.engine.releases import sglang_version

pytestmark = pytest.mark.transports(every=1)

HIDDEN, STRIPPED, APPENDED = (
    {"prefill": way, "decode": way} for way in ("hidden", "stripped", "appended")
)


# ---------------------------------------------------------------- cases of other modules


class Recorded(Exception):
    """A test has called `run` with its first case."""


def record(case: Case) -> None:
    raise Recorded(case)


def cases_of(module: str) -> Iterator[tuple[str, Case]]:
    """The first case of each test of that module and its parameters, named by test and number.
    Tests with fixtures are left out.

    They come from a copy of the module: `run` is replaced in it, and iterators among its
    parameters would be exhausted when pytest reads them."""
    path = Path(__file__).with_name(f"{module}.py")
    spec = importlib.util.spec_from_file_location(f"copy_of_{module}", path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    copy.run = record
    for name, test in vars(copy).items():
        if name.startswith("test_"):
            for number, values in enumerate(parameters_of(test)):
                if values.keys() == inspect.signature(test).parameters.keys():
                    yield f"{name.removeprefix('test_')}-{number}", case_of(test, values)


def parameters_of(test: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """What pytest would call the test with, fixtures apart."""
    axes = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names, rows = mark.args
            if isinstance(names, str):
                names, rows = [names], [getattr(row, "values", [row]) for row in rows]
            rows = [getattr(row, "values", row) for row in rows]
            axes.append([dict(zip(names, row, strict=True)) for row in rows])
    for chosen in itertools.product(*axes):
        yield {name: value for part in chosen for name, value in part.items()}


def case_of(test: Callable[..., None], values: dict[str, Any]) -> Case:
    with pytest.raises(Recorded) as recorded:
        test(**values)
    return recorded.value.args[0]


CASES = {name: list(cases_of(f"test_{name}")) for name in ("matrix", "random", "dcp")}
SAMPLE = {
    "page_sizes_and_page_edges-7",  # MLA, P > D, prefixes, chunks
    "every_byte-7",  # MLA, P < D
    "two_prefill_stages-1",  # MLA
    "gqa_target-1",  # P > D
    "hybrid_target-8",  # GQA, P < D
    "hybrid_target-15",  # GQA, P = D, two stages
    "target_with_a_sliding_window_group-6",  # GQA, P > D
    "from_a_server_without_it-3",  # hybrid MLA, DCP on decode
}
SAMPLE_STRIPPED = {"gqa_target-8", "hybrid_target-15"}


def parameters(
    wanted: Callable[[Case], bool], sample: set[str], modules: tuple[str, ...] = tuple(CASES)
) -> list[Any]:
    """The wanted cases of these modules; all but the sample need --full."""
    return [
        pytest.param(case, id=name, marks=() if name in sample else pytest.mark.full)
        for module in modules
        for name, case in CASES[module]
        if wanted(case)
    ]


def has_drafter_without_state(case: Case) -> bool:
    """Index keys of a DSA drafter are not in the lists that are cut."""
    return case.draft is not None and not case.draft.index_k


def has_mla_drafter(case: Case) -> bool:
    return case.draft is not None and case.draft.is_mla


# ---------------------------------------------------------------- the target is right


def alone(case: Case, draft_args: dict[str, str] = HIDDEN, **special: Any) -> Case:
    """The same case over SGLang's own classes, without what is special of the plugin."""
    is_state = case.special.draft_is_state
    return replace(
        case, backend=model.BACKEND, prefill_mixkv=False, decode_mixkv=False,
        special=Special(draft_is_state=is_state, draft_args=draft_args, **special),
    )  # fmt: skip


def not_moved(case: Case) -> str:
    """Why SGLang 0.5.23 does not move this target, whatever the drafter; empty: it does."""
    unequal, target = case.prefill_tp != case.decode_tp, case.target
    if unequal and case.prefill_dcp > 1:
        return "equal DCP sizes at unequal TP"
    if target.is_mla:
        return ""
    if unequal and target.k_bytes != target.v_bytes:
        return "heads with K and V of unequal width, at unequal TP"
    if case.backend != "nixl":
        return ""
    if target.heads < case.prefill_tp < case.decode_tp:
        return "replicated heads, from fewer ranks to more over NIXL"
    if case.prefill_pp > 1 and not case.hybrid and not unequal:
        return "stages of a target of heads without layer ids, at equal TP over NIXL"
    return ""


def is_right(outcome: Outcome) -> None:
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}, outcome.reasons


def runs_right(case: Case) -> None:
    reason = not_moved(case)
    if reason:
        pytest.skip(reason)
    is_right(run(case))


@pytest.mark.parametrize("case", parameters(lambda _: True, SAMPLE))
def test_the_target_is_right_with_the_drafters_pool_hidden(case: Case) -> None:
    runs_right(alone(case))


@pytest.mark.parametrize(
    "case", parameters(has_drafter_without_state, SAMPLE_STRIPPED, ("matrix", "dcp"))
)
def test_the_target_is_right_with_the_drafters_entries_cut_out(case: Case) -> None:
    runs_right(alone(case, STRIPPED))


@pytest.mark.parametrize("case", parameters(has_mla_drafter, set()))
def test_an_mla_drafter_in_sglangs_lists_is_right(case: Case) -> None:
    """Its rows are alike on all ranks, so SGLang moves it as it moves an MLA target."""
    runs_right(alone(case, APPENDED))


# ---------------------------------------------------------------- KV args


KINDS = {
    "mla": Case(2, 1),
    "mla stages": Case(2, 1, target=Cache("mla", layers=4), prefill_pp=2),
    "gqa": Case(2, 1, target=Cache("mha", layers=4, heads=4), prefill_pp=2),
    "hybrid mla": Case(2, 1, hybrid=True),
    "hybrid gqa": Case(2, 1, target=Cache("mha", layers=4, heads=4), hybrid=True, prefill_pp=2),
    "window": Case(2, 1, target=Cache("mha", layers=2, heads=4), target_window=9),
    "dsa": Case(2, 1, target=Cache("mla", k_bytes=24, index_k=(True,)), page_size=64),
}
# Those of the machine, and those that SGLang sets on one side only and the rig on both.
NOT_COMPARED = {
    "gpu_id", "ib_device", "system_dp_rank", "prefill_start_layer", "prefill_end_layer",
    "kv_head_num", "total_kv_head_num",
}  # fmt: skip


@pytest.mark.mooncake_only
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("kind", KINDS)
@in_own_process
def test_both_ways_give_the_kv_args_that_sglang_builds_without_a_drafter(
    kind: str, side: str
) -> None:
    case = replace(alone(KINDS[kind]), backend="nixl")  # whose KV args have one more list
    last = case.prefill_tp * case.prefill_pp - 1 if side == "prefill" else 0
    rank = Rank(case, side, last, [free_port()])
    want = kv_args_of_sglang(rank, None)
    stripped = SimpleNamespace(**kv_args_of_sglang(rank, rank.sglang_pools["draft"]))
    assert stripped.num_draft_entries > 0
    strip_drafter(stripped)
    assert vars(stripped) == want
    hidden = vars(rank.kv_args())
    names = want.keys() - NOT_COMPARED
    assert {name: hidden.get(name) for name in names} == {name: want[name] for name in names}
    if side == "prefill":
        assert hidden["prefill_start_layer"] == want["prefill_start_layer"]


def kv_args_of_sglang(rank: Rank, draft_pool: Any) -> dict[str, Any]:
    """What `_init_kv_manager` of a rank's queue, given these pools, passes to the manager."""
    from sglang.srt.disaggregation import decode, prefill
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.utils import KVClassType

    def kv_class(_: Any, kind: Any) -> Any:
        if kind == KVClassType.KVARGS:
            return KVArgs
        return lambda args, *_: SimpleNamespace(kv_args=args)

    module, queue = {
        "prefill": (prefill, prefill.PrefillBootstrapQueue),
        "decode": (decode, decode.DecodePreallocQueue),
    }[rank.side]
    with mock.patch.object(module, "get_kv_class", kv_class):
        return vars(queue._init_kv_manager(queue_of(rank, draft_pool)).kv_args)


def queue_of(rank: Rank, draft_pool: Any) -> SimpleNamespace:
    """What `_init_kv_manager` reads of a scheduler's queue."""
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.runtime_context import get_server_args

    case, pool = rank.case, rank.sglang_pools["target"]
    pool.start_layer = rank._stage_layers().start * (2 if case.hybrid else 1)  # of all kinds
    aux = [(rows.ctypes.data, rows.nbytes, rows[0].nbytes) for rows in rank.aux]
    config = SimpleNamespace(
        num_hidden_layers=100, get_total_num_kv_heads=lambda: case.target.heads,
        hf_text_config=SimpleNamespace(full_attention_layer_ids=[*range(1, 100, 2)]),
    )  # fmt: skip
    scheduler = SimpleNamespace(
        rust_server=None, enable_hisparse=False, server_args=get_server_args(), model_config=config,
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(kv_cache_dtype_str="bf16")),
    )  # fmt: skip
    return SimpleNamespace(
        transfer_backend=TransferBackend(case.backend), tp_rank=rank.tp_rank, pp_rank=rank.stage,
        token_to_kv_pool=pool, draft_token_to_kv_pool=draft_pool, scheduler=scheduler,
        is_mla_backend=case.target.is_mla and not case.hybrid, enable_staging=False,
        metadata_buffers=SimpleNamespace(
            get_buf_infos=lambda: [[*column] for column in zip(*aux, strict=True)]
        ),
    )  # fmt: skip


# ---------------------------------------------------------------- without the drafter on one side


DEEP = {"mla": Cache("mla", layers=3, k_bytes=64), "gqa": Cache("mha", layers=3, heads=4)}
ON_PREFILL = {"prefill": "hidden", "decode": "appended"}
ON_DECODE = {"prefill": "appended", "decode": "hidden"}
SHORT = (Request(8),)


@pytest.mark.parametrize("target", DEEP)
def test_hidden_on_prefill_alone_the_target_is_right(target: str) -> None:
    is_right(run(alone(Case(2, 2, target=DEEP[target]), ON_PREFILL)))


def test_hidden_on_prefill_alone_a_gqa_target_as_deep_as_the_drafter_is_wrong() -> None:
    """Twice the layers look like all stages of a model, and V goes to the drafter's K
    (get_mha_kv_ptrs_with_pp)."""
    target = Cache("mha", layers=1, heads=4)
    outcome = run(alone(Case(2, 1, target=target, requests=SHORT), ON_PREFILL))
    assert outcome.statuses == {"success"}
    assert buffers_in(outcome.wrong) == {"0 target entry 1", "0 draft entry 0"}


@pytest.mark.mooncake_only
def test_hidden_on_decode_alone_an_mla_target_is_overwritten() -> None:
    """Without an error: the drafter's K and V go to the last two layers. So decode must not
    register with a prefill rank before it knows that this one hides its drafter as well."""
    if sglang_version() == "0.5.21":
        pytest.skip("a thread of prefill ends there, as below")
    outcome = run(alone(Case(2, 2, target=DEEP["mla"], requests=SHORT), ON_DECODE))
    assert outcome.statuses == {"success"}
    assert buffers_in(outcome.wrong) == {
        f"{rank} target entry {entry}" for rank in (0, 1) for entry in (1, 2)
    }


def buffers_in(wrong: list[str]) -> set[str]:
    return {line.partition(":")[0].removeprefix("decode rank ") for line in wrong}


@pytest.mark.full
@pytest.mark.parametrize("target", DEEP)
def test_hidden_on_decode_alone_a_thread_of_prefill_ends(
    monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Decode has fewer entries. Mooncake's worker raises IndexError (_send_kvcache_generic),
    NIXL's bootstrap thread ValueError (_prepare_payload_xfer): later requests wait in vain."""
    if (model.BACKEND, target) == ("mooncake", "mla"):
        pytest.skip("the test above")
    outcome = serves_nobody(Case(1, 1, target=DEEP[target], requests=SHORT), monkeypatch, ON_DECODE)
    if model.BACKEND == "mooncake":
        assert any("(transfer_worker) has ended" in line for line in outcome.wrong)


# ---------------------------------------------------------------- what SGLang does not move


GQA = Cache("mha", layers=2, heads=4)
WIDE_V, NARROW_V = (replace(GQA, k_bytes=k, v_bytes=v) for k, v in ((4, 12), (8, 4)))
UNEVEN = {"stage_layers": (2, 1)}  # layers of each


def short(prefill_tp: int, decode_tp: int, target: Cache, **kwargs: Any) -> Case:
    return Case(prefill_tp, decode_tp, target=target, requests=SHORT, **kwargs)


def writes_wrong_bytes(case: Case) -> None:
    """Without an error."""
    outcome = run(case)
    assert outcome.statuses == {"success"}
    assert outcome.wrong
    assert all(" target entry " in line for line in outcome.wrong)


def serves_nobody(
    case: Case, monkeypatch: pytest.MonkeyPatch, draft_args: dict[str, str] = HIDDEN
) -> Outcome:
    """No request ends, until it times out."""
    monkeypatch.setattr("rig.rank.LIMIT_S", 20)
    outcome = run(alone(case, draft_args))
    assert any("success" not in report.status for report in outcome.decode)
    assert outcome.reasons == ""
    return outcome


@pytest.mark.full
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_heads_with_a_wider_v_are_wrong(prefill_tp: int, decode_tp: int) -> None:
    """The length of K's rows is taken for V's (send_kvcache_slice, NIXL's
    _init_hetero_tp_prep_handle)."""
    writes_wrong_bytes(alone(short(prefill_tp, decode_tp, WIDE_V)))


@pytest.mark.full
def test_heads_with_a_narrower_v_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end outside the buffers: Mooncake rejects the write, NIXL the list of ranges."""
    if model.BACKEND == "nixl":
        serves_nobody(short(2, 1, NARROW_V), monkeypatch)
    else:
        assert run(alone(short(2, 1, NARROW_V))).statuses == {"failed"}


@pytest.mark.full
@pytest.mark.mooncake_only
@pytest.mark.parametrize("target", [NARROW_V, WIDE_V], ids=["narrow", "wide"])
def test_heads_with_another_v_fail_with_layer_ids(target: Cache) -> None:
    """With layer ids send_kvcache_slice compares the lengths; NIXL does not."""
    assert run(alone(short(2, 1, target, hybrid=True))).statuses == {"failed"}


@pytest.mark.full
@pytest.mark.mooncake_only
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
def test_uneven_stages_of_a_gqa_target_are_wrong(prefill_tp: int, decode_tp: int) -> None:
    """get_mha_kv_ptrs_with_pp guesses where V begins."""
    case = short(prefill_tp, decode_tp, replace(GQA, layers=3), prefill_pp=2)
    writes_wrong_bytes(alone(case, **UNEVEN))


@pytest.mark.full
@pytest.mark.parametrize("hybrid", [False, True])
def test_uneven_stages_of_a_gqa_target_at_unequal_tp(hybrid: bool) -> None:
    """Mooncake uses layer ids where there are any; NIXL guesses all the same."""
    case = alone(short(2, 1, replace(GQA, layers=3), hybrid=hybrid, prefill_pp=2), **UNEVEN)
    if hybrid and model.BACKEND == "mooncake":
        is_right(run(case))
    else:
        writes_wrong_bytes(case)


@pytest.mark.full
@pytest.mark.parametrize("hybrid", [False, True])
def test_uneven_stages_of_an_mla_target_are_right(hybrid: bool) -> None:
    case = short(2, 1, Cache("mla", layers=3), hybrid=hybrid, prefill_pp=2)
    is_right(run(alone(case, **UNEVEN)))


@pytest.mark.full
def test_stages_of_a_gqa_target_at_equal_tp(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL asks for layer ids, which this pool does not have (build_transfer_entry_pairs)."""
    case = short(1, 1, GQA, prefill_pp=2)
    if model.BACKEND == "nixl":
        serves_nobody(case, monkeypatch)
    else:
        is_right(run(alone(case)))


@pytest.mark.full
def test_replicated_heads_from_fewer_ranks_to_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL counts no group of heads, and an assertion fails (_init_hetero_tp_prep_handle)."""
    case = short(2, 4, replace(GQA, heads=1))
    if model.BACKEND == "nixl":
        serves_nobody(case, monkeypatch)
    else:
        is_right(run(alone(case)))


@pytest.mark.full
def test_equal_dcp_at_unequal_tp_serves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """requires_dcp_relayout raises in the bootstrap thread."""
    serves_nobody(short(4, 2, Cache("mla"), prefill_dcp=2, dcp=2), monkeypatch)


@pytest.mark.full
@pytest.mark.mooncake_only
@pytest.mark.parametrize(("chunk_pages", "status"), [(0, "failed"), (64, "success")])
def test_heads_of_long_chunks_fail_over_mooncakes_tcp(chunk_pages: int, status: str) -> None:
    """At unequal TP each token is a range, and one call with more than 2,048 of them fails."""
    request = Request(4096, chunk_pages=chunk_pages)
    target = Cache("mha", heads=4)
    outcome = run(alone(Case(2, 1, target=target, page_size=16, requests=(request,))))
    assert outcome.wrong == []
    assert outcome.statuses == {status}


# ---------------------------------------------------------------- guards


@pytest.mark.mooncake_only
@pytest.mark.parametrize("what", ["target", "aux", "state"])
def test_a_wrong_byte_is_found(what: str) -> None:
    def spoil(rank: Rank) -> None:
        memory = {"target": rank.pools["target"], "aux": rank.aux, "state": [*rank.state.values()]}
        memory[what][0][:] ^= 1

    faults = {("prefill", rank): spoil for rank in range(2)}
    outcome = run(alone(Case(2, 1, hybrid=True, requests=SHORT), faults=faults))
    assert outcome.wrong
    assert all(line.startswith(f"decode rank 0 {what}") for line in outcome.wrong)


@pytest.mark.mooncake_only
def test_a_byte_written_to_the_draft_pool_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter's entries stay in, and SGLang moves them: at equal TP to the right place."""
    monkeypatch.setattr("rig.rank.strip_drafter", lambda _: None)
    outcome = run(alone(Case(2, 2, requests=SHORT), STRIPPED))
    assert outcome.statuses == {"success"}
    assert buffers_in(outcome.wrong) == {f"{r} draft entry {n}" for r in (0, 1) for n in (0, 1)}


@pytest.mark.parametrize("target", [Cache("mla", layers=2), GQA], ids=["mla", "gqa"])
def test_with_the_drafter_in_its_lists_sglang_is_wrong(target: Cache) -> None:
    case = Case(2, 1, target=target, draft=Cache("mha", heads=8), requests=SHORT)
    outcome = run(alone(case, APPENDED))
    assert outcome.wrong or outcome.statuses != {"success"}
