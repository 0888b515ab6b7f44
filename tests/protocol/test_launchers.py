"""With every way to start SGLang, the launcher and its ranks opt in together or not at all.

The tests run SGLang's and Dynamo's own launchers up to the start of the schedulers (launchers.py).
test_startup.py tests the refusals that need no launcher, and tests/e2e tests whole servers.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from .launchers import Call, Ended, dynamo, engine_of_resolved, kv_classes, launch_server
from .test_startup import FLAGS, OTHER

FLAG, ENV = "--enable-mixkv", {"SGLANG_ENABLE_MIXKV": "1"}
KINDS = ("manager", "sender", "receiver", "bootstrap_server")
ASCEND = ("--disaggregation-transfer-backend", "ascend")
MAYBE = {"SGLANG_ENABLE_MIXKV": "maybe"}
UNKNOWN = f"unrecognized arguments: {FLAG}"
Launcher = Callable[[list[str]], None]


@pytest.fixture
def call(sglang_with_plugin: Call) -> Call:
    return sglang_with_plugin


def packages(call: Call, launched: Ended, **environ: str) -> set[str]:
    """Return the packages of a rank's KV classes, or `stopped: ` and the reason."""
    assert launched.value is not None, launched.said[-2000:]
    rank = call(kv_classes, launched.value, **environ)
    return {rank.value[kind] for kind in KINDS} if rank.value else {f"stopped: {rank.said}"}


@pytest.mark.parametrize(
    ("launcher", "given", "environ", "package"),
    [
        (launch_server, (), ENV, "sglang_mixkv"),
        (launch_server, (FLAG,), {}, "sglang_mixkv"),
        (launch_server, ("--config", "server.yaml"), {}, "sglang_mixkv"),
        (launch_server, (), {}, "sglang"),
        (dynamo, (), ENV, "sglang_mixkv"),
        (dynamo, (), {}, "sglang"),
    ],
)
def test_a_launcher_and_its_ranks_opt_in_together(
    call: Call, launcher: Launcher, given: tuple[str, ...], environ: dict[str, str],
    package: str, tmp_path: Path,
) -> None:  # fmt: skip
    """ServerArgs carry the decision to the ranks. Otherwise some ranks of a server could be
    stock."""
    file = tmp_path / "server.yaml"
    file.write_text("enable-mixkv: true\n")
    words = [str(file) if word == file.name else word for word in given]
    launched = call(launcher, [*FLAGS, *words], **environ, SGLANG_MIXKV_STAGING_MB="32")
    assert packages(call, launched) == {package}
    if package == "sglang_mixkv":
        assert pickle.loads(launched.value)._mixkv["staging_mb"] == 32


@pytest.mark.parametrize("more", [(), ASCEND])
def test_a_rank_checks_arguments_that_no_hook_has_seen(call: Call, more: tuple[str, ...]) -> None:
    launched = call(engine_of_resolved, [*FLAGS, *more], **ENV)
    (said,) = packages(call, launched, **ENV)
    assert OTHER in said if more else said == "sglang_mixkv"


@pytest.mark.parametrize(
    ("launcher", "given", "environ", "said"),
    [
        (launch_server, ASCEND, ENV, OTHER),
        (dynamo, (), MAYBE, "1 or 0; got 'maybe'"),
        (launch_server, (FLAG,), {"SGLANG_PLUGINS": "other"}, UNKNOWN),
        (dynamo, (FLAG,), ENV, UNKNOWN),  # Dynamo builds its parser before plugins are loaded
    ],
)  # fmt: skip
def test_a_refused_or_unknown_flag_stops_the_launcher(
    call: Call, launcher: Launcher, given: tuple[str, ...], environ: dict[str, str],
    said: str,
) -> None:  # fmt: skip
    launched = call(launcher, [*FLAGS, *given], **environ)
    assert launched.value is None
    assert said in launched.said
