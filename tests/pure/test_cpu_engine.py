"""The conditions under which the CPU engine's sgl_kernel replacement and its hooks are active.

Servers on the CPU engine in tests/e2e test their behaviour.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mixkv_cpu as cpu
from mixkv_cpu import support


def printed(code: str, *flags: str, **environ: str) -> str:
    """Return the output of a new Python process in the CPU engine's environment."""
    env = {**os.environ, **cpu.launch_env(), **environ}
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("engine", "compiled"),
    [("0", None), ("0", "sm90/common_ops.abi3.so"), ("1", "common_ops.abi3.so")],
    ids=["off", "off on CUDA", "on with real CPU kernels"],
)
def test_the_real_package_is_imported_if_usable(
    tmp_path: Path, engine: str, compiled: str | None
) -> None:
    package = tmp_path / "sgl_kernel"
    for name, text in {"ops.py": "name = 'other'", "__init__.py": "from sgl_kernel.ops import name",
                       **({compiled: ""} if compiled else {})}.items():  # fmt: skip
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    path = os.pathsep.join(map(str, [cpu.SITE, tmp_path]))
    environ = {"PYTHONPATH": path, cpu.CPU_ENGINE_ENV: engine}
    assert printed("import sgl_kernel; print(sgl_kernel.name)", "-S", **environ) == "other\n"


def test_sglang_finds_the_cpu_engine_on_pythonpath() -> None:
    """The entry point of the CPU engine exists only if its folder is on PYTHONPATH.

    SGLang's own environment variable for CPU engines is not enough, since any CPU server sets it.
    """
    code = "from importlib.metadata import entry_points\n"
    code += "print([p.load() for p in entry_points(name='mixkv_cpu')])"
    assert support.install.__name__ in printed(code)
    assert printed(code, PYTHONPATH="") == "[]\n"


@pytest.mark.parametrize("value", ["", "0", "true"])
def test_support_is_inert_without_the_cpu_engine(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Without the environment variable, `install` does not import SGLang's hook registry."""
    monkeypatch.setenv(cpu.CPU_ENGINE_ENV, value)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    support.install()
    monkeypatch.setenv(cpu.CPU_ENGINE_ENV, "1")
    with pytest.raises(ImportError):
        support.install()
