"""Pairs of servers between which SGLang itself moves the target wrongly, with or without a drafter.

The plugin does not touch the target. But whoever enables it wants right answers, and these pairs
give wrong ones without an error, or hang. Functions are those of SGLang 0.5.23, in
disaggregation/; tests/protocol/test_target_alone.py shows each case.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=1 << 20)]


class Target(msgspec.Struct, frozen=True):
    """The target's KV on one rank, as SGLang's KV args have it. `heads`: of all ranks, 0 for MLA.

    `entries`: buffers of this stage. `layer_ids`: whether they carry numbers of layers. `even`: K
    and V rows are equally wide.
    """

    heads: Count
    entries: Count
    layer_ids: bool
    even: bool
    stages: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    dcp: Annotated[int, Meta(ge=1, le=1 << 16)] = 1

    @property
    def is_mla(self) -> bool:
        return self.heads == 0

    @property
    def all_entries(self) -> int:
        """Of all stages, if they are alike."""
        return self.entries * self.stages


class Severity(StrEnum):
    REFUSED = "refused"
    MISMATCH = "mismatch"
    COLD = "cold"


class Difference(msgspec.Struct, frozen=True):
    """`prefill`, `decode`: what they have."""

    severity: Severity
    what: str
    prefill: str
    decode: str
    consequence: str
    remedy: str

    def __str__(self) -> str:
        return (
            f"{self.what}: prefill has {self.prefill}, decode has {self.decode}; "
            f"{self.consequence}. {self.remedy}."
        )


_refused = partial(Difference, Severity.REFUSED)

MIXES = {
    "mooncake": {("0.5.21", "0.5.22"), ("0.5.21", "0.5.23"), ("0.5.22", "0.5.23")},
    "nixl": {("0.5.21", "0.5.22")},
}
"""By backend, SGLang's releases on prefill and decode between which it serves requests. In the
others its messages are read otherwise, and requests wait in vain: tests/e2e/test_mixed_releases.py
measures them, without the plugin too."""


_RELEASE = re.compile(r"^(\d+(?:\.\d+)*).*")
_EQUAL_TP = "Give both sides the same attention-TP size"
_MOONCAKE = "Use --disaggregation-transfer-backend mooncake on both sides"


def unmixed(prefill: str, decode: str, backend: str) -> Iterator[Difference]:
    """What keeps these two releases of SGLang from serving requests together. Builds of one release
    (0.5.23+cu130, 0.5.23.post1) are alike."""
    prefill, decode = (_RELEASE.sub(r"\1", version) for version in (prefill, decode))
    if prefill == decode or (prefill, decode) in MIXES.get(backend, ()):
        return
    newer = {new for old, new in MIXES.get(backend, ()) if old == prefill}
    others = f", or {' or '.join(sorted(newer))} on decode" if newer else ""
    yield _refused(
        f"SGLang's release over {backend}", prefill, decode,
        "requests would wait in vain: SGLang itself does not serve this mix, or was not seen to",
        f"Install {decode} on prefill{others}",
    )  # fmt: skip


def unmoved(
    source: Target, source_tp: int, wanted: Target, wanted_tp: int, backend: str
) -> Iterator[Difference]:
    """What keeps SGLang's `backend` from moving the target from prefill's ranks to decode's."""
    tps = f"attention TP {source_tp}", f"attention TP {wanted_tp}"
    unequal = source_tp != wanted_tp
    if unequal and source.dcp > 1:
        yield _refused(
            "target with DCP on prefill at unequal TP", *tps, "its tokens would go to wrong ranks",
            f"{_EQUAL_TP}, or --dcp-size 1 on prefill",
        )  # fmt: skip
    if source.is_mla or wanted.is_mla:
        return
    if unequal and not source.even:  # send_kvcache_slice, _init_hetero_tp_prep_handle
        yield _refused(
            "target with K and V of different widths at unequal TP", *tps,
            "V would be cut at K's width", _EQUAL_TP,
        )  # fmt: skip
    if backend == "nixl" and source.heads < source_tp < wanted_tp:  # _init_hetero_tp_prep_handle
        yield _refused(
            f"target with {source.heads} KV heads over NIXL", *tps,
            "the thread that registers decode ranks would end", f"{_EQUAL_TP}. Or: {_MOONCAKE}",
        )  # fmt: skip
    if source.stages > wanted.stages:
        yield from _stages(source, wanted, backend, unequal)


def _stages(source: Target, wanted: Target, backend: str, unequal: bool) -> Iterator[Difference]:
    guesses = not source.layer_ids or (backend == "nixl" and unequal)  # get_mha_kv_ptrs_with_pp
    if guesses and source.all_entries != wanted.all_entries:
        yield _refused(
            "pipeline stages of different lengths",
            f"{source.entries} buffers on one of {source.stages} stages",
            f"{wanted.entries} on one of {wanted.stages}",
            "layers would be written over each other",
            "Set SGLANG_PP_LAYER_PARTITION so that all prefill stages have as many layers",
        )
    elif backend == "nixl" and not source.layer_ids and not unequal:  # build_transfer_entry_pairs
        yield _refused(
            "pipeline stages of a target with KV heads over NIXL",
            f"{source.stages} stages", f"{wanted.stages}",
            "the thread that registers decode ranks would end", f"{_MOONCAKE}, or --pp-size 1",
        )  # fmt: skip
