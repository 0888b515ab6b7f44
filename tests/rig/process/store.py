"""A Mooncake store: a master, and a node whose memory is independent of the servers that use it."""

from __future__ import annotations

import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

from mixkv_demo.launch import HOST
from mixkv_demo.ports import free_port
from mixkv_demo.processes import Fleet
from sglang_mixkv.tools.client import request

START_S, REST_S = 60, 3
MIB = 1024 * 1024


def store(fleet: Fleet, **more: Any) -> dict[str, Any]:
    """Start a store, and return SGLang's `--hicache-storage-backend-extra-config` for it, plus
    `more`. Servers contribute no memory to it."""
    ports = [free_port() for _ in range(3)]
    rpc, metrics, node = map(str, ports)
    master = f"{HOST}:{rpc}"
    programs = {
        "mooncake_master": (
            "--rpc_address", HOST, "--rpc_port", rpc, "--metrics_host", HOST, "--metrics_port",
            metrics, "--enable_metric_reporting=false",
        ),
        "mooncake_client": (
            "--host", HOST, "--port", node, "--master_server_address", master,
            "--metadata_server", "P2PHANDSHAKE", "--global_segment_size", str(256 * MIB),
        ),
    }  # fmt: skip
    for name, flags in programs.items():
        fleet.start(name, (str(Path(sys.executable).with_name(name)), *flags), {})
        _wait(fleet, ports[0] if name == "mooncake_master" else ports[2])
    return {
        "master_server_address": master, "metadata_server": "P2PHANDSHAKE", "protocol": "tcp",
        "local_hostname": HOST, "global_segment_size": 0,
        "master_metrics_port": int(metrics), **more,
    }  # fmt: skip


def stored(config: dict[str, Any]) -> int:
    """Wait until no more objects are written, and return the number of stored objects."""
    url, last = f"http://{HOST}:{config['master_metrics_port']}/metrics", -1
    while True:
        found = re.findall(r"^master_key_count (\d+)", request("GET", url).text, re.MULTILINE)
        if last == (last := int(found[0])):
            return last
        time.sleep(REST_S)


def _wait(fleet: Fleet, port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        fleet.check()
        try:
            socket.create_connection((HOST, port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return
