"""`sglang.launch_server` whose host cache leaves the drafter out, as another release might.

SGLang's child processes import this file as well, before they apply hooks.
"""

from __future__ import annotations

import runpy
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

REGISTER = "sglang.srt.mem_cache.kv_cache_builder.maybe_register_hicache_draft"


def leave_out(_original: Any, **_given: Any) -> None:
    """No pool on the host for the drafter."""


HookRegistry.register(REGISTER, leave_out, HookType.AROUND)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
