"""When the stand-in for sgl_kernel and the hooks of the CPU engine act, and when they do not."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

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


@pytest.fixture
def registered(monkeypatch) -> list[str]:
    """Targets that were given to SGLang's hook registry, which is not imported here."""
    targets: list[str] = []

    class HookRegistry:
        @staticmethod
        def register(target: str, hook: object, hook_type: str) -> None:
            targets.append(target)

        @staticmethod
        def apply_hooks() -> None:
            targets.append("applied")

    fake = types.ModuleType("sglang.srt.plugins.hook_registry")
    fake.HookRegistry = HookRegistry
    fake.HookType = types.SimpleNamespace(AROUND="around", AFTER="after", REPLACE="replace")
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return targets


@pytest.mark.parametrize("on_path", [True, False])
def test_sglang_finds_it_where_the_folder_is_on_the_path(on_path: bool) -> None:
    """SGLang's switch alone does not stand for it: it is any server's on a CPU."""
    code = """
from importlib.metadata import entry_points
for point in entry_points(group="sglang.srt.plugins", name="mixkv_cpu"): print(point.load())
"""
    said = with_engine(code, **({} if on_path else {"PYTHONPATH": ""}))
    assert (support.install.__name__ in said) is on_path


def test_a_model_that_dynamo_imports_is_imported() -> None:
    code = "import sglang.srt.models.qwen3_5 as m; print(m.fused_qk_gemma_rmsnorm)"
    assert with_engine(code).split()[-1] == "sgl_kernel.fused_qk_gemma_rmsnorm_cpu"


@pytest.mark.parametrize("value", [None, "", "0", "true"])
def test_support_is_inert_without_the_cpu_engine(monkeypatch, registered, value) -> None:
    monkeypatch.delenv(cpu.CPU_ENGINE_ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(cpu.CPU_ENGINE_ENV, value)
    support.install()
    assert registered == []


@pytest.mark.parametrize(("spawn", "forks"), [("", [support.SET_ENVS]), ("1", [])])
def test_support_hooks_with_the_cpu_engine(monkeypatch, registered, spawn, forks) -> None:
    monkeypatch.setenv(cpu.CPU_ENGINE_ENV, "1")
    monkeypatch.setenv(cpu.SPAWN_ENV, spawn)
    support.install()
    assert registered == [
        support.FALLBACK, support.GET_KV_CLASS, support.LAST_LOC, support.HOST_POOL,
        support.PAGES, support.ON_IDLE, support.CONTROLLER, *forks,
        support.HANDLE_DFLASH, support.HANDLE_DSPARK, support.CREATE_WORKER,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "device", "stand_in", "kept"),
    [
        ("intel_amx", "cpu", True, True),
        ("intel_amx", "cpu", False, False),
        ("triton", "cpu", True, False),
    ],
)
def test_only_the_stand_in_keeps_the_backend(monkeypatch, backend, device, stand_in, kept) -> None:
    fake = types.ModuleType("sgl_kernel")
    fake.IS_STAND_IN = stand_in
    monkeypatch.setitem(sys.modules, "sgl_kernel", fake)
    view = types.SimpleNamespace(attention_backend=backend, device=device)
    fallback = {"attention_backend": "torch_native"}
    assert support._keep_intel_amx(lambda _view: fallback, view) == ({} if kept else fallback)


def test_host_indices_are_off_on_the_class_and_below() -> None:
    class Sender:
        supports_host_tensor_indices = True

    class Derived(Sender):
        pass

    backend, kind = types.SimpleNamespace(value="mooncake"), types.SimpleNamespace(value="sender")
    assert support._without_device_memory(Sender, backend, kind) is None
    assert not Sender.supports_host_tensor_indices
    assert not Derived.supports_host_tensor_indices


@pytest.mark.parametrize(("sleeps", "waits"), [(False, [support.IDLE_WAIT_S]), (True, [])])
def test_only_ranks_that_may_not_sleep_wait(monkeypatch, sleeps, waits) -> None:
    waited: list[float] = []
    monkeypatch.setattr(support.time, "sleep", waited.append)
    server_args = types.SimpleNamespace(sleep_on_idle=sleeps)
    support._wait_where_none_sleeps(None, types.SimpleNamespace(server_args=server_args))
    assert waited == waits


def test_the_controller_of_dp_ranks_waits_for_requests() -> None:
    """Whose loop is SGLang's own."""
    from sglang.srt.managers.data_parallel_controller import DataParallelController

    waits = Mock(side_effect=InterruptedError)
    watchdog, socket = types.SimpleNamespace(feed=Mock()), types.SimpleNamespace(poll=waits)
    controller = types.SimpleNamespace(soft_watchdog=watchdog, recv_from_tokenizer=socket)
    fed = watchdog.feed
    support._wait_for_requests(None, controller)
    with pytest.raises(InterruptedError):
        DataParallelController.event_loop(controller)
    fed.assert_called_once_with()
    waits.assert_called_once_with(support.CONTROLLER_WAIT_MS)


def test_nixl_takes_host_memory_and_waits_for_events(monkeypatch) -> None:
    api = pytest.importorskip("nixl._api")
    real, configs = api.nixlBind.nixlAgent, []
    monkeypatch.setattr(api.nixl_agent, "__init__", api.nixl_agent.__init__)  # put back afterwards
    monkeypatch.setattr(api.nixlBind, "nixlAgentConfig", api.nixlBind.nixlAgentConfig)
    monkeypatch.setattr(
        api.nixlBind, "nixlAgent", lambda name, config: configs.append(config) or real(name, config)
    )
    backend, kind = types.SimpleNamespace(value="nixl"), types.SimpleNamespace(value="manager")
    for _ in range(2):
        support._without_device_memory(type("Manager", (), {}), backend, kind)
    agent = api.nixl_agent("one", api.nixl_agent_config(backends=[]))
    assert agent.nixl_mems["VRAM"] == agent.nixl_mems["DRAM"]
    assert [config.pthrDelay for config in configs] == [support.NIXL_WAIT_US]


@pytest.fixture
def choices(monkeypatch) -> types.ModuleType:
    """SGLang's list of attention backends that draft, in a module without the rest."""
    names = ["flashinfer"]
    fake = types.ModuleType("sglang.srt.arg_groups.choices")
    fake.DRAFT_ATTENTION_BACKEND_CHOICES = names
    fake.add_draft_attention_backend_choices = names.extend
    package = types.ModuleType("sglang.srt.arg_groups")
    package.choices = fake
    package.speculative_hook = types.SimpleNamespace(resolving_view=lambda args: args)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    return package


def test_block_drafters_pass_the_list_of_devices(registered, choices) -> None:
    """While their arguments are resolved, and no longer; all else is what was asked for."""
    args = types.SimpleNamespace(device="cpu", pp_size=2)
    hook = choices.speculative_hook
    seen = []

    def resolve(server_args: object) -> None:
        view = hook.resolving_view(server_args)
        seen.append((view.device, view.pp_size))
        raise ValueError("pp_size")

    for _ in range(2):
        with pytest.raises(ValueError, match="pp_size"):
            support._with_block_drafter(resolve, args)
    assert seen == [("xpu", 2)] * 2
    assert hook.resolving_view(args).device == "cpu"
    assert choices.choices.DRAFT_ATTENTION_BACKEND_CHOICES == ["flashinfer", "intel_amx"]


@pytest.mark.parametrize("is_block", [True, False], ids=["dflash", "eagle3"])
def test_only_block_drafters_get_what_they_need(
    monkeypatch, registered, choices, is_block: bool
) -> None:
    """In the scheduler, when it asks for the worker."""
    info = types.ModuleType("sglang.srt.speculative.dflash_info")
    info.DFlashVerifyInput = type("DFlashVerifyInput", (), {"topk": 1})
    for name in ("sglang.srt.speculative", info.__name__):
        monkeypatch.setitem(sys.modules, name, info)
    monkeypatch.setattr(torch.Tensor, "record_stream", stock := torch.Tensor.record_stream)
    algorithm = types.SimpleNamespace(is_dflash_family=lambda: is_block)
    assert support._fit_block_drafter(object, algorithm, None) is None
    drafts = choices.choices.DRAFT_ATTENTION_BACKEND_CHOICES
    if not is_block:
        assert (registered, drafts) == ([], ["flashinfer"])
        assert torch.Tensor.record_stream is stock
        return
    assert registered == [support.BLOCK_ATTENTION, support.FUSED_WRITE, "applied"]
    assert drafts == ["flashinfer", "intel_amx"]
    assert info.DFlashVerifyInput().tree_topk == 1
    torch.zeros(1).record_stream(torch.cpu.current_stream())


def test_stock_tensors_know_no_cpu_stream() -> None:
    with pytest.raises(RuntimeError):
        torch.zeros(1).record_stream(torch.cpu.current_stream())


def test_nothing_of_a_block_drafter_is_left_to_triton() -> None:
    attention = types.SimpleNamespace(use_table_qk_norm_rope=True)
    support._rotate_in_torch(None, attention, "config", layer_id=0)
    assert not attention.use_table_qk_norm_rope
    assert support._write_in_torch("model", "pool") is None


def test_launch_env_keeps_the_path_and_binds_each_rank(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["a", str(cpu.SITE), "b"]))
    env = cpu.launch_env(3)
    assert env["PYTHONPATH"].split(os.pathsep) == [str(cpu.SITE), "a", "b"]
    assert len(env["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 3
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in cpu.launch_env()
