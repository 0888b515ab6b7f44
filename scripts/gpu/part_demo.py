"""The demo's three runs on CUDA, where SGLang is installed: `python -m sglang_mixkv demo --device
cuda`. Prefill at TP 2 takes two GPUs; with one GPU both sides run at TP 1 on it, which shows that
the plugin starts and serves there, and nothing of unequal sizes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections import deque
from importlib import metadata
from pathlib import Path

import needs
import torch
from parts import Found, Lacks, Wrong

NEEDED = {
    "sglang": "sglang", "sgl_kernel": "sglang-kernel", "sglang_router": "sglang-router",
    "mooncake": "mooncake-transfer-engine", "msgspec": "msgspec", "zmq": "pyzmq",
    "requests": "requests", "rich": "rich",
}  # fmt: skip


def run(options: argparse.Namespace) -> Found:
    check_machine(options)
    gpus = torch.cuda.device_count()
    tp = min(2, gpus)
    decode = 2 if gpus > 2 else 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "demo.json"
        status, last = passed_on(
            [sys.executable, "-m", "sglang_mixkv", "demo", "--device", "cuda",
             "--prefill", f"--tp {tp}", "--decode", f"--tp 1 --base-gpu-id {decode}",
             "--json", str(file)],
        )  # fmt: skip
        figures = json.loads(file.read_text())["runs"] if file.exists() else []
    names = ("name", "accept_length", "output_identical")
    short = [{name: figure.get(name, "") for name in names} for figure in figures]
    lengths = ", ".join(f"{r['name']} {r['accept_length']}" for r in short)
    found = Found(f"TP {tp} -> TP 1, accept lengths: {lengths}", figures, short)
    if status:
        raise Wrong(f"the demo ended with status {status}: {' | '.join(last)}", found)
    return found


def check_machine(options: argparse.Namespace) -> None:
    """Lacks, unless the demo can start here."""
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise Lacks(f"the packages {', '.join(missing)}")
    plugins = metadata.entry_points(group="sglang.srt.plugins")
    if not any(plugin.name == "mixkv" for plugin in plugins):
        raise Lacks("sglang-mixkv as an installed package, or its wheel: SGLang does not see it")
    needs.check_backend("mooncake", options.device)
    if lacks := needs.compiler() or needs.nvcc():
        raise Lacks(lacks)


def passed_on(command: list[str]) -> tuple[int, list[str]]:
    """Its status and last lines. All lines are this process's too, at once: where its time is up
    they are what is known."""
    last: deque[str] = deque(maxlen=3)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            last.append(line.rstrip())
    return child.returncode, list(last)
