"""When the stand-in for sgl_kernel and the hooks of the CPU engine act, and when they do not. What
they do: servers on it, in tests/e2e."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mixkv_cpu as cpu
from mixkv_cpu import support


def imported(folder: Path | None, engine: bool, code: str, *flags: str) -> str:
    """What a fresh Python prints; ``folder`` stands for site-packages with another sgl_kernel."""
    path = os.pathsep.join(map(str, [cpu.SITE, *([folder] if folder else [])]))
    env = os.environ | {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": str(int(engine))}
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(
        command, env=env, check=True, capture_output=True, text=True
    ).stdout.strip()


def with_engine(code: str, **environ: str) -> str:
    """What a fresh Python prints with the engine's environment."""
    env = {**os.environ, **cpu.launch_env(), **environ}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


def other_package(folder: Path, compiled: str | None) -> Path:
    """An ``sgl_kernel`` in that folder; with a compiled file, if any, at that place."""
    package = folder / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("from sgl_kernel.ops import name\n")
    (package / "ops.py").write_text("name = 'other'\n")
    if compiled:
        (package / compiled).parent.mkdir(exist_ok=True)
        (package / compiled).touch()
    return folder


@pytest.mark.parametrize(
    ("engine", "compiled"),
    [(False, None), (False, "sm90/common_ops.abi3.so"), (True, "common_ops.abi3.so")],
    ids=["off", "off on CUDA", "on with real CPU kernels"],
)
def test_the_real_package_is_handed_through(tmp_path, engine: bool, compiled: str | None) -> None:
    folder = other_package(tmp_path, compiled)
    assert imported(folder, engine, "import sgl_kernel; print(sgl_kernel.name)", "-S") == "other"


def test_without_any_real_package_there_is_none() -> None:
    code = "try: import sgl_kernel\nexcept ModuleNotFoundError as e: print(e.name)"
    assert imported(None, False, code, "-S") == "sgl_kernel"


def test_the_stand_in_has_operators_but_no_packed_weights(tmp_path) -> None:
    folder = other_package(tmp_path, "sm90/common_ops.abi3.so")
    code = """
import sgl_kernel, torch
ops = torch.ops.sgl_kernel
print(sgl_kernel.IS_STAND_IN, hasattr(ops, "extend_attention_cpu"), hasattr(
    ops, "decode_attention_cpu"), hasattr(ops, "convert_weight_packed"))
sgl_kernel.tree_speculative_sampling_target_only_cpu
try: sgl_kernel.tree_speculative_sampling_target_only_cpu()
except NotImplementedError: print("refused")
"""
    assert imported(folder, True, code).split() == ["True", "True", "True", "False", "refused"]


@pytest.mark.parametrize("on_path", [True, False])
def test_sglang_finds_it_where_the_folder_is_on_the_path(on_path: bool) -> None:
    """SGLang's switch alone does not stand for it: it is any server's on a CPU."""
    code = """
from importlib.metadata import entry_points
for point in entry_points(group="sglang.srt.plugins", name="mixkv_cpu"): print(point.load())
"""
    said = with_engine(code, **({} if on_path else {"PYTHONPATH": ""}))
    assert (support.install.__name__ in said) is on_path


@pytest.mark.parametrize("value", [None, "", "0", "true"])
def test_support_is_inert_without_the_cpu_engine(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    """It does not even ask for SGLang's hook registry."""
    monkeypatch.delenv(cpu.CPU_ENGINE_ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(cpu.CPU_ENGINE_ENV, value)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    support.install()
    monkeypatch.setenv(cpu.CPU_ENGINE_ENV, "1")
    with pytest.raises(ImportError):
        support.install()


def test_a_model_that_dynamo_imports_is_imported() -> None:
    code = "import sglang.srt.models.qwen3_5 as m; print(m.fused_qk_gemma_rmsnorm)"
    assert with_engine(code).split()[-1] == "sgl_kernel.fused_qk_gemma_rmsnorm_cpu"


def test_launch_env_keeps_the_path_and_binds_each_rank(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["a", str(cpu.SITE), "b"]))
    env = cpu.launch_env(3)
    assert env["PYTHONPATH"].split(os.pathsep) == [str(cpu.SITE), "a", "b"]
    assert len(env["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 3
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in cpu.launch_env()
