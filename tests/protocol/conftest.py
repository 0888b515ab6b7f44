"""Every test of the ring needs SGLang, with the plugin loaded.

The tests of a module with the mark `transports` run over Mooncake and over NIXL. Of a function's
cases over NIXL the first runs by default, and each one after so many more; the rest with --full.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from rig import model
from rig.load import load_sglang

BACKENDS = ("mooncake", "nixl")


@pytest.fixture(scope="session", autouse=True)
def sglang_with_plugin() -> None:
    load_sglang()


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """SGLang's transfer backend of the cases of this test."""
    name: str = getattr(request, "param", BACKENDS[0])
    monkeypatch.setattr(model, "BACKEND", name)
    return name


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if transports(metafunc.definition) is not None:
        metafunc.parametrize("backend", BACKENDS, indirect=True)


def transports(item: pytest.Item) -> pytest.Mark | None:
    """The mark, unless the test is Mooncake's own."""
    own = item.get_closest_marker("mooncake_only")
    return None if own is not None else item.get_closest_marker("transports")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: dict[str, int] = defaultdict(int)
    for item in items:
        mark, call = item.get_closest_marker("transports"), getattr(item, "callspec", None)
        if mark is None or call is None or call.params.get("backend") != "nixl":
            continue
        function = item.nodeid.partition("[")[0]
        if seen[function] % mark.kwargs.get("every", 1):
            item.add_marker(pytest.mark.full)
        seen[function] += 1
