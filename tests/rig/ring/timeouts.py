"""SGLang's timeouts, shortened for tests, and entries that remain for some time after a fault."""

from __future__ import annotations

# Prefill's bootstrap timeout is longer, since a rank begins its next request as soon as one has
# ended, and waits until the other ranks' requests have ended by decode's timeout and ABORT.
BOOTSTRAP_S, WAITING_S = 25, 4
TIMEOUTS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(BOOTSTRAP_S),
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(WAITING_S),
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "3",
    "SGLANG_MIXKV_PATIENCE": "3",
}
GONE = "waiting left", "transfers left"  # an OPEN without a request is retained for a minute
