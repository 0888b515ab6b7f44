"""A server that has opted in does not start unless the plugin is fully active.

Each start runs in a fork, since SGLang's hooks cannot be removed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig.process import forks

import mixkv_demo
from sglang_mixkv import plugin
from sglang_mixkv.engine import releases
from sglang_mixkv.engine.seams import HOOKS
from sglang_mixkv.refusals import OTHER_BACKEND

MODELS = Path(mixkv_demo.__file__).parent / "models" / "mla"
FLAGS = [
    "--model-path", str(MODELS / "target"), "--device", "cpu",
    "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake",
    "--attention-backend", "torch_native", "--disable-overlap-schedule",
]  # fmt: skip
PATHS = [*HOOKS]
KINDS = ("kvargs", "manager", "sender", "receiver", "bootstrap_server")
OTHER = str(OTHER_BACKEND)


def resolve(*flags: str) -> Any:
    """Parse and resolve arguments as SGLang's launcher does before it starts anything."""
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args([*FLAGS, *flags])
    server_args.resolve_once()
    return server_args


def serve(**changed: Any) -> None:
    """Publish ServerArgs that the plugin has not checked, since SGLang ends the resolution early
    for a dummy model."""
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    given = {"model_path": "dummy", "disaggregation_mode": "prefill"}
    publish(ServerArgs(**given | changed), role="scheduler")


def serve_nothing() -> None:
    from sglang.srt.runtime_context import reset_context

    reset_context()


def ask(kind: str = "manager", backend: str = "mooncake") -> str:
    """Return the package of the class that SGLang's lookup returns."""
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    found = get_kv_class(TransferBackend(backend), KVClassType(kind))
    return str(found.__module__.partition(".")[0])


def in_fork(what: Callable[[], Any]) -> str:
    """Call the function in a fork, and return `ok ` and its result, or the text of its
    SystemExit."""

    def text(error: BaseException) -> str:
        return str(error) if isinstance(error, SystemExit) else f"error {error!r}"

    return forks.in_fork(lambda: f"ok {what()}", text)


def launcher() -> None:
    resolve("--enable-mixkv")


def rank() -> None:
    """Act as a rank whose launcher did not check the arguments."""
    serve()
    ask()


both = pytest.mark.parametrize("process", [launcher, rank])


@pytest.fixture
def opted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_MIXKV", "1")


@pytest.mark.parametrize("flags", [["--enable-mixkv"], []])
def test_an_invalid_setting_stops_a_server_that_has_opted_in(
    monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setenv("SGLANG_MIXKV_PATIENCE", "nan")
    assert in_fork(resolve).startswith("ok ")
    if not flags:
        monkeypatch.setenv("SGLANG_ENABLE_MIXKV", "1")
    said = in_fork(lambda: resolve(*flags))
    assert said.startswith("[MIXKV-START-04] expected SGLANG_MIXKV_PATIENCE ")


@pytest.mark.parametrize("flag", [True, False])
def test_a_load_failure_stops_a_server_that_has_opted_in(
    monkeypatch: pytest.MonkeyPatch, flag: bool
) -> None:
    monkeypatch.setattr(plugin, "_register", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plugin.register()
    if flag:
        monkeypatch.setattr(sys, "argv", ["launch_server", "--enable-mixkv"])
    else:
        monkeypatch.setenv("SGLANG_ENABLE_MIXKV", "1")
    with pytest.raises(SystemExit, match="MIXKV-START-02"):
        plugin.register()


@pytest.mark.usefixtures("opted_in")
@pytest.mark.parametrize(
    ("process", "path"), [(launcher, PATHS[0]), *((rank, path) for path in PATHS)]
)
def test_a_hook_that_was_not_applied_stops_the_server(
    monkeypatch: pytest.MonkeyPatch, process: Callable[[], None], path: str
) -> None:
    """If one of the plugin's hooks is missing, SGLang would move the drafter's KV."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {path})
    said = in_fork(process)
    assert said.startswith("[MIXKV-START-02]")
    assert path in said


# ------------------------------------------------------ an unknown release of SGLang

NEWER, CODE = "99.0", "[MIXKV-START-01]"
GONE = "sglang.srt.server_args:ServerArgs.gone"


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that changes the version of the installed SGLang. The rules stay those of
    the installed release, whose defaults may differ from those of the newest release."""
    rules = releases.rules()
    monkeypatch.setattr(releases, "rules", lambda: rules)
    return lambda other: monkeypatch.setattr(releases, "sglang_version", lambda: other)


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """Yield the log lines about SGLang's release. pytest's caplog misses them, since SGLang removes
    its handlers."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sglang.sglang_mixkv.engine.releases")
    logger.addHandler(handler)
    yield texts
    logger.removeHandler(handler)


@both
@pytest.mark.usefixtures("opted_in")
def test_a_known_release_starts_without_a_warning(
    process: Callable[[], None], warned: list[str]
) -> None:
    assert in_fork(lambda: [process(), warned]) == "ok [None, []]"


@both
@pytest.mark.usefixtures("opted_in")
@pytest.mark.parametrize("untested", [NEWER, "0.5.23.dev1"])
def test_an_unknown_release_does_not_start(
    process: Callable[[], None], version: Callable[[str], None], untested: str
) -> None:
    version(untested)
    said = in_fork(process)
    assert said.startswith(CODE)
    assert f"expected one of {releases.SUPPORTED_SGLANG}, found {untested}" in said
    assert "SGLANG_MIXKV_ALLOW_UNTESTED_SGLANG=1" in said


@both
@pytest.mark.usefixtures("opted_in")
def test_allowing_untested_releases_warns_per_difference(
    process: Callable[[], None], version: Callable[[str], None], warned: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("SGLANG_MIXKV_ALLOW_UNTESTED_SGLANG", "1")
    # Check only this difference, since an older installed release also lacks other seams.
    monkeypatch.setattr(releases, "SEAMS", {GONE: ()})
    monkeypatch.setattr(releases, "ATTRIBUTES", {})
    version(NEWER)
    said = in_fork(lambda: [process(), warned])
    assert said.startswith("ok ")
    assert f"found {NEWER}" in said
    assert said.count(CODE) == 1 + said.count(GONE) == (2 if process is rank else 1)


@pytest.mark.usefixtures("opted_in")
def test_a_changed_seam_of_a_known_release_stops_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MIXKV_ALLOW_UNTESTED_SGLANG", "1")
    monkeypatch.setattr(releases, "SEAMS", releases.SEAMS | {GONE: ()})
    said = in_fork(rank)
    assert said.startswith(CODE)
    assert GONE in said
    assert "ALLOW_UNTESTED" not in said


# ------------------------------------------------------ processes that no launcher has checked


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record each check in a list."""
    calls: list[Any] = []
    monkeypatch.setattr(releases, "check", lambda *args, **kwargs: calls.append(args))
    return calls


@pytest.mark.usefixtures("opted_in")
@pytest.mark.parametrize("kind", ["manager", "bootstrap_server"])
def test_an_unchecked_process_with_another_backend_stops(kind: str) -> None:
    """The backend is checked in ServerArgs and in each lookup of a KV class, whichever kind is
    looked up first."""
    ascend = {"disaggregation_transfer_backend": "ascend"}
    assert OTHER in in_fork(lambda: [serve(**ascend), ask(kind)])
    assert OTHER in in_fork(lambda: [serve(), ask(kind), serve(**ascend), ask(kind)])
    for before in (serve, serve_nothing):
        assert OTHER in in_fork(lambda before=before: [before(), ask(kind, "ascend")])


@pytest.mark.usefixtures("opted_in")
def test_an_unchecked_process_stops_for_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    late = {"disaggregation_mode": "decode", "enable_hisparse": True}
    assert "--enable-hisparse " in in_fork(lambda: [serve(**late), ask()])
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    assert "SGLANG_RUST_SERVER=1 " in in_fork(rank)


@pytest.mark.usefixtures("opted_in")
def test_a_supported_process_checks_itself_once(checks: list[Any]) -> None:
    """The process is checked only at the first lookup. Classes of SGLang's fake backend, for
    warm-up requests, are not changed."""

    def ours() -> tuple[Any, ...]:
        serve()
        kinds = [ask(kind) for kind in KINDS * 3]
        return {*kinds[1:5]}, {ask(kind, "fake") for kind in ("sender", "receiver")}, len(checks)

    assert in_fork(ours) == "ok ({'sglang_mixkv'}, {'sglang'}, 1)"


def test_nothing_is_checked_without_opting_in(checks: list[Any]) -> None:
    def stock() -> tuple[Any, ...]:
        serve(disaggregation_transfer_backend="ascend")
        return ask(), ask(backend="ascend"), len(checks)

    assert in_fork(stock) == "ok ('sglang', 'sglang', 0)"
