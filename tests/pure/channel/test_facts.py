"""Published rows, and the severity of each difference between two of them.

`test_parsers_drawn.py` tests input that is not a row.
"""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from sglang_mixkv.channel.handshake import MAX_ROW_BYTES, Row, StagingFacts, Target, read_row
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.decode.compare import NO_DRAFTER, Severity, differences
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout
from sglang_mixkv.draft.window import WINDOWED, pages_left_out, window_of

MLA, GQA = Target(0, 61, layer_ids=False, even=True), Target(8, 8, layer_ids=False, even=True)
ROW = Row(
    PROTOCOL, "0.3.0", "0.5.23", b"instance", "10.0.0.1", 9000, "tcp://10.0.0.1:9001", 2, 0, 0,
    (64, 128), "nixl", MLA, 1,
    DraftLayout(DraftFacts("LlamaEagle3", "EAGLE3", 8, (256, 256), "bfloat16"), 2, 0),
    StagingFacts("nixl", b"agent", 1 << 40, 1 << 20, 64),
)  # fmt: skip


def row(**changed: Any) -> Row:
    """Make a row with changed fields, including fields of its facts and its staging."""
    facts, staging = ROW.draft.facts, ROW.staging
    for name in [n for n in changed if n in DraftFacts.__struct_fields__]:
        facts = replace(facts, **{name: changed.pop(name)})
    for name in [n for n in changed if n in StagingFacts.__struct_fields__]:
        staging = replace(staging, **{name: changed.pop(name)})
    return replace(ROW, **{"draft": DraftLayout(facts, 2, 0), "staging": staging, **changed})


ALIKE = {
    "plugin": "0.4.0", "instance": b"another_", "rank_ip": "10.0.0.2", "rank_port": 1,
    "address": "", "attn_tp": 4, "attn_tp_rank": 3, "pp_rank": 1, "base": 1, "slot_bytes": 99,
    "slots": 2, "endpoint": b"another",
}  # fmt: skip
OTHERS = [
    ("refused", {"data_plane": "mooncake"}, "data plane"),
    ("refused", {"staging": None}, "data plane"),
    ("mismatch", {"architecture": "Qwen3Eagle3"}, "drafter architecture"),
    ("mismatch", {"algorithm": "EAGLE"}, "speculative algorithm"),
    ("mismatch", {"total_heads": 4}, "KV heads of the drafter"),
    ("mismatch", {"head_bytes": (256, 128)}, "bytes per token and head of the drafter"),
    ("mismatch", {"head_bytes": (256,)}, "bytes per token and head of the drafter"),
    ("mismatch", {"dtype": "fp8_e4m3"}, "dtype of the drafter's KV"),
    ("mismatch", {"topk": 8}, "--speculative-eagle-topk"),
]  # each one is tested on either side
METADATA = {
    "refused": [(64, 129), (65, 1), (64, 128, 0), (64,), ()], "cold": [(64, 127), (0, 0)],
}  # fmt: skip
AUX, NONE = "bytes of the metadata rows", {"draft": None, "staging": None}
OLDER = {"engine": "0.5.22", "backend": "mooncake"}  # works with 0.5.23 on decode only


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        *(({name: value}, {}, []) for name, value in ALIKE.items()),
        *((one, {}, [(kind, what)]) for kind, one, what in OTHERS),
        *(({}, one, [(kind, what)]) for kind, one, what in OTHERS),
        *(({"aux_item_lens": n}, {}, [(kind, AUX)]) for kind in METADATA for n in METADATA[kind]),
        (NONE, {}, [("cold", NO_DRAFTER)]),
        ({}, NONE, []),
        ({"backend": "mooncake"}, {}, [("refused", "transfer backend")]),
        ({"engine": "0.5.23+cu130"}, {}, []),
        ({"engine": "0.5.23.post1"}, {}, []),
        (OLDER, {"backend": "mooncake"}, []),
        ({"backend": "mooncake"}, OLDER, [("refused", "SGLang's release over mooncake")]),
        ({"engine": "0.5.22"}, {}, [("refused", "SGLang's release over nixl")]),
        ({"aux_item_lens": (64, 1), "dtype": "fp8"}, {},
         [("mismatch", "dtype of the drafter's KV"), ("cold", AUX)]),
        ({"aux_item_lens": (64, 129), "dtype": "fp8", "topk": 3}, {},
         [("refused", AUX), ("mismatch", "dtype of the drafter's KV"),
          ("mismatch", "--speculative-eagle-topk")]),
    ],
)  # fmt: skip
def test_the_differences_between_two_rows(prefill, decode, expected):
    """Each difference between two rows has a severity, and the most severe one comes first."""
    found = differences(row(**prefill), row(**decode))
    assert [(d.severity, d.what) for d in found] == expected
    for one in found:
        assert one.prefill != one.decode
        assert all((one.consequence, one.remedy))
    hurts = [one for one in found if "overwritten" in one.consequence]
    assert bool(hurts) == (("refused", AUX) in expected)


def fields(**changed: Any) -> bytes:
    """Return the JSON of ROW with some values replaced, possibly by invalid ones."""
    return json.dumps(json.loads(msgspec.json.encode(ROW)) | changed).encode()


@pytest.mark.parametrize("written", [ROW, row(draft=None, staging=None)])
def test_a_row_round_trips(written):
    assert read_row(msgspec.json.encode(written)) == written


def test_fields_of_a_later_release_are_ignored():
    later = PROTOCOL[0], PROTOCOL[1] + 7
    assert read_row(fields(later={"more": [1, 2]})) == ROW
    assert read_row(fields(protocol=later)).protocol == later


@pytest.mark.parametrize("protocol", [(PROTOCOL[1] + 1, PROTOCOL[1] + 3), (0, PROTOCOL[0] - 1)])
def test_the_protocol_is_checked_before_other_fields(protocol):
    data = json.dumps({"protocol": protocol, "all": "different"}).encode()
    with pytest.raises(ValueError, match=f"protocol {protocol[0]} to {protocol[1]}"):
        read_row(data)


JSON_BEYOND = [
    {"protocol": [1]}, {"protocol": "1"}, {"protocol": None}, {"instance": "c2hvcnQ="},
    {"rank_port": -1}, {"rank_port": 65536}, {"attn_tp": -1}, {"aux_item_lens": [-1]},
    {"aux_item_lens": [1] * 257}, {"plugin": "x" * 257}, {"topk": 1.5}, {"draft": {}},
    {"staging": {"data_plane": "nixl"}},
]  # fmt: skip
FIELDS_BEYOND = [
    {"total_heads": 0}, {"head_bytes": ()}, {"head_bytes": (0,)}, {"head_bytes": (1,) * 1025},
    {"slots": 1}, {"slot_bytes": 0}, {"base": -1},
    {"endpoint": b"x" * ((32 << 10) + 1)},
]  # fmt: skip
BEYOND = [fields(**one) for one in JSON_BEYOND]
BEYOND += [msgspec.json.encode(row(**one)) for one in FIELDS_BEYOND]


@pytest.mark.parametrize("data", BEYOND, ids=map(str, range(len(BEYOND))))
def test_rows_beyond_the_bounds_are_rejected(data):
    with pytest.raises(ValueError):  # noqa: PT011
        read_row(data)


def test_a_row_has_at_most_64_kib():
    assert read_row(fields().ljust(MAX_ROW_BYTES)) == ROW
    with pytest.raises(ValueError, match="65537"):
        read_row(fields().ljust(MAX_ROW_BYTES + 1))


def but(target: Target, **changed: Any) -> Target:
    return replace(target, **changed)


TWO, UNEVEN, ONE_HEAD = but(GQA, entries=4, stages=2), but(GQA, even=False), but(GQA, heads=1)
SHORT, NUMBERED = but(TWO, entries=2), but(TWO, entries=2, layer_ids=True)


@pytest.mark.parametrize(
    ("target", "tp", "backend", "what"),
    [
        *((target, tp, backend, None) for target in (MLA, but(MLA, stages=2), GQA)
          for tp in (1, 2, 4) for backend in ("mooncake", "nixl")),
        (UNEVEN, 1, "mooncake", "different widths"),
        (UNEVEN, 2, "nixl", None),
        (ONE_HEAD, 4, "nixl", "1 KV heads over NIXL"),
        (ONE_HEAD, 1, "nixl", None),
        (ONE_HEAD, 4, "mooncake", None),
        (TWO, 2, "nixl", "stages of a target with KV heads"),
        (TWO, 2, "mooncake", None),
        (TWO, 4, "nixl", None),
        (but(TWO, layer_ids=True), 2, "nixl", None),
        (SHORT, 2, "mooncake", "different lengths"),
        (NUMBERED, 4, "nixl", "different lengths"),
        (NUMBERED, 4, "mooncake", None),
    ],
)  # fmt: skip
def test_targets_that_sglang_moves_correctly_are_served(target, tp, backend, what):
    """Exactly the targets that SGLang moves correctly are served.

    The prefill server has attention TP 2 in every case.
    """
    decode = row(attn_tp=tp, target=MLA if target.is_mla else GQA, backend=backend)
    found = differences(row(attn_tp=2, target=target, backend=backend), decode)
    assert all(one.severity is Severity.REFUSED for one in found)
    assert any(what in one.what for one in found) if what else found == []


@pytest.mark.parametrize("draft", [{}, NONE])
@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
@pytest.mark.parametrize("target", [MLA, GQA])
def test_dcp_pairs_that_sglang_can_redistribute_are_served(target, backend, draft):
    """With DCP, a pair needs equal sizes on both sides, or an MLA target without DCP on prefill.

    In any other case, `requires_dcp_relayout` in SGLang's managers raises in the thread that
    registers decode ranks.
    """
    for theirs, ours, tp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (4, 8)):
        there = row(attn_tp=8, target=but(target, dcp=theirs), backend=backend, **draft)
        here = row(attn_tp=tp, target=but(target, dcp=ours), backend=backend, **draft)
        found = differences(there, here)
        served = (
            theirs == ours == 1 or (theirs == ours and tp == 8) or (theirs == 1 and target is MLA)
        )
        assert [one.severity for one in found] == [Severity.REFUSED] * (not served), (theirs, ours)
        assert all(one.what == "--dcp-size" and "thread" in one.consequence for one in found)


HYBRID = but(MLA, states=("mamba",), widths=(576, 656), units=(96, 128), drafts=1)
HEADS = but(GQA, heads=4, states=("swa",), widths=(512,))  # two heads per rank at attention TP 2


@pytest.mark.parametrize(
    ("target", "there", "here", "tp", "what"),
    [
        (MLA, {"entries": 62}, {}, 2, "buffers of the target"),
        (MLA, {"entries": 60}, {}, 4, "buffers of the target"),
        (HYBRID, {"drafts": 0}, {}, 2, ""),
        (HYBRID, {}, {"drafts": 0}, 2, "buffers of the MLA drafter"),
        (HYBRID, {"drafts": 2}, {}, 4, "buffers of the MLA drafter"),
        (HYBRID, {}, {"states": ("request_row", "mamba")}, 2, ""),
        (HYBRID, {"states": ("request_row", "mamba")}, {}, 2, "state of the target"),
        (HYBRID, {"widths": ()}, {}, 2, ""),
        (HYBRID, {"widths": (576,)}, {}, 4, ""),
        (HYBRID, {}, {"widths": (656,)}, 4, "bytes of a token of the target"),
        (HYBRID, {"units": (96,)}, {}, 4, ""),
        (HYBRID, {"units": (96, 64)}, {}, 4, "bytes of a row of linear-attention state"),
        (HEADS, {}, {}, 2, ""),
        (HEADS, {}, {"widths": (256,)}, 2, "bytes of a token of the target"),
        (HEADS, {}, {"widths": (256,)}, 4, ""),  # one head per rank
        (HEADS, {}, {}, 4, "bytes of a token of the target"),
        (HEADS, {}, {"widths": (256,)}, 8, ""),  # each head on two ranks
        (HEADS, {}, {"heads": 8, "widths": (1024,)}, 2, "bytes of a token of the target"),
        (HEADS, {"widths": (512, 1024)}, {"widths": (256, 512)}, 4, ""),  # a group of 8 heads
        (HEADS, {"widths": (512, 1024)}, {"widths": (256,)}, 8, "bytes of a token of the target"),
    ],
)  # fmt: skip
def test_buffers_of_both_sides_must_match(target, there, here, tp, what):
    """A pair is refused if decode's buffers differ from prefill's in number or size.

    SGLang pairs the buffers by index and uses prefill's sizes. With other sizes on decode, it would
    write to wrong addresses or end a transfer thread (`_prepare_payload_xfer` over NIXL, Mooncake's
    `transfer_worker`).
    """
    for backend in ("mooncake", "nixl"):
        sides = (
            row(attn_tp=2, target=but(target, **there), backend=backend),
            row(attn_tp=tp, target=but(target, **here), backend=backend),
        )
        found = [one for one in differences(*sides) if "heads over NIXL" not in one.what]
        assert [one.what[: len(what)] for one in found] == [what] * bool(what)
        assert all(one.severity is Severity.REFUSED for one in found)
        assert all(one.remedy.endswith(") and attention backends") for one in found)


def test_a_stage_is_compared_with_the_same_stage():
    """The buffers of a pipeline stage are compared only with those of the same stage on decode."""
    whole, first = but(HYBRID, stages=2, entries=40), but(MLA, stages=2, entries=21, widths=(656,))
    assert differences(row(target=first), row(target=HYBRID)) == []
    for decode_rank, entries, served in ((0, 40, False), (0, 21, True), (1, 40, True)):
        decode = row(target=but(whole, entries=entries), pp_rank=decode_rank)
        assert (differences(row(target=first), decode) == []) == served


def test_the_remedy_for_mixed_releases_names_supported_ones():
    sides = (row(engine=engine, backend="mooncake") for engine in ("0.5.22", "0.6.0"))
    (found,) = differences(*sides)
    assert found.remedy == "Install 0.6.0 on prefill, or 0.5.23 on decode"


def flags(**given: Any) -> SimpleNamespace:
    """Return SGLang's arguments for a drafter with an attention window."""
    base = {
        "speculative_draft_window_size": None, "speculative_draft_attention_backend": None,
        "disaggregation_decode_enable_radix_cache": False, "speculative_draft_sink_size": 0,
        "speculative_algorithm": "DSPARK", "prefill_attention_backend": None,
        "decode_attention_backend": None, "attention_backend": "fa3", "speculative_eagle_topk": 1,
    }  # fmt: skip
    return SimpleNamespace(**base | given)


def block_drafter(**text: Any) -> SimpleNamespace:
    text = SimpleNamespace(**{"layer_types": ["sliding_attention"] * 3} | text)
    return SimpleNamespace(architectures=["LingDSparkModel"], get_text_config=lambda: text)


@pytest.mark.parametrize(
    ("sliding", "window"), [(2048, 2047), (2, 1), (1, None), (0, None), (None, None), ("", None)]
)
def test_a_block_drafters_window_is_that_of_its_config(sliding, window):
    """The window of a block drafter is `sliding_window` of its config, minus one.

    SGLang treats a value of 0 or 1 as no window. Some configs lack this field.
    """
    text = {} if sliding == "" else {"sliding_window": sliding}
    assert window_of(flags(), block_drafter(**text)) == window


BACKENDS = (None, *sorted(WINDOWED), "flashinfer", "triton")


@pytest.mark.parametrize("own", [None, "fa3", "flashinfer"])
@pytest.mark.parametrize("common", [None, "fa4", "triton"])
def test_a_window_needs_backends_that_implement_it(own, common):
    """The window applies only if the attention backends of both draft phases implement it.

    A draft extend uses prefill's attention backend, a draft step decode's.
    """
    drafter = block_drafter(sliding_window=129)
    for of_prefill, of_decode in itertools.product(BACKENDS, repeat=2):
        given = flags(
            prefill_attention_backend=of_prefill, decode_attention_backend=of_decode,
            attention_backend=common, speculative_draft_attention_backend=own,
        )  # fmt: skip
        phases = [own] if own else [of_prefill or common, of_decode or common]
        keeps = all(phase in WINDOWED for phase in phases)
        assert window_of(given, drafter) == (128 if keeps else None), given


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_pages_that_no_query_reads_are_left_out(page_size):
    """Exactly the pages before the window of the first query are left out.

    The first query comes after the prompt. DFLASH's window starts on a page boundary.
    """
    for window, pages in itertools.product((1, 2, 15, 16, 17, 31, 32, 33, 128), range(40)):
        left_out = pages_left_out(pages, page_size, window)
        in_last_page = range(1, page_size + 1) if pages else ()
        for length in ((pages - 1) * page_size + tokens for tokens in in_last_page):
            first_read = max(0, length - window) // page_size
            assert left_out <= first_read
        shortest = max(0, (pages - 1) * page_size + 1 - window) // page_size if pages else 0
        assert left_out in (shortest, max(0, shortest - 1))
        assert pages_left_out(pages, page_size, None) == 0


# ---------------------------------------------------------------- at the bounds

BOUNDS = [
    ("rank_port", 0, 65535), ("attn_tp", 0, 1 << 16), ("patience", 0.1, 60),
    ("staging.slot_bytes", 1, 1 << 40), ("staging.slots", 2, 1 << 20),
    ("staging.base", 0, (1 << 63) - 1), ("target.heads", 0, 1 << 20),
    ("target.entries", 0, 1 << 20),
]  # fmt: skip


def changed(path: str, value: Any) -> bytes:
    plain = json.loads(msgspec.json.encode(ROW))
    at, *names = [plain, *path.split(".")]
    for name in names[:-1]:
        at = at[name]
    assert names[-1] in at
    at[names[-1]] = value
    return json.dumps(plain).encode()


@pytest.mark.parametrize(("path", "least", "most"), BOUNDS)
def test_a_number_in_a_row_is_accepted_only_within_its_bounds(path, least, most):
    step = 0.01 if isinstance(least, float) else 1
    for bound, beyond in ((least, least - step), (most, most + step)):
        read_row(changed(path, bound))
        with pytest.raises(ValueError, match="Expected"):
            read_row(changed(path, beyond))


def test_a_row_is_read_up_to_its_maximum_size():
    body = msgspec.json.encode(ROW)
    assert read_row(body.ljust(MAX_ROW_BYTES)) == ROW
    with pytest.raises(ValueError, match=f"a row of {MAX_ROW_BYTES + 1} bytes"):
        read_row(body.ljust(MAX_ROW_BYTES + 1))
    for count in (256, 257):
        lens = changed("aux_item_lens", [8] * count)
        with nullcontext() if count == 256 else pytest.raises(ValueError, match="length"):
            read_row(lens)


@pytest.mark.parametrize(
    ("oldest", "newest", "is_read"),
    [(0, -1, False), (0, 0, True), (1, 1, False), (0, 9, True), (-2, -1, False)],
)
def test_overlapping_protocol_ranges_are_read(oldest, newest, is_read):
    """A row is read if its protocol versions overlap with this build's.

    `oldest` and `newest` are relative to the ends of this build's range.
    """
    protocol = [max(0, PROTOCOL[1] + oldest), max(0, PROTOCOL[0] + newest)]
    with nullcontext() if is_read else pytest.raises(ValueError, match="this build reads"):
        read_row(changed("protocol", protocol))


@pytest.mark.parametrize(
    ("heads", "tp", "backend", "is_served"),
    [(4, (4, 8), "nixl", True), (3, (4, 8), "nixl", False), (3, (4, 4), "nixl", True),
     (3, (8, 4), "nixl", True), (3, (4, 8), "mooncake", True)],
)  # fmt: skip
def test_a_target_with_as_many_heads_as_ranks_is_served(heads, tp, backend, is_served):
    target = Target(heads, 8, layer_ids=False, even=True)
    sides = [row(attn_tp=size, target=target, backend=backend) for size in tp]
    assert (differences(*sides) == []) == is_served


@pytest.mark.parametrize("there", ["0.5.21", "0.5.21.post1", "0.5.22"])
@pytest.mark.parametrize("here", ["0.5.21", "0.5.22", "0.5.23"])
def test_the_senders_release_decides_on_swa_state(there, here):
    """Only prefill's release cuts sliding-window state by heads, whichever release decode has."""
    target = replace(GQA, states=("swa",))
    sides = (
        row(engine=engine, backend="mooncake", target=target, attn_tp=tp)
        for engine, tp in ((there, 2), (here, 4))
    )
    found = [one.what for one in differences(*sides) if "release" not in one.what]
    assert found == ["target with swa state at unequal TP"] * there.startswith("0.5.21")


@pytest.mark.parametrize(
    ("states", "target", "engine", "what"),
    [
        (("minimax_index_k",), {}, "0.5.23", "target with minimax_index_k"),
        (("minimax_dense_kv", "minimax_index_k"), {}, "0.5.22", "target with minimax_dense_kv, m"),
        (("swa", "block_scale"), {}, "0.5.22", "target with block_scale state"),
        (("swa",), {}, "0.5.22", ""), (("swa",), {}, "0.5.21", "target with swa state"),
        (("swa",), {"stages": 2, "entries": 4, "layer_ids": True}, "0.5.23", "target with swa"),
        (("mamba", "dsa", "qsa_pending"), {}, "0.5.21", ""),
        (("minimax_index_k",), {"heads": 0}, "0.5.21", ""),
    ],
)  # fmt: skip
def test_a_state_that_sglang_cannot_cut_by_heads_is_refused(states, target, engine, what):
    """A pair is refused for a state that SGLang cannot cut by heads, if the sizes differ.

    Between equal sizes SGLang sends the state unchanged, but MiniMax's state only from a prefill
    server with one pipeline stage.
    """
    for backend in ("mooncake", "nixl"):
        same = {"engine": engine, "backend": backend}
        there, here = (
            row(**same, target=replace(GQA, states=states, **target), attn_tp=tp) for tp in (2, 4)
        )
        found = differences(there, replace(here, target=replace(here.target, stages=1, entries=8)))
        assert [one.what[: len(what)] for one in found] == [what] * bool(what)
        assert differences(there, there) == []
        stages = replace(there, target=replace(there.target, stages=2, layer_ids=True))
        found = [one.what for one in differences(stages, replace(there, target=GQA))]
        is_minimax = "minimax" in states[-1] and not there.target.is_mla
        assert ("pipeline stages of a MiniMax target" in found) == is_minimax


@pytest.mark.parametrize(
    ("there", "here", "severity"),
    [((8, 8), (8, 8), None), ((8, 9), (8, 8), Severity.REFUSED), ((8, 7), (8, 8), Severity.COLD),
     ((9, 7), (8, 8), Severity.REFUSED), ((8,), (8, 8), Severity.REFUSED)],
)  # fmt: skip
def test_prefills_metadata_rows_may_be_shorter_but_not_longer(there, here, severity):
    found = differences(row(aux_item_lens=there), row(aux_item_lens=here))
    assert [one.severity for one in found] == ([severity] if severity else [])
    assert all(one.remedy.endswith("on both sides or on neither") for one in found)
