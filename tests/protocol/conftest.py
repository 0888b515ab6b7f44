"""Every test of the ring needs SGLang, with the plugin loaded.

The tests of a module with the mark `transports` run over Mooncake and over NIXL; with tcp=True also
over NIXL where UCX has TCP alone, and neither shared memory nor CMA. With the mark's number, which
is 1 or 2, a function's cases run by default so that each value of each parameter, or each pair of
values of two parameters, is in one of them; the transport is a parameter. The rest needs --full.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from hashlib import sha256
from itertools import combinations

import pytest
from rig.ring import model
from rig.ring.load import import_sglang, load_sglang

from .launchers import Call, unplugged

BACKENDS = ("mooncake", "nixl")
# A failed request's pages are kept for so long where a prefill rank cannot say that it wrote its
# last byte: SGLang's 30 s, in the time of a test.
RELEASE_S = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT", "5"
# Two busy cores: no room of the draft channel goes cold for want of processor time.
PATIENCE = "SGLANG_MIXKV_PATIENCE", "10"
# A rank fills its staging buffer with zeros when it starts: a second of its time by default.
STAGING = "SGLANG_MIXKV_STAGING_MB", "8"
TCP = "nixl-tcp"


@pytest.fixture(scope="session", autouse=True)
def sglang_with_plugin() -> Iterator[Call]:
    """Yield a function that calls another in a process without plugins."""
    import_sglang()
    with pytest.MonkeyPatch.context() as patch, unplugged() as call:
        for variable in (RELEASE_S, PATIENCE, STAGING):
            patch.setenv(*variable)
        load_sglang()
        yield call


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """SGLang's transfer backend of the cases of this test."""
    name: str = getattr(request, "param", BACKENDS[0])
    if name == TCP:
        name = "nixl"
        monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(model, "BACKEND", name)
    return name


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = transports(metafunc.definition)
    if mark is not None:
        tcp = [TCP] if mark.kwargs.get("tcp") else []
        metafunc.parametrize("backend", [*BACKENDS, *tcp], indirect=True)


def transports(item: pytest.Item) -> pytest.Mark | None:
    """Return the mark, unless the test is Mooncake's own."""
    own = item.get_closest_marker("mooncake_only")
    return None if own is not None else item.get_closest_marker("transports")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    functions: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("transports")
        if mark is not None and mark.args and "full" not in item.keywords:
            functions[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    for (_, strength), cases in functions.items():
        for item in set(cases) - covering(cases, strength):
            item.add_marker(pytest.mark.full)


def covering(cases: list[pytest.Item], strength: int) -> set[pytest.Item]:
    """Pick, each time, the case with the most combinations of values that no earlier one has.
    Checksums of names decide between equals, so that no parameter's order does."""
    ordered = sorted(cases, key=lambda case: sha256(case.name.encode()).digest())
    missing = {case: combinations_of(case, strength) for case in ordered}
    chosen = set[pytest.Item]()
    while missing:
        best = max(missing, key=lambda case: len(missing[case]))
        chosen.add(best)
        met = missing[best]
        missing = {case: left - met for case, left in missing.items() if left - met}
    return chosen


def combinations_of(case: pytest.Item, strength: int) -> set[tuple[tuple[str, str], ...]]:
    call = getattr(case, "callspec", None)
    values = sorted((name, repr(value)) for name, value in call.params.items()) if call else []
    return {*combinations(values, min(strength, len(values)))}
