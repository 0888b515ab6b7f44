"""Hooks in SGLang's processes for the demo's servers on GPUs, as an SGLang plugin.

seam                                                   why
distributed.parallel_state                             NCCL refuses two ranks on one device
    .get_default_distributed_backend (around)
distributed.parallel_state.init_model_parallel_group   other communicators than torch's use
    (around)                                           NCCL, or map other GPUs' memory
platforms.cuda.CudaDeviceMixin.reindex_device_id       rank 1 would use GPU 1
    (around)
layers.dual_gemm.DualGemm._select_mode (around)        an import of CUTLASS, which SGLang does
                                                       not require
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mixkv_demo.one_gpu import NO_DUAL_GEMM_ENV, SHARED_ENV

_Group: Any = dist.ProcessGroup  # Any, since its methods have many overloads
BACKEND = "mixkv_one_gpu"
DEFAULT_BACKEND = "sglang.srt.distributed.parallel_state.get_default_distributed_backend"
MODEL_GROUP = "sglang.srt.distributed.parallel_state.init_model_parallel_group"
REINDEX = "sglang.srt.platforms.cuda.CudaDeviceMixin.reindex_device_id"
DUAL_GEMM = "sglang.srt.layers.dual_gemm.DualGemm._select_mode"
HOOKED = (DEFAULT_BACKEND, MODEL_GROUP, REINDEX, DUAL_GEMM)
NO_OTHERS = dict.fromkeys(
    ("use_pynccl", "use_custom_allreduce", "use_mscclpp", "use_torch_symm_mem_allreduce"), False
)


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get(NO_DUAL_GEMM_ENV) == "1":
        HookRegistry.register(DUAL_GEMM, lambda *_: None, HookType.AROUND)
    if os.environ.get(SHARED_ENV) != "1":
        return
    dist.Backend.register_backend(BACKEND, OneGpuGroup, devices=["cpu", "cuda"])
    HookRegistry.register(DEFAULT_BACKEND, lambda _original, _device: BACKEND, HookType.AROUND)
    HookRegistry.register(MODEL_GROUP, _without_others, HookType.AROUND)
    HookRegistry.register(REINDEX, lambda original, self, _: original(self, 0), HookType.AROUND)


def _without_others(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **{**kwargs, **NO_OTHERS})


class _Done(dist.Work):
    """A collective that has already ended when it is returned."""

    def wait(self, _timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class OneGpuGroup(_Group):  # type: ignore[misc]
    """Ranks on one GPU: each collective copies its tensors to host memory, where gloo runs it.

    Collectives without a sum move bytes, since gloo does not support all types. 16-bit floats are
    summed in 32 bits, so that gloo's order affects a sum no more than NCCL's order would.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta | None = None) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout or timedelta(minutes=30))
        self._name = ""

    # torch does not store the name of a group that is written in Python, but asks for that name.
    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return BACKEND

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            wide = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
            total = wide.detach().to("cpu", copy=True)
            self._gloo.allreduce([total], opts).wait()
            tensor.copy_(total)
        return _Done()

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            self._here(tensor, lambda held: self._gloo.broadcast([held], opts))
        return _Done()

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        for tensor in tensors:
            self._gloo.send([_bytes(tensor)], to, tag).wait()
        return _Done()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        for tensor in tensors:
            self._here(tensor, lambda held: self._gloo.recv([held], source, tag))
        return _Done()

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], _opts: Any) -> Any:
        for parts, tensor in zip(outputs, tensors, strict=True):
            for part, found in zip(parts, self._of_all(tensor), strict=True):
                _put(part, found)
        return _Done()

    def all_gather_single(self, output: Tensor, tensor: Tensor, _opts: Any) -> Any:
        _put(output, torch.cat(self._of_all(tensor)))
        return _Done()

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Any:
        found = self._of_all(tensors[0])
        if self.rank() == opts.rootRank:
            for part, one in zip(outputs[0], found, strict=True):
                _put(part, one)
        return _Done()

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        return self.reduce_scatter([output], [list(tensor.chunk(self.size()))], opts)

    def reduce_scatter(self, outputs: list[Tensor], parts: list[list[Tensor]], opts: Any) -> Any:
        for output, mine in zip(outputs, parts, strict=True):
            total, added = torch.stack(mine), dist.AllreduceOptions()
            added.reduceOp = opts.reduceOp
            self.allreduce([total], added)
            output.copy_(total[self.rank()].view_as(output))
        return _Done()

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, to: list[int], of: list[int], _opts: Any
    ) -> Any:
        """`to`, `of`: rows to and from each rank; empty if all have the same number."""
        if to or of:
            raise NotImplementedError("parts that differ in size")
        parts = [one.chunk(self.size())[self.rank()] for one in self._of_all(tensor)]
        _put(output, torch.cat(parts))
        return _Done()

    def barrier(self, opts: Any) -> Any:
        self._gloo.barrier(opts).wait()
        return _Done()

    # the names of these methods in torch before 2.14
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single

    def _of_all(self, tensor: Tensor) -> list[Tensor]:
        """Return the bytes of each rank's tensor; all must have the same size."""
        mine = _bytes(tensor)
        found = [torch.empty_like(mine) for _ in range(self.size())]
        self._gloo.allgather([found], [mine]).wait()
        return found

    def _here(self, tensor: Tensor, start: Callable[[Tensor], Any]) -> None:
        held = _bytes(tensor)
        start(held).wait()
        _put(tensor, held)


def _bytes(tensor: Tensor) -> Tensor:
    """Copy to host memory, as bytes."""
    return tensor.detach().to("cpu", copy=True).contiguous().view(-1).view(torch.uint8)


def _put(tensor: Tensor, found: Tensor) -> None:
    tensor.copy_(found.view(tensor.dtype).view(tensor.shape))
