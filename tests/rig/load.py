"""SGLang on this machine's CPU, with the plugin: imported once, before any rank is forked.

Importing this module sets the environment that SGLang's import reads.
"""

from __future__ import annotations

import importlib
import os
import sys

import mixkv_cpu

os.environ.update(mixkv_cpu.launch_env())
os.environ.update(CUDA_VISIBLE_DEVICES="", MC_LOG_LEVEL="ERROR", GLOG_logtostderr="1")
for folder in reversed(os.environ["PYTHONPATH"].split(os.pathsep)):
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)


def load_sglang() -> None:
    """Import what the ranks need, but for Mooncake's engine, which starts threads."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for module in (
        "sglang.srt.disaggregation.mooncake",
        "sglang.srt.disaggregation.decode",
        "sglang.srt.disaggregation.nixl",
        "sglang.srt.managers.scheduler",
        "sglang_mixkv.engine.manager",
    ):
        importlib.import_module(module)
