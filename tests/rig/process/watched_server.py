"""Run `sglang.launch_server` so that each rank writes its state to a file twice a second.

    idle     SGLang has no request in flight. SGLang's own check for leaked pages and request slots
             has passed then; a failure would end the server
    left     errors and leaks of the plugin's channel; empty without the plugin

SGLang's child processes also import this file before they apply hooks.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from rig.channel.invariants import left_by

STATE_DIR_ENV = "MIXKV_TESTS_STATE_DIR"
EVERY_S = 0.5
TABLES = (
    "request_status", "transfer_infos", "req_to_decode_prefix_len",
    "prefill_response_tracker", "required_prefill_response_num_table",
)  # fmt: skip


def state(scheduler: Any) -> dict[str, Any]:
    prefill = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    manager = (prefill or scheduler.disagg_decode_prealloc_queue).kv_manager
    return {
        "at": time.time(), "idle": bool(scheduler.is_fully_idle()), "left": left_by(manager),
    }  # fmt: skip


def tables(manager: Any) -> list[str]:
    """Describe the entries left in SGLang's tables of rooms in an idle manager."""
    left = {name: getattr(manager, name, None) for name in TABLES}
    return [
        f"{n} holds {sorted(t, key=str)[:5]}" for n, t in left.items() if isinstance(t, dict) and t
    ]


def watch(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Replace Scheduler.__init__."""
    original(scheduler, *args, **kwargs)
    path = Path(os.environ[STATE_DIR_ENV], f"{os.getpid()}.json")

    def report() -> None:
        while True:
            with suppress(
                AttributeError
            ):  # a pipeline stage's event loop sets some attributes late
                partial = path.with_suffix(".tmp")
                partial.write_text(json.dumps(state(scheduler)))
                partial.replace(path)
            time.sleep(EVERY_S)

    threading.Thread(target=report, daemon=True).start()


if __name__ in ("__main__", "__mp_main__"):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.__init__", watch, HookType.AROUND
    )

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
