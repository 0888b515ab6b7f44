"""Import SGLang's CPU engine with the plugin, once, before any rank is forked.

Importing this module sets environment variables that SGLang reads when it is imported.
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


def import_sglang() -> None:
    """Import the modules that ranks need, except Mooncake's engine, which starts threads."""
    for module in ("mooncake", "decode", "nixl"):
        importlib.import_module(f"sglang.srt.disaggregation.{module}")
    importlib.import_module("sglang.srt.managers.scheduler")


def load_sglang() -> None:
    """Import SGLang, and load its plugins."""
    import_sglang()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    importlib.import_module("sglang_mixkv.engine.manager")
