"""Switches SGLang's early sends off where SGLang itself does not wait for what it sends.

fault   A prefix that prefill has cached is sent while the forward of the rest begins (prefill.py,
        maybe_send_cached_prefix_chunk), and with each further chunk the one before. The event
        behind the forward that writes it goes along; NIXL drops it (add_transfer_request in
        nixl/conn.py), and Mooncake did not wait for it up to 0.5.21: the target's own KV can
        leave before it is written
patch   upstream/nixl-early-sends.patch
until   all releases that are served wait, over both backends
"""

from __future__ import annotations

import os

EARLY_SENDS = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"


def switch_off_early_sends(backend: str, release: str) -> str:
    """Switch SGLang's early sends off where SGLang itself does not wait for what it sends, and say
    so. An operator's own setting stays."""
    waits = backend == "mooncake" and not release.startswith("0.5.21")
    if EARLY_SENDS in os.environ or waits:
        return ""
    os.environ[EARLY_SENDS] = "0"
    return f"; {EARLY_SENDS}=0, since SGLang's {backend} does not wait"
