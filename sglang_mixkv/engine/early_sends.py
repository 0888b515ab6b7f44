"""SGLang's early sends, off where SGLang itself does not wait for what it sends.

A prefix that prefill has cached is sent while the forward of the rest begins
(prefill.py, maybe_send_cached_prefix_chunk), and with each further chunk the one before. The event
behind the forward that writes it goes along; NIXL's manager drops it, and Mooncake's did not wait
for it up to 0.5.21. The target's own KV could then leave before it is written.
"""

from __future__ import annotations

import os

from sglang_mixkv.engine.releases import sglang_version

VARIABLE = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"


def switch_off(backend: str) -> str:
    """Switch them off where needed, and say so. An operator's own setting stays."""
    waits = backend == "mooncake" and not sglang_version().startswith("0.5.21")
    if VARIABLE in os.environ or waits:
        return ""
    os.environ[VARIABLE] = "0"
    return f"; {VARIABLE}=0, since SGLang's {backend} does not wait"
