"""Run a case of the ring on two machines: prefill's ranks on the second, decode's on the first.
Importing this module imports SGLang with the plugin, and sets the environment variables that SGLang
reads then."""

from __future__ import annotations

import os
import threading
from typing import Any

from rig.channel.planes import Way, enter
from rig.ring import run
from rig.ring.load import load_sglang
from rig.ring.model import Case
from rig.ring.rank import wait_for_port
from rig.ring.run import Outcome

PORTS = [30_111]
os.environ.update(SGLANG_MIXKV_PATIENCE="50", SGLANG_MIXKV_STAGING_MB="8")
load_sglang()


def serve_prefill(pipe: Any) -> None:
    """Run prefill's ranks for one case after another, until the first machine closes the pipe."""
    pipe.send("imported")
    while True:
        way, case = pipe.recv()
        enter(way)
        servers = run.start(case, PORTS, ["prefill"])
        try:
            pipe.send(servers.reports())
            pipe.recv()
        finally:
            servers.end()
        pipe.send("ended")


def run_both(case: Case, way: Way, far: Any) -> Outcome:
    """Run a case on both machines. `far`: a running call of `serve_prefill`."""
    far.send((enter(way), case))
    wait_for_port(PORTS[0], way.peer.host)
    servers, found = run.start(case, PORTS, ["decode"]), {}

    def take() -> None:
        found.update(far.recv())
        servers.all_sent()

    thread = threading.Thread(target=take)
    thread.start()
    try:
        found |= servers.reports()
        thread.join()
    finally:
        far.send("end")
        servers.end()
    assert far.recv() == "ended"  # the port is free for the next case
    return Outcome.of(found)
