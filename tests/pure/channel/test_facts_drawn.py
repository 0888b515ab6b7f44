"""Published rows: the bounds of each field, and the targets that SGLang moves wrongly."""

from __future__ import annotations

import inspect
import itertools
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from sglang_mixkv.channel.handshake import Row, StagingFacts, Target, read_row
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.config import Config
from sglang_mixkv.decode import compare
from sglang_mixkv.decode.compare import Difference, Severity, differences
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout

DRAFT = DraftLayout(DraftFacts("LlamaEagle3", "EAGLE3", 8, (256, 256), "bfloat16"), 2, 0)
STAGING = StagingFacts("nixl", b"agent", 1 << 40, 1 << 20, 64)
ROW = Row(
    PROTOCOL, "0.3.0", "0.5.23", b"instance", "10.0.0.1", 9000, "tcp://10.0.0.1:9001", 2, 0, 0,
    (64, 128), "nixl", Target(8, 8, layer_ids=False, even=True, widths=(8,), units=(8,)), 1, DRAFT,
    STAGING, 1.0,
)  # fmt: skip

# ---------------------------------------------------------------- bounds

BIG, RANK, COUNT = (1 << 63) - 1, 1 << 16, 1 << 20
NUMBERS = {
    "rank_port": (0, 65535), "attn_tp": (0, RANK), "attn_tp_rank": (0, RANK), "pp_rank": (0, RANK),
    "topk": (0, RANK), "protocol.1": (PROTOCOL[1], RANK), "aux_item_lens.0": (0, BIG),
    "target.heads": (0, COUNT), "target.entries": (0, COUNT), "target.stages": (1, RANK),
    "target.dcp": (1, RANK), "target.drafts": (0, COUNT), "target.widths.0": (0, BIG),
    "target.units.0": (0, BIG), "draft.tp": (1, RANK), "draft.rank": (0, RANK),
    "draft.facts.total_heads": (1, RANK), "draft.facts.head_bytes.0": (1, COUNT),
    "staging.base": (0, BIG), "staging.slot_bytes": (1, 1 << 40), "staging.slots": (2, COUNT),
}  # fmt: skip
LENGTHS = {
    "aux_item_lens": (0, 256, [1]), "draft.facts.head_bytes": (1, 1024, [1]),
    "target.states": (0, 64, ["x"]), "target.widths": (0, 64, [1]), "target.units": (0, 64, [1]),
    **dict.fromkeys(
        ("plugin", "engine", "rank_ip", "address", "backend", "draft.facts.architecture",
         "draft.facts.algorithm", "draft.facts.dtype", "staging.data_plane"), (0, 256, "x")),
}  # fmt: skip


def with_value(path: str, value: Any) -> Any:
    """Read ROW with one value replaced at `path`, and return the value that was read there."""
    tree = json.loads(msgspec.json.encode(ROW))
    *above, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place = tree
    for key in above:
        place = place[key]
    place[last] = value
    found = msgspec.to_builtins(read_row(json.dumps(tree).encode()), builtin_types=(bytes,))
    for key in (*above, last):
        found = found[key]
    return found


def test_every_field_has_bounds() -> None:
    """Each field of a row has bounds in NUMBERS or LENGTHS. Add a new field there."""
    paths = set[str]()

    def walk(value: Any, path: str) -> None:
        if isinstance(value, msgspec.Struct):
            for name in value.__struct_fields__:
                walk(getattr(value, name), f"{path}.{name}".lstrip("."))
        elif not isinstance(value, (bool, bytes, float)):
            paths.add(path)

    walk(ROW, "")
    assert paths == set(LENGTHS) | {p.removesuffix(".0").removesuffix(".1") for p in NUMBERS}


# For each number that both sides have, a test in which the two sides differ. Otherwise no test
# would fail if the code used one side's number instead of the other's.
BY_RANK = "protocol/test_matrix.py::test_every_byte"
BYTES = "protocol/test_random.py::test_random_case"
BUFFERS = "pure/channel/test_facts.py::test_buffers_of_both_sides_must_match"
NEWEST = "pure/decode/test_plan_drawn.py::test_a_pair_uses_the_newest_version_of_all_ranks"
COMPARED = "pure/channel/test_facts.py::test_the_differences_between_two_rows"
UNLIKE = {
    "config.staging_mb": BYTES, "config.patience": BYTES,
    "config.port": "protocol/test_manager.py::test_the_configured_port_is_used_or_any_free_one",
    "protocol": NEWEST,
    **dict.fromkeys(("rank_port", "attn_tp", "attn_tp_rank", "draft.tp", "draft.rank"), BY_RANK),
    "pp_rank": "protocol/test_matrix.py::test_dcp_from_stages_of_one_rank",
    "aux_item_lens": COMPARED, "topk": COMPARED,
    "target.stages": "protocol/test_matrix.py::test_dcp_from_stages_of_one_rank",
    "target.dcp": "protocol/test_matrix.py::test_dcp_from_a_server_without_it",
    **dict.fromkeys(
        ("target.heads", "target.entries", "target.drafts", "target.widths", "target.units"),
        BUFFERS,
    ),
    "draft.facts.total_heads": COMPARED, "draft.facts.head_bytes": COMPARED,
    **dict.fromkeys(("staging.base", "staging.slot_bytes", "staging.slots"), BYTES),
    "patience": "pure/test_times.py::test_the_smaller_patience_limits_the_use_of_a_slot",
}  # fmt: skip


def test_each_number_differs_between_the_sides() -> None:
    """Each number of a row or of the settings differs between the sides in a test named in UNLIKE.

    Add a new number to UNLIKE.
    """
    numbers = {path.removesuffix(".0").removesuffix(".1") for path in NUMBERS} | {"patience"}
    for name in Config.__struct_fields__:
        if type(getattr(Config(), name)) in (int, float):
            numbers.add(f"config.{name}")
    assert set(UNLIKE) == numbers
    for file, _, test in (where.partition("::") for where in UNLIKE.values()):
        code = (Path(__file__).parents[2] / file).read_text()
        assert f"\ndef {test}(" in code, f"{file} has no {test}"


@pytest.mark.parametrize("path", NUMBERS)
def test_a_number_at_and_beyond_its_bounds(path: str) -> None:
    least, most = NUMBERS[path]
    for value in (least, most):
        assert with_value(path, value) == value
    for value in (least - 1, most + 1):
        with pytest.raises(ValueError):  # noqa: PT011
            with_value(path, value)


@pytest.mark.parametrize("path", LENGTHS)
def test_a_name_and_a_list_at_and_beyond_their_lengths(path: str) -> None:
    least, most, item = LENGTHS[path]
    for count in (least, most):
        assert len(with_value(path, item * count)) == count
    for count in (least - 1, most + 1):
        with pytest.raises(ValueError):  # noqa: PT011
            with_value(path, item * count if count >= 0 else None)


def test_patience_instance_and_endpoint_have_bounds() -> None:
    for value, fits in ((0.1, True), (60, True), (0.09, False), (60.1, False)):
        if fits:
            assert with_value("patience", value) == value
        else:
            with pytest.raises(ValueError):  # noqa: PT011
                with_value("patience", value)
    for count, fits in ((0, True), (32 << 10, True), ((32 << 10) + 1, False)):
        staging = replace(STAGING, endpoint=b"x" * count)
        data = msgspec.json.encode(replace(ROW, staging=staging))
        if fits:
            assert read_row(data).staging == staging
        else:
            with pytest.raises(ValueError):  # noqa: PT011
                read_row(data)
    for count in (7, 9):
        with pytest.raises(ValueError):  # noqa: PT011
            read_row(msgspec.json.encode(replace(ROW, instance=b"x" * count)))


def test_fields_that_older_releases_lack_have_defaults() -> None:
    tree = json.loads(msgspec.json.encode(ROW))
    for name in ("topk", "draft", "staging", "patience"):
        del tree[name]
    for name in ("stages", "dcp"):
        del tree["target"][name]
    read = read_row(json.dumps(tree).encode())
    assert (read.topk, read.draft, read.staging, read.patience) == (0, None, None, 1.0)
    assert (read.target.stages, read.target.dcp) == (1, 1)


OLDEST, NEWEST = PROTOCOL


@pytest.mark.parametrize(
    ("protocol", "read"),
    [
        ((NEWEST, NEWEST), True), ((OLDEST, OLDEST), True), ((0, OLDEST), True),
        ((NEWEST, NEWEST + 1), True), ((0, NEWEST + 9), True), ((NEWEST + 1, NEWEST + 1), False),
        ((0, OLDEST - 1), False), ((OLDEST - 1, OLDEST - 1), False), ((NEWEST, OLDEST - 1), False),
    ],
)  # fmt: skip
def test_a_row_with_a_common_protocol_version_is_read(
    protocol: tuple[int, int], read: bool
) -> None:
    data = msgspec.json.encode(replace(ROW, protocol=protocol))
    if read:
        assert read_row(data).protocol == protocol
    else:
        with pytest.raises(ValueError, match="protocol"):
            read_row(data)


# ---------------------------------------------------------------- targets


def wrong(prefill: Row, decode: Row) -> set[str]:
    """Return the differences between two rows that make SGLang move the target wrongly."""
    source, wanted, over_nixl = prefill.target, decode.target, prefill.backend == "nixl"
    same_tp, has_heads = prefill.attn_tp == decode.attn_tp, 0 not in (source.heads, wanted.heads)
    splits = source.stages > wanted.stages and has_heads  # a stage has only some of decode's layers
    found = {
        # With equal sizes, each rank sends its tokens to the rank of the same number. From a
        # prefill server without DCP, SGLang distributes MLA only.
        "--dcp-size": (source.dcp, prefill.attn_tp) != (wanted.dcp, decode.attn_tp)
        if source.dcp > 1
        else wanted.dcp > 1 and source.heads > 0,
        # SGLang pairs the buffers of equal stages by index.
        "buffers of the target": source.stages == wanted.stages
        and source.entries != wanted.entries,
        # SGLang cuts rows by the width of K.
        "target with K and V": has_heads and not (same_tp or source.even),
        # SGLang divides by the number of heads per prefill rank, which is 0.
        "target with": (
            has_heads and over_nixl and decode.attn_tp > prefill.attn_tp > source.heads
        ),
        # SGLang computes a stage's first layer as the stage's number times its number of buffers.
        "pipeline stages of different": False,
        "pipeline stages of a target": False,
    }
    if splits and (not source.layer_ids or (over_nixl and not same_tp)):
        unlike = source.entries * source.stages != wanted.entries * wanted.stages
        found["pipeline stages of different"] = unlike
        found["pipeline stages of a target"] = (
            over_nixl and same_tp and not unlike and not source.layer_ids
        )
    return {what for what, is_wrong in found.items() if is_wrong}


def names(found: list[Difference]) -> set[str]:
    known = (
        "--dcp-size", "buffers of the target", "target with K and V", "target with",
        "pipeline stages of different", "pipeline stages of a target",
    )  # fmt: skip
    return {next(name for name in known if one.what.startswith(name)) for one in found}


def test_targets_that_sglang_moves_wrongly_are_refused() -> None:
    seen = set[str]()
    targets = [
        Target(heads, entries, layer_ids=layer_ids, even=even, stages=stages, dcp=dcp)
        for heads, entries, layer_ids, even, stages, dcp in itertools.product(
            (0, 1, 2), (2, 4), (False, True), (False, True), (1, 2), (1, 2)
        )
    ]
    ones = [t for t in targets if t.even and not t.layer_ids and t.heads != 1]
    for source, wanted, backend in itertools.product(targets, ones, ("mooncake", "nixl")):
        for there, here in itertools.product((1, 2, 4), repeat=2):
            prefill = replace(ROW, target=source, backend=backend, attn_tp=there)
            decode = replace(ROW, target=wanted, backend=backend, attn_tp=here)
            found = differences(prefill, decode)
            assert names(found) == wrong(prefill, decode), (prefill, decode)
            assert len(found) == len(names(found))
            assert all(one.severity is Severity.REFUSED for one in found)
            seen |= names(found)
    assert len(seen) == 6


# ---------------------------------------------------------------- releases and messages

RELEASES = ("0.5.21", "0.5.22", "0.5.23", "0.5.24", "0.6")
SERVED = {
    "mooncake": {("0.5.21", "0.5.22"), ("0.5.21", "0.5.23"), ("0.5.22", "0.5.23")},
    "nixl": {("0.5.21", "0.5.22")},
    "another": set(),
}


@pytest.mark.parametrize("backend", SERVED)
def test_equal_releases_and_known_mixes_are_served(backend: str) -> None:
    for old, new in itertools.product(RELEASES, repeat=2):
        for more in ("", "+cu130", ".post1", "rc2"):
            sides = (
                replace(ROW, engine=engine, backend=backend) for engine in (old + more, new + more)
            )
            found = differences(*sides)
            served = old == new or (old, new) in SERVED[backend]
            assert [one.what for one in found] == (
                [] if served else [f"SGLang's release over {backend}"]
            )
            others = sorted(there for here, there in SERVED[backend] if here == old)
            for one in found:
                assert (one.prefill, one.decode) == (old, new)
                assert one.remedy.endswith(" on decode") == bool(others)
                assert all(other in one.remedy for other in others)


def changed(**fields: Any) -> dict[str, Target]:
    return {"target": replace(ROW.target, **fields)}


def drafter(**fields: Any) -> dict[str, DraftLayout]:
    return {"draft": replace(DRAFT, facts=replace(DRAFT.facts, **fields))}


MINIMAX = {"states": ("minimax_index_k",)}
TPS, ONE_STAGE = ("attention TP 2", "attention TP 4"), ("2 stages", "1")
NAMED = [  # prefill's fields, decode's, the difference between them, and both sides' values
    ({"backend": "nixl"}, {"backend": "mooncake"}, "transfer backend", ("nixl", "mooncake")),
    ({"engine": "0.5.23"}, {"engine": "0.6.0"}, "SGLang's release", ("0.5.23", "0.6.0")),
    ({"attn_tp": 2, **changed(dcp=2)}, {"attn_tp": 4}, "--dcp-size",
     ("2 at attention TP 2", "1 at attention TP 4")),
    (changed(entries=9), {}, "buffers of the target", ("9", "8")),
    (changed(drafts=2), {}, "buffers of the MLA drafter", ("2", "0")),
    (changed(states=("swa", "mamba")), {}, "state of the target", ("mamba, swa", "none")),
    (changed(widths=(24, 16)), {}, "bytes of a token of the target", ("4, 6", "2")),
    (changed(units=(96,)), {}, "bytes of a row of linear-attention state", ("96", "8")),
    (changed(**MINIMAX), {"attn_tp": 4, **changed(**MINIMAX)}, "target with minimax_index_k", TPS),
    (changed(stages=2, **MINIMAX), changed(**MINIMAX), "pipeline stages of a MiniMax", ONE_STAGE),
    (changed(even=False), {"attn_tp": 4}, "target with K and V", TPS),
    (changed(heads=1), {"attn_tp": 4}, "target with 1 KV heads", TPS),
    (changed(stages=2, entries=3), {}, "pipeline stages of different",
     ("3 buffers on one of 2 stages", "8 on one of 1")),
    (changed(stages=2, entries=4), {}, "pipeline stages of a target", ONE_STAGE),
    ({"aux_item_lens": (1,)}, {"aux_item_lens": (3, 4)}, "bytes of the", ("[1]", "[3, 4]")),
    ({"draft": None, "staging": None}, {}, "drafter with KV heads", ("none", "LlamaEagle3")),
    ({"staging": replace(STAGING, data_plane="a")}, {}, "data plane", ("a", "nixl")),
    ({"staging": None}, {}, "data plane", ("none", "nixl")),
    (drafter(architecture="Qwen"), {}, "drafter architecture", ("Qwen", "LlamaEagle3")),
    (drafter(algorithm="DFLASH"), {}, "speculative algorithm", ("DFLASH", "EAGLE3")),
    (drafter(total_heads=4), {}, "KV heads of the drafter", ("4", "8")),
    (drafter(head_bytes=(8,)), {}, "bytes per token and head", ("(8,)", "(256, 256)")),
    (drafter(dtype="fp8"), {}, "dtype of the drafter", ("fp8", "bfloat16")),
    ({"topk": 4}, {"topk": 2}, "--speculative-eagle-topk", ("4", "2")),
]  # fmt: skip


@pytest.mark.parametrize(("there", "here", "what", "sides"), NAMED)
def test_a_difference_names_both_sides_values(
    there: dict[str, Any], here: dict[str, Any], what: str, sides: tuple[str, str]
) -> None:
    """A difference names prefill's value, decode's, a consequence, and a remedy, in this order."""
    found = differences(replace(ROW, **there), replace(ROW, **here))
    one = next(one for one in found if one.what.startswith(what))
    assert (one.prefill, one.decode) == sides
    text = f"{one.what}: prefill has {sides[0]}, decode has {sides[1]}; {one.consequence}. "
    assert str(one) == f"{text}{one.remedy}."
    assert one.remedy.startswith(("Give", "Set", "Use", "Install", "Start", "Enable"))
    assert not one.consequence.startswith(("Give", "Set", "Use", "Install", "Start", "Enable"))


def test_each_difference_is_among_those_with_named_values() -> None:
    source = inspect.getsource(compare)
    made = len(re.findall(r"yield (?:_refused|Difference)\(", source))
    made += len([*compare._like(ROW.target, ROW.target, 2, 2)]) - 1 + len(compare._COMPARED) - 1
    assert len({what for *_, what, _ in NAMED}) == made
