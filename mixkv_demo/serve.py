"""``demo --serve RUN``: run one deployment, for people, load tests and other tools.

The command prints one line of JSON when the deployment is ready, and ends when standard input does.

    {"url": "http://...", "servers": [{"name": "prefill", "url": "http://...", "pid": 1}, ...]}
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mixkv_demo.servers import Deployment


def described(deployment: Deployment) -> dict[str, Any]:
    """Return the URL for requests, and each server with its PID."""
    pids = deployment.fleet.pids()
    servers = [
        {"name": server.name, "url": server.url, "pid": pids[server.name]}
        for server in (*deployment.servers, *deployment.routers)
    ]
    return {"url": deployment.url, "servers": servers}


def serve(deployment: Deployment) -> None:
    """Print the JSON; return when standard input ends. Raises ServerDied if a server ends first."""
    print(json.dumps(described(deployment)), flush=True)
    deployment.watch(sys.stdin.read)
