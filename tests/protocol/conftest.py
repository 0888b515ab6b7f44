"""Every test of the ring needs SGLang, with the plugin loaded.

The tests of a module with the mark `transports` run over Mooncake and over NIXL; with tcp=True also
over NIXL where UCX has TCP alone, and neither shared memory nor CMA. Of a function's cases over
NIXL the first runs by default, and each one after so many more; over its TCP the first; the rest
with --full. Of the cases of a function with the mark `sampled` a part runs over Mooncake, too:
those that their names' checksums pick, so that no parameter decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from hashlib import sha256

import pytest
from rig import model
from rig.load import load_sglang

BACKENDS = ("mooncake", "nixl")
# A failed request's pages are kept for so long where a prefill rank cannot say that it wrote its
# last byte: SGLang's 30 s, in the time of a test.
RELEASE_S = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT", "5"
# Two busy cores: no room of the draft channel goes cold for want of processor time.
PATIENCE = "SGLANG_MIXKV_PATIENCE", "10"
TCP = "nixl-tcp"


@pytest.fixture(scope="session", autouse=True)
def sglang_with_plugin() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*RELEASE_S)
        patch.setenv(*PATIENCE)
        load_sglang()
        yield


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
    """The mark, unless the test is Mooncake's own."""
    own = item.get_closest_marker("mooncake_only")
    return None if own is not None else item.get_closest_marker("transports")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: dict[tuple[str, str], int] = defaultdict(int)
    for item in items:
        mark, call = item.get_closest_marker("transports"), getattr(item, "callspec", None)
        name = None if call is None else call.params.get("backend")
        if name not in ("nixl", TCP) and _left_out(item):
            item.add_marker(pytest.mark.full)
        if mark is None or name not in ("nixl", TCP):
            continue
        kind = item.nodeid.partition("[")[0], name
        sampled = seen[kind] == 0 if name == TCP else seen[kind] % mark.kwargs["every"] == 0
        if not sampled:
            item.add_marker(pytest.mark.full)
        seen[kind] += 1


def _left_out(item: pytest.Item) -> bool:
    sampled = item.get_closest_marker("sampled")
    return sampled is not None and sha256(item.name.encode()).digest()[0] % sampled.args[0] > 0
