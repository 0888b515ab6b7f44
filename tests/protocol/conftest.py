"""Load SGLang with the plugin for all tests of the ring, and run them over several transports.

Tests with the mark `transports` run over Mooncake and over NIXL, and with tcp=True also over NIXL
with UCX restricted to TCP, without shared memory and CMA. The transport is a further parameter. By
default, `transports(1)` runs only as many cases as are needed to use each value of each parameter,
and `transports(2)` as many as are needed to use each pair of values. --full runs all cases.
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
# Decode retains a failed request's pages for this long if a prefill rank cannot confirm that it has
# stopped writing to them. SGLang's default is 30 s.
RELEASE_S = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT", "5"
# Longer time limits, so that no room goes cold because a thread waits for a core on a busy machine.
PATIENCE = "SGLANG_MIXKV_PATIENCE", "10"
# A rank zeroes its staging buffer when it starts, which takes a second at the default size.
STAGING = "SGLANG_MIXKV_STAGING_MB", "8"
TCP = "nixl-tcp"


@pytest.fixture(scope="session", autouse=True)
def sglang_with_plugin() -> Iterator[Call]:
    """Yield a function that runs another function in a process without plugins."""
    import_sglang()
    with pytest.MonkeyPatch.context() as patch, unplugged() as call:
        for variable in (RELEASE_S, PATIENCE, STAGING):
            patch.setenv(*variable)
        load_sglang()
        yield call


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the ring's transfer backend for this test, and return its name."""
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
    """Return the mark `transports`, or None if the test runs over Mooncake only."""
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
    """Pick cases greedily: the next case is the one with the most combinations not covered yet.
    A checksum of the name breaks ties, so that the order of parameters has no influence."""
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
