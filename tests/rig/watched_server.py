"""`sglang.launch_server` whose ranks write what they hold, twice a second, into a file each.

    idle     SGLang knows of no open request; its own check of pages and request slots has then
             run, which ends a server that leaks
    left     what `check_integrity` finds; nothing without the plugin
    fails    how often prefill told a reader that it gets no draft KV, by code and detail
    asked, bytes
             what code of the plugin has allocated in Python and not given back, of when the file
             ASKED was written last; with TRACE_ENV alone, as each allocation then costs more

SGLang's child processes import this file as well, before they apply hooks.
"""

from __future__ import annotations

import json
import os
import runpy
import threading
import time
import tracemalloc
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

STATE_DIR_ENV = "MIXKV_TESTS_STATE_DIR"
TRACE_ENV = "MIXKV_TESTS_TRACE"
ASKED = "asked"
EVERY_S = 0.5
TABLES = (
    "request_status", "transfer_infos", "req_to_decode_prefix_len",
    "prefill_response_tracker", "required_prefill_response_num_table",
)  # fmt: skip
FAILS: Counter[str] = Counter()
OF_PLUGIN = tracemalloc.Filter(True, "*/sglang_mixkv/*")


def state(scheduler: Any) -> dict[str, Any]:
    prefill = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    queue = prefill or scheduler.disagg_decode_prealloc_queue
    manager = queue.kv_manager
    return {
        "at": time.time(),
        "idle": bool(scheduler.is_fully_idle()),
        "left": getattr(manager, "check_integrity", list)(),
        "fails": dict(FAILS),
    }


def tables(manager: Any) -> list[str]:
    """What SGLang's tables of rooms hold in an idle manager, with the plugin or without."""
    left = {name: getattr(manager, name, None) for name in TABLES}
    return [
        f"{n} holds {sorted(t, key=str)[:5]}" for n, t in left.items() if isinstance(t, dict) and t
    ]


def count_fails() -> None:
    """A Note tells why, and is counted by its code alone."""
    from sglang_mixkv import series
    from sglang_mixkv.engine.metrics import MetricsReporter

    real = MetricsReporter.__call__

    def noted(self: MetricsReporter, note: Any) -> None:
        real(self, note)
        if note.what in series.FAILS:
            FAILS[f"{note.what}: {note.detail}"] += 1

    MetricsReporter.__call__ = noted  # type: ignore[method-assign]


def plugin_bytes() -> int:
    found = tracemalloc.take_snapshot().filter_traces([OF_PLUGIN])
    return sum(one.size for one in found.statistics("filename"))


def watch(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """In the place of Scheduler.__init__."""
    count_fails()
    original(scheduler, *args, **kwargs)
    path = Path(os.environ[STATE_DIR_ENV], f"{os.getpid()}.json")
    asked = path.with_name(ASKED)

    def report() -> None:
        measured: dict[str, Any] = {}
        while True:
            if asked.exists() and asked.read_text() != measured.get("asked"):
                measured = {"asked": asked.read_text(), "bytes": plugin_bytes()}
            with suppress(AttributeError):  # a stage's event loop sets some, when it begins
                partial = path.with_suffix(".tmp")
                partial.write_text(json.dumps(state(scheduler) | measured))
                partial.replace(path)
            time.sleep(EVERY_S)

    threading.Thread(target=report, daemon=True).start()


if __name__ in ("__main__", "__mp_main__"):
    if os.environ.get(TRACE_ENV):
        tracemalloc.start()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.__init__", watch, HookType.AROUND
    )

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
