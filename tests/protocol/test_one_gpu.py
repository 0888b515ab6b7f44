"""Test the parts of the one-GPU demo (mixkv_demo/one_gpu) that need no GPU: its collectives under
SGLang's GroupCoordinator, with tensors in host memory, and its choice of flags."""

from __future__ import annotations

import multiprocessing as mp
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rig.process.forks import in_fork
from sglang.srt.distributed import parallel_state as state
from sglang.srt.platforms.cuda import CudaSRTPlatform
from sglang.srt.plugins.hook_registry import HookRegistry

from mixkv_demo import one_gpu
from mixkv_demo.one_gpu import support
from mixkv_demo.one_gpu.support import BACKEND, NO_OTHERS, OneGpuGroup
from mixkv_demo.ports import free_port

ANSWER_S = 300


def _rank(rank: int, port: int, pipe: Any) -> None:
    dist.Backend.register_backend(BACKEND, OneGpuGroup, devices=["cpu", "cuda"])
    address = f"tcp://127.0.0.1:{port}"
    state.init_distributed_environment(2, rank, address, rank, backend=BACKEND)
    group = state.init_model_parallel_group([[0, 1]], rank, BACKEND, group_name="tp", **NO_OTHERS)
    mine = torch.arange(8, dtype=torch.bfloat16).view(4, 2) + 100 * rank
    half = torch.empty(2, 2, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(half, mine, group=group.device_group)  # SGLang's function needs CUDA
    swapped = torch.empty(4, 2, dtype=torch.float8_e4m3fn)
    dist.all_to_all_single(swapped, mine.to(swapped.dtype), group=group.device_group)
    held = group.broadcast_tensor_dict({"held": mine} if rank == 0 else None, src=0)
    found = {
        "all_reduce": group.all_reduce(mine.clone()), "all_gather": group.all_gather(mine, dim=0),
        "broadcast": group.broadcast(mine.clone(), src=1), "dict": held["held"],
        "reduce_scatter": half, "all_to_all": swapped,
    }  # fmt: skip
    if rank == 0:
        group.send(mine, 1)
    else:
        found["received"] = group.recv(mine.shape, mine.dtype, 0)
    group.barrier()
    group.destroy()
    pipe.send({name: tensor.float().tolist() for name, tensor in found.items()})
    dist.destroy_process_group()


def test_collectives() -> None:
    context, port = mp.get_context("fork"), free_port()
    pipes, ranks = [], []
    for rank in range(2):
        here, there = context.Pipe()
        ranks.append(context.Process(target=_rank, args=(rank, port, there)))
        ranks[-1].start()
        pipes.append(here)
    found = [pipe.recv() if pipe.poll(ANSWER_S) else {} for pipe in pipes]
    for one in ranks:
        one.join(20)
        one.kill()
    mine = [[[2.0 * row + 100 * r, 2.0 * row + 1 + 100 * r] for row in range(4)] for r in (0, 1)]
    total = [[a[0] + b[0], a[1] + b[1]] for a, b in zip(*mine, strict=True)]
    as_fp8 = torch.tensor(mine).to(torch.float8_e4m3fn).float()
    for rank, one in enumerate(found):
        half = slice(2 * rank, 2 * rank + 2)
        assert one["all_reduce"] == total
        assert one["all_gather"] == mine[0] + mine[1]
        assert (one["broadcast"], one["dict"]) == (mine[1], mine[0])
        assert one["reduce_scatter"] == total[half]
        assert one["all_to_all"] == as_fp8[:, half].reshape(4, 2).tolist()
    assert found[1]["received"] == mine[0]


def _hooked() -> Any:
    support.install()
    HookRegistry.apply_hooks()  # logs hooks that it cannot apply, without an error
    with CudaSRTPlatform().reindex_device_id(1) as number:
        seen = (number, os.environ["CUDA_VISIBLE_DEVICES"])
    return seen, HookRegistry._patched & {*support.HOOKED}


@pytest.mark.parametrize(("visible", "card"), [(None, "0"), ("3", "3")])
def test_rank_1_gets_the_card_too(
    visible: str | None, card: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(one_gpu.SHARED_ENV, "1")
    monkeypatch.setenv(one_gpu.NO_DUAL_GEMM_ENV, "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert in_fork(_hooked) == ((0, card), {*support.HOOKED})


def test_the_setup_replaces_missing_parts_and_gives_reasons() -> None:
    lacking = {one_gpu.SHARED_ENV, one_gpu.NO_DUAL_GEMM_ENV}
    for cards, packages, chosen, reasons in (
        (1, frozenset(), lacking, 3), (2, frozenset({"cutlass"}), set(), 1),
    ):  # fmt: skip
        made = one_gpu.setup(cards, packages)
        assert lacking & {*made.env, *made.flags} == chosen
        assert len(made.reasons) == reasons


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("3", 1), ("0,1", 2)])
def test_cuda_visible_devices_limits_the_number_of_cards(
    visible: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert one_gpu.cards() == count
