"""``demo --serve RUN``: one deployment for people, load tests and other tools.

It prints one line of JSON when it serves, and ends when its standard input does.

    {"url": "http://...", "servers": [{"name": "prefill", "url": "http://...", "pid": 1}, ...]}
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mixkv_demo.servers import Deployment


def described(deployment: Deployment) -> dict[str, Any]:
    """Where to send requests, and each server with its process."""
    pids = deployment.fleet.pids()
    servers = [
        {"name": server.name, "url": server.url, "pid": pids[server.name]}
        for server in (*deployment.servers, *deployment.routers)
    ]
    return {"url": deployment.url, "servers": servers}


def serve(deployment: Deployment) -> None:
    """Print the line; return when standard input ends. Raises ServerDied if a server does first."""
    print(json.dumps(described(deployment)), flush=True)
    deployment.watch(sys.stdin.read)
