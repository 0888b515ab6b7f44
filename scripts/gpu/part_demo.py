"""The demo's three runs on CUDA, where SGLang is installed: `python -m mixkv_demo --device
cuda`. Prefill at TP 2 takes two GPUs; with one GPU both sides run at TP 1 on it, which shows that
the plugin starts and serves there, and nothing of unequal sizes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from parts import Found, Wrong


def run(options: argparse.Namespace) -> Found:
    gpus = torch.cuda.device_count()
    tp, decode = min(2, gpus), 2 if gpus > 2 else 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "demo.json"
        done = subprocess.run(
            [sys.executable, "-m", "mixkv_demo", "--device", "cuda",
             "--prefill", f"--tp {tp}", "--decode", f"--tp 1 --base-gpu-id {decode}",
             "--json", str(file)], stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        figures = json.loads(file.read_text())["runs"] if file.exists() else []
    lengths = ", ".join(f"{run['name']} {run['accept_length']}" for run in figures)
    found = Found(f"TP {tp} -> TP 1, accept lengths: {lengths}", figures)
    if done.returncode:
        raise Wrong(f"the demo ended with status {done.returncode}: see the output", found)
    return found
