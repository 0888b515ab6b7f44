"""Opted in and not fully active: the server does not start. In forks, as hooks stay for good."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sglang_mixkv
from sglang_mixkv.errors import MixKVError

MODELS = Path(sglang_mixkv.__file__).parent / "demo" / "models" / "mla"
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

    def main(pipe: Any) -> None:
        try:
            pipe.send(f"ok {what()}")
        except SystemExit as stop:
            pipe.send(str(stop))
        except BaseException as error:
            pipe.send(f"error {error!r}")

    here, there = mp.get_context("fork").Pipe()
    process = mp.get_context("fork").Process(target=main, args=(there,))
    process.start()
    said = here.recv() if here.poll(120) else "silence"
    process.join(10)
    return said


def test_opted_in_starts_and_the_record_survives_pickling() -> None:
    from sglang_mixkv.config import config_of

    def copy_of_record() -> Any:
        return config_of(pickle.loads(pickle.dumps(resolve("--enable-mixkv")))).enabled

    assert in_fork(copy_of_record) == "ok True"


def test_environment_opts_in_where_a_launcher_knows_no_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang_mixkv.config import config_of

    monkeypatch.setenv("SGLANG_ENABLE_MIXKV", "1")
    assert in_fork(lambda: config_of(resolve()).enabled) == "ok True"


def test_config_file_opts_in(tmp_path: Path) -> None:
    from sglang_mixkv.config import config_of

    file = tmp_path / "server.yaml"
    file.write_text("enable-mixkv: true\n")
    assert in_fork(lambda: config_of(resolve("--config", str(file))).enabled) == "ok True"


def test_not_opted_in_starts() -> None:
    from sglang_mixkv.config import config_of

    assert in_fork(lambda: config_of(resolve()).enabled) == "ok False"


def test_unsupported_combination_does_not_start() -> None:
    said = in_fork(lambda: resolve("--enable-mixkv", "--disaggregation-transfer-backend", "nixl"))
    assert "--disaggregation-transfer-backend other than mooncake is not supported" in said


def test_single_server_does_not_start() -> None:
    said = in_fork(lambda: resolve("--enable-mixkv", "--disaggregation-mode", "null"))
    assert "--disaggregation-mode null is not supported" in said


COLD = ("--enable-mixkv", "--mixkv-on-draft-mismatch", "cold")


def test_cold_with_a_decode_radix_cache_does_not_start() -> None:
    decode = ("--disaggregation-mode", "decode", "--disaggregation-decode-enable-radix-cache")
    assert "would become a prefix that other requests share" in in_fork(
        lambda: resolve(*COLD, *decode)
    )


def test_cold_with_aux_over_tcp_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MOONCAKE_SEND_AUX_TCP", "1")
    assert "SGLANG_MOONCAKE_SEND_AUX_TCP=1" in in_fork(lambda: resolve(*COLD))
    monkeypatch.delenv("SGLANG_MOONCAKE_SEND_AUX_TCP")
    assert in_fork(lambda: bool(resolve(*COLD))) == "ok True"


def test_changed_seam_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_mixkv.engine import releases as compat

    monkeypatch.setitem(compat.SEAMS, "sglang.srt.server_args:ServerArgs.gone", ())
    said = in_fork(lambda: resolve("--enable-mixkv"))
    assert "ServerArgs.gone" in said
    assert "does not start" in said


@pytest.mark.parametrize("metrics", [True, False])
def test_the_folder_of_metrics_is_set_before_the_seams_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, metrics: bool
) -> None:
    """Looking at them imports prometheus_client, which decides by it where values go."""
    from sglang_mixkv.engine import releases as compat

    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = []

    def look(_: Any) -> None:
        folders.append(os.environ.get("PROMETHEUS_MULTIPROC_DIR", ""))

    monkeypatch.setattr(compat, "preflight", look)

    def exists() -> tuple[bool, bool]:
        from sglang.srt.utils.common import set_prometheus_multiproc_dir

        resolve("--enable-mixkv", *["--enable-metrics"] * metrics)
        if metrics:
            set_prometheus_multiproc_dir()  # as SGLang's launcher does next
        gc.collect()
        return bool(folders[0]), os.path.isdir(folders[0])

    assert in_fork(exists) == f"ok {(metrics, metrics)}"


def test_hook_that_was_not_applied_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_mixkv import plugin

    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {plugin.GET_KV_CLASS})
    assert plugin.GET_KV_CLASS in in_fork(lambda: resolve("--enable-mixkv"))


def test_seams_of_the_installed_engine_are_as_listed() -> None:
    from sglang_mixkv.config import Config
    from sglang_mixkv.engine import releases as compat

    assert list(compat.problems(Config(enabled=True))) == []


def test_plugin_that_fails_to_load_stops_an_opted_in_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang_mixkv import plugin

    def fail() -> None:
        raise RuntimeError("broken install")

    monkeypatch.setattr(plugin, "_register", fail)
    with pytest.raises(RuntimeError):
        plugin.register()
    monkeypatch.setenv("SGLANG_ENABLE_MIXKV", "1")
    with pytest.raises(SystemExit, match="broken install"):
        plugin.register()


def test_a_rank_that_cannot_copy_rows_ends_before_it_registers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU the kernel is compiled and tried here; see tests/pure/test_cuda.py."""
    from protocol.model import Case
    from protocol.ring import run
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    from sglang_mixkv.rows.host import HostRows

    def warm_up(_: HostRows) -> None:
        raise MixKVError("no kernel here")

    def register(_: CommonKVManager) -> None:
        raise AssertionError("it has registered")

    monkeypatch.setattr(HostRows, "warm_up", warm_up)
    monkeypatch.setattr(CommonKVManager, "register_to_bootstrap", register)
    outcome = run(Case(1, 1))
    errors = [report.error for report in outcome.prefill + outcome.decode]
    assert len(errors) == 2
    assert all("MixKVError: no kernel here" in error for error in errors)
