"""The parts of scripts/gpu.sh in this process, on the CPU: that each of them can fail."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rig.gpu import load

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from mixkv_demo import __main__ as demo  # noqa: E402
from sglang_mixkv.decode import inbox  # noqa: E402
from sglang_mixkv.draft import rows as product  # noqa: E402
from sglang_mixkv.draft.slot_format import SlotCheck  # noqa: E402
from sglang_mixkv.prefill import outbox  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def order() -> Any:
    """The claims, in the model of streams."""
    made = load("part_order").Order(load("streams").here("cpu", 50), CPU)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("claim", "owner", "wait"),
    [
        ("early send", outbox, "_done"), ("indices", outbox, "_done"),
        ("forward before unpack", inbox, "_is_done"),
        ("host wait of pack", product, "own_stream"),
        ("host wait of unpack", product, "own_stream"),
    ],
)  # fmt: skip
def test_a_removed_wait_fails(order: Any, claim: str, owner: Any, wait: str) -> None:
    """Of the product."""
    assert order.wrong(claim, True) == 0
    with mock.patch.object(owner, wait, unwaited):
        assert order.wrong(claim, True) > order.size // 2


def unwaited(what: Any) -> Any:
    """An event that is done, or own_stream without its wait: on a stream in the model alone."""
    if getattr(what, "type", "cpu") == "cpu":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(what, priority=-1))


def test_a_wait_for_nothing_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the other stream's work is never late, the part has tried nothing."""
    part, made = load("part_order"), load("streams").ModelStream
    monkeypatch.setattr(made, "late", lambda _, work: work())
    with pytest.raises(load("parts").Wrong, match="early send: no wrong byte without the wait"):
        part.run(argparse.Namespace(device="cpu", delay_ms=1))


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From then on the product's `pack` or `unpack` takes a segment's rows in reverse order."""

    def reverse(name: str) -> None:
        right = getattr(product.DraftRows, name)
        wrong = lambda rows, numbers, *rest: right(rows, numbers[::-1].copy(), *rest)  # noqa: E731
        monkeypatch.setattr(product.DraftRows, name, wrong)

    return reverse


def test_copies_with_wrong_bytes_fail(backwards: Callable[[str], None]) -> None:
    """Of the product, and of the kernel, here one that does nothing; without Triton's interpreter
    the kernel is not measured."""
    part, parts, scene = load("part_rows"), load("parts"), load("scene")

    def new_case() -> Any:
        return part.Case(scene.DRAFTERS[0], "fp8", 1, "pages of 16", 40, CPU)

    assert "no kernel" in part.measure(new_case(), 1)
    case = new_case()
    idle = {"pack, Triton": int, "unpack, Triton": int}
    with (
        mock.patch.object(case, "kernel", return_value=idle),
        pytest.raises(parts.Wrong, match="pages of 16, 40 tokens, Triton: wrong bytes"),
    ):
        part.measure(case, 1)
    for name, words in (("unpack", "'pack': 0, 'unpack': [1-9]"), ("pack", "'pack': [1-9]")):
        backwards(name)
        with pytest.raises(parts.Wrong, match=f"40 tokens, torch: wrong bytes: {{{words}"):
            part.measure(new_case(), 1)


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("_sum", lambda right: lambda *of: right(*of) ^ 1 - of[0]._by_numpy, "the host does not"),
        ("verify", lambda _: lambda *_: SlotCheck.OK, "does not show a changed byte"),
        ("clear", lambda _: lambda *_: None, "wrong bytes once cleared"),
        ("clear", lambda right: lambda rows, of: right(rows, of - 1), "wrong bytes once cleared"),
    ],
)
def test_a_wrong_sum_or_clear_fails(name: str, wrong: Any, words: str) -> None:
    """Of the product: another sum than the host's, all is right; nothing, other rows."""
    part, parts, scene = load("part_rows"), load("parts"), load("scene")
    case = part.Case(scene.DRAFTERS[0], "bf16", 8, "run", 40, CPU)
    broken = wrong(getattr(product.DraftRows, name))
    with (
        mock.patch.object(product.DraftRows, name, broken),
        pytest.raises(parts.Wrong, match=words),
    ):
        part.measure(case, 1)


def test_what_is_out_of_time_is_left_out_and_the_rest_is_kept() -> None:
    """The largest requests come first."""
    part = load("part_rows")
    found = part.run(argparse.Namespace(device="cpu", repeats=1, part_limit_s=0))
    assert found.message == (
        "every byte right in 1 cases; 5 cases left out for want of time or memory"
    )
    sizes = part.TOKENS["cuda"]
    assert [*sizes] == sorted(sizes, reverse=True)


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
def test_a_request_with_wrong_bytes_fails(backwards: Callable[[str], None], backend: str) -> None:
    pytest.importorskip(backend)
    options = load("options").parse([])
    load("options").settle(options, "cpu")
    backwards("unpack")
    with pytest.raises(load("parts").Wrong, match=r"bf16: 1,\d+,\d+ wrong bytes of 1,572,864"):
        load("part_transfer").run(options, backend)


def test_attention_to_wrong_rows_fails(backwards: Callable[[str], None]) -> None:
    part, scene = load("part_flashinfer"), load("scene")
    case = part.Case(scene.DRAFTERS[0], "fp8", (1, 2), CPU)
    backwards("unpack")
    with pytest.raises(load("parts").Wrong, match="attention differs from the single server's"):
        part.checked(case, part.plain)


def test_attention_that_overlooks_a_fault_shows_nothing() -> None:
    part, scene = load("part_flashinfer"), load("scene")
    case = part.Case(scene.DRAFTERS[0], "bf16", (2, 1), CPU)
    seen: list[Any] = []

    def forgetful(*of: Any) -> Any:
        """After the comparisons: K as it was."""
        seen.append(part.plain(*of))
        return seen[-1] if len(seen) <= 5 else seen[4]

    assert part.checked(case, part.plain)["equal"] == 2
    with pytest.raises(load("parts").Wrong, match="heads have changed places: nothing was shown"):
        part.checked(case, forgetful)


DEMO = """#!{python}
import json, pathlib, sys
file = pathlib.Path(sys.argv[-1])
run = {{"name": "mixkv", "accept_length": 1.0, "argv": sys.argv[3:-2]}}
file.write_text(json.dumps({{"runs": [run]}}))
sys.exit({status})
"""


@pytest.mark.parametrize(("gpus", "tp", "base"), [(1, "1", "0"), (2, "2", "0"), (4, "2", "2")])
def test_a_demo_that_fails_fails(
    gpus: int, tp: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it showed. One that stands in for the demo has arguments that the demo takes."""
    part, python = load("part_demo"), sys.executable
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    (stand_in := tmp_path / "python").touch(0o755)
    monkeypatch.setattr(part.sys, "executable", str(stand_in))
    stand_in.write_text(DEMO.format(python=python, status=0))
    found = part.run(argparse.Namespace())
    assert found.message == f"TP {tp} -> TP 1, accept lengths: mixkv 1.0"
    given = demo.parse(found.figures[0]["argv"])
    assert given.device == "cuda"
    assert [*given.prefill] == ["--tp", tp]
    assert [*given.decode] == ["--tp", "1", "--base-gpu-id", base]
    stand_in.write_text(DEMO.format(python=python, status=1))
    with pytest.raises(load("parts").Wrong, match="ended with status 1") as why:
        part.run(argparse.Namespace())
    assert why.value.found.figures[0]["accept_length"] == 1.0


class Devices(TorchDispatchMode):
    """Operations with a tensor of the host beside scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: set[str] = set()
        self.on_host: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, torch.Tensor)]
        copies = "copy" in str(func) and any(tensor.device.type == "cpu" for tensor in given)
        self.ran.add(str(func))
        if copies or any(tensor.device.type == "cpu" and tensor.dim() for tensor in given):
            self.on_host.add(str(func))
        return func(*args, **(kwargs or {}))


def test_a_cuda_graph_can_hold_the_products_copies() -> None:
    """Tensors of a GPU without their memory: nothing comes from the host once it is prepared."""
    part, heads, log = load("part_rows"), range(8), Devices()
    address = mock.patch.object(FakeTensor, "data_ptr", return_value=256, create=True)
    with FakeTensorMode(allow_non_fake_inputs=True), address, part.on_the_current_stream():
        pool = [torch.empty((64, 8, 128), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        rows = load("row_case").Prepared(pool, heads, by_numpy=False)
        slot = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        given = load("scene").rows_of(64, 16, 1), heads, slot
        for turn in (nullcontext(), log):
            with turn:
                rows.pack(*given, 7)
                rows.unpack(*given)
    assert {"aten.index_select.out", "aten.index_put_.default", "aten.fill_.Tensor"} <= log.ran
    assert log.on_host == set()


@pytest.mark.parametrize(
    ("share", "size", "words"),
    [
        (0.81, 128 << 20, "torch at 80% of a device copy or more: the kernel is not needed (81% "),
        (0.79, 128 << 20, "torch below 80% of a device copy: the kernel is needed (79% in unpack "),
        (
            0.78,
            128 << 20,
            "torch below 80% of a device copy: the kernel is no help (78% in unpack ",
        ),
        (
            0.77,
            128 << 20,
            "torch below 80% of a device copy: the kernel is no help (77% in unpack ",
        ),
        (0.2, 64 << 20, "no request is large enough to judge"),
    ],
)
def test_the_verdict_is_over_requests_that_count(share: float, size: int, words: str) -> None:
    """The kernel is at 90 % where torch is at 79 %, no faster at 78 %, else not measured."""
    kernel = {0.79: 0.9, 0.78: 0.78}.get(share)
    record = {"case": "DFLASH", "bytes": size, "pack, torch share": 0.9}
    record |= {} if kernel is None else {"unpack, Triton share": kernel}
    small = {**record, "bytes": 1 << 20, "unpack, torch share": 0.1}
    verdict = load("part_rows").verdict([small, {**record, "unpack, torch share": share}])
    assert verdict.startswith(words)
    beside = "not measured" if kernel is None else f"{kernel:.0%}"
    assert f"the kernel {beside} there" in verdict or "no request" in words
