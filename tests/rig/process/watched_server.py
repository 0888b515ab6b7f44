"""`sglang.launch_server` whose ranks each write what they hold to a file, twice a second.

    idle     SGLang knows of no open request; its own check of pages and request slots has then
             run, which ends a server that leaks
    left     what is wrong with the plugin's channel; nothing without the plugin

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
    """Return what SGLang's tables of rooms hold in an idle manager, with or without the plugin."""
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
            with suppress(AttributeError):  # a stage's event loop sets some, when it begins
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
