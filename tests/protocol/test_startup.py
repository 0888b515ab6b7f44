"""Opted in and not fully active: the server does not start. In forks, as hooks stay for good."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from rig import forks

import mixkv_demo
from sglang_mixkv import plugin
from sglang_mixkv.engine import releases
from sglang_mixkv.engine.seams import Seam

MODELS = Path(mixkv_demo.__file__).parent / "models" / "mla"
FLAGS = [
    "--model-path", str(MODELS / "target"), "--device", "cpu",
    "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake",
    "--attention-backend", "torch_native", "--disable-overlap-schedule",
]  # fmt: skip


def resolve(*flags: str) -> Any:
    """Parse and resolve arguments as SGLang's launcher does before it starts anything."""
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args([*FLAGS, *flags])
    server_args.resolve_once()
    return server_args


def in_fork(what: Callable[[], Any]) -> str:
    """What a forked process said: `ok ...` or the text of its SystemExit."""

    def text(error: BaseException) -> str:
        return str(error) if isinstance(error, SystemExit) else f"error {error!r}"

    return forks.in_fork(lambda: f"ok {what()}", text)


@pytest.fixture
def opted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_MIXKV", "1")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SGLANG_MIXKV_PATIENCE", "nan"),
        ("SGLANG_MIXKV_PATIENT", "2"),
        ("SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS", "{"),
    ],
)
@pytest.mark.parametrize("opts_in", ["flag", "variable"])
def test_a_setting_outside_of_its_bounds_does_not_start(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, opts_in: str
) -> None:
    monkeypatch.setenv(name, text)
    assert in_fork(resolve).startswith("ok ")
    if opts_in == "variable":
        monkeypatch.setenv("SGLANG_ENABLE_MIXKV", "1")
    said = in_fork(lambda: resolve(*["--enable-mixkv"] * (opts_in == "flag")))
    assert said.startswith("[MIXKV-START-04] expected ")
    assert name in said


def test_the_words_of_a_bad_variable_are_all_that_a_launcher_says() -> None:
    """As of each refusal at start, and its exit status is theirs."""
    environ = os.environ | {"SGLANG_ENABLE_MIXKV": "1", "SGLANG_MIXKV_PATIENCE": "nan"}
    command = [sys.executable, "-m", "sglang.launch_server", *FLAGS]
    ended = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("[MIXKV-START-04] expected SGLANG_MIXKV_PATIEN")


def test_a_flag_outside_of_its_bounds_does_not_start() -> None:
    assert in_fork(lambda: resolve("--enable-mixkv", "--mixkv-staging-mb", "0")) == "2"


GONE = Seam("sglang.srt.server_args:ServerArgs.gone", "a test")


@pytest.mark.parametrize("path", [plugin.GET_KV_CLASS, *plugin.AROUND])
def test_hook_that_was_not_applied_does_not_start(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {path})
    assert path in in_fork(lambda: resolve("--enable-mixkv"))


# ------------------------------------------------------ a release of SGLang that is not known

NEWER = "99.0"
CODE = "[MIXKV-START-01]"


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives the installed SGLang another version. Its rules stay: what is installed may be older
    than the newest that is known, with other defaults."""
    rules = releases.rules()
    monkeypatch.setattr(releases, "rules", lambda: rules)
    return lambda other: monkeypatch.setattr(releases, "sglang_version", lambda: other)


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """What was logged of SGLang's release. SGLang takes the handlers of pytest's caplog away."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sglang.sglang_mixkv.engine.releases")
    logger.addHandler(handler)
    yield texts
    logger.removeHandler(handler)


@pytest.fixture
def launch(warned: list[str]) -> Callable[[], str]:
    """What an opted-in launcher says: its warnings, or why it stopped."""
    return lambda: in_fork(lambda: [resolve("--enable-mixkv"), warned][1])


def test_a_known_release_starts_without_a_word(launch: Callable[[], str]) -> None:
    assert launch() == "ok []"


@pytest.mark.parametrize("untested", [NEWER, "0.5.20", "0.5.21.post1", "0.5.23.dev1", "none"])
def test_another_release_does_not_start(
    launch: Callable[[], str], version: Callable[[str], None], untested: str
) -> None:
    version(untested)
    said = launch()
    assert said.startswith(CODE)
    assert f"SGLang {untested} does not fit" in said
    assert f"expected one of ('0.5.21', '0.5.22', '0.5.23'), found {untested}" in said
    assert "SGLANG_MIXKV_ALLOW_UNTESTED_SGLANG=1" in said


def test_the_variable_starts_it_with_a_warning(
    launch: Callable[[], str], version: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_MIXKV_ALLOW_UNTESTED_SGLANG", "1")
    version(NEWER)
    said = launch()
    assert said.startswith("ok [")
    assert said.count(CODE) == 1
    assert "takes this SGLang for 0.5.23, since" in said
    assert f"found {NEWER}" in said


@pytest.mark.parametrize("allowed", ["0", "1"])
@pytest.mark.usefixtures("opted_in")
def test_a_changed_seam_of_a_known_release_stops_the_rank(
    monkeypatch: pytest.MonkeyPatch, allowed: str
) -> None:
    monkeypatch.setenv("SGLANG_MIXKV_ALLOW_UNTESTED_SGLANG", allowed)
    monkeypatch.setattr(releases, "SEAMS", (*releases.SEAMS, GONE))
    said = in_fork(lambda: [serve(), ask()])
    assert said.startswith(CODE)
    assert GONE.path in said
    assert "ALLOW_UNTESTED" not in said


@pytest.mark.usefixtures("opted_in")
def test_each_difference_is_a_warning_of_the_rank(
    version: Callable[[str], None], warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_MIXKV_ALLOW_UNTESTED_SGLANG", "1")
    monkeypatch.setattr(releases, "SEAMS", (*releases.SEAMS, GONE))
    version(NEWER)
    said = in_fork(lambda: [serve(), *(ask(kind) for kind in KINDS), warned][1:])
    assert said.count(CODE) == 2
    assert f"found {NEWER}" in said
    assert GONE.path in said


def test_a_rank_of_another_release_stops(version: Callable[[str], None], opted_in: None) -> None:
    version(NEWER)
    assert f"found {NEWER}" in in_fork(lambda: [serve(), ask()])


def test_plugin_that_fails_to_load_stops_an_opted_in_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("broken install")

    monkeypatch.setattr(plugin, "_register", fail)
    with pytest.raises(RuntimeError):
        plugin.register()
    monkeypatch.setenv("SGLANG_ENABLE_MIXKV", "1")
    with pytest.raises(SystemExit, match="broken install"):
        plugin.register()


# ------------------------------------------------------ processes that were not checked at start


def serve(**changed: Any) -> None:
    """Publish ServerArgs whose resolution ran without the plugin: a dummy model ends it early."""
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    given = {"model_path": "dummy", "disaggregation_mode": "prefill"}
    publish(ServerArgs(**given | changed), role="scheduler")


def ask(kind: str = "kvargs", backend: str = "mooncake") -> str:
    """The package that SGLang's own lookup answers from."""
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    found = get_kv_class(TransferBackend(backend), KVClassType(kind))
    return str(found.__module__.partition(".")[0])


def build(server_args: Any) -> Any:
    """Start to build a prefill rank's manager; KV args are not looked at before the check."""
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.utils import (
        DisaggregationMode,
        KVClassType,
        TransferBackend,
        get_kv_class,
    )

    manager = get_kv_class(TransferBackend.MOONCAKE, KVClassType.MANAGER)
    return manager(KVArgs(), DisaggregationMode.PREFILL, server_args)


KINDS = ("kvargs", "manager", "sender", "receiver", "bootstrap_server")
OTHER = "--disaggregation-transfer-backend other than mooncake and nixl is not supported"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each check of the seams leaves an entry."""
    calls: list[Any] = []
    monkeypatch.setattr(releases, "preflight", lambda *args, **kwargs: calls.append(args))
    return calls


@pytest.mark.usefixtures("opted_in")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["mooncake", "ascend"])
def test_an_unchecked_process_with_another_backend_stops(kind: str, backend: str) -> None:
    """Whatever it asks for first: by its ServerArgs, or by the backend that it asks for."""
    said = in_fork(lambda: [serve(disaggregation_transfer_backend="ascend"), ask(kind, backend)])
    assert OTHER in said
    assert OTHER in in_fork(lambda: [serve(), ask(kind, "ascend")])


@pytest.mark.usefixtures("opted_in")
def test_an_unchecked_process_stops_for_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    late = {"disaggregation_mode": "decode", "enable_hisparse": True}
    assert "--enable-hisparse is not supported" in in_fork(lambda: [serve(**late), ask()])
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    assert "SGLANG_RUST_SERVER=1 is not supported" in in_fork(lambda: [serve(), ask()])
    monkeypatch.delenv("SGLANG_RUST_SERVER")
    monkeypatch.setattr(releases, "SEAMS", (*releases.SEAMS, GONE))
    assert "ServerArgs.gone" in in_fork(lambda: [serve(), ask()])


@pytest.mark.usefixtures("opted_in")
@pytest.mark.parametrize("path", plugin.AROUND)
def test_an_unchecked_process_stops_where_a_hook_was_not_applied(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """SGLang would move the drafter's KV."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {path})
    assert path in in_fork(lambda: [serve(), ask()])


@pytest.mark.usefixtures("opted_in")
def test_a_supported_process_checks_itself_once(checks: list[Any]) -> None:
    def ours() -> tuple[list[str], int]:
        serve()
        found = [ask(kind) for kind in KINDS * 3]
        return sorted(set(found[1:5])), len(checks)

    assert in_fork(ours) == "ok (['sglang_mixkv'], 1)"


@pytest.mark.usefixtures("opted_in")
def test_the_next_engine_of_a_process_is_checked_anew() -> None:
    said = in_fork(lambda: [serve(), ask(), serve(disaggregation_transfer_backend="ascend"), ask()])
    assert OTHER in said


@pytest.mark.usefixtures("opted_in")
def test_warm_up_requests_go_to_the_fake_backend() -> None:
    said = in_fork(lambda: [serve(), *(ask(kind, "fake") for kind in ("sender", "receiver"))][1:])
    assert said == "ok ['sglang', 'sglang']"


@pytest.mark.usefixtures("opted_in")
def test_a_bootstrap_server_alone_is_handed_out_unchecked(checks: list[Any]) -> None:
    """Nothing is published in its process; a manager is checked when it is built."""
    from sglang.srt.runtime_context import reset_context

    def alone() -> tuple[str, int]:
        reset_context()
        return ask("bootstrap_server"), len(checks)

    assert in_fork(alone) == "ok ('sglang_mixkv', 0)"


@pytest.mark.usefixtures("opted_in")
def test_a_manager_checks_the_arguments_that_it_is_given() -> None:
    from sglang.srt.runtime_context import reset_context
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="dummy", disaggregation_transfer_backend="ascend")
    assert OTHER in in_fork(lambda: [reset_context(), ask("manager"), build(args)])


@pytest.mark.usefixtures("opted_in")
@pytest.mark.parametrize("kind", KINDS)
def test_another_backend_without_published_arguments(kind: str) -> None:
    from sglang.srt.runtime_context import reset_context

    assert OTHER in in_fork(lambda: [reset_context(), ask(kind, "ascend")])


@pytest.mark.usefixtures("opted_in")
def test_arguments_that_were_resolved_by_hand_are_served() -> None:
    """No device, no role and no speculation in ServerArgs, the latter in get_spec() alone."""

    def by_hand() -> tuple[Any, ...]:
        from sglang.srt.runtime_context import get_context, get_device, get_spec, publish
        from sglang.srt.server_args import ServerArgs

        server_args = ServerArgs(model_path="dummy")
        server_args._resolution_finished = True
        publish(server_args, role="scheduler")
        get_context().override("test", speculative_algorithm="EAGLE3")
        kinds = {ask(kind) for kind in KINDS[1:]}
        return kinds, get_device().device, get_spec().speculative_algorithm

    assert in_fork(by_hand) == "ok ({'sglang_mixkv'}, None, 'EAGLE3')"


@pytest.mark.usefixtures("opted_in")
def test_a_stand_in_for_arguments_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests and tools build managers; the stand-in says yes to whatever it is asked."""
    from sglang_mixkv.engine import draft_pool

    class PastTheCheckError(Exception):
        pass

    monkeypatch.setattr(draft_pool, "of_args", MagicMock(side_effect=PastTheCheckError))
    with pytest.raises(PastTheCheckError):
        build(MagicMock())


def test_not_opted_in_nothing_is_checked(checks: list[Any]) -> None:
    def stock() -> tuple[Any, ...]:
        serve(disaggregation_transfer_backend="ascend")
        return ask("manager"), ask("manager", "ascend"), len(checks)

    assert in_fork(stock) == "ok ('sglang', 'sglang', 0)"
