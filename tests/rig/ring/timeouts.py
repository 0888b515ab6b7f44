"""SGLang's timeouts, shortened for tests, and what a fault leaves for a while."""

from __future__ import annotations

# The prefill's is longer: a rank that is done early opens its next room at once, and waits
# there while another rank's request still ends by the decode side's timeout (and its ABORT).
BOOTSTRAP_S, WAITING_S = 25, 4
TIMEOUTS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(BOOTSTRAP_S),
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(WAITING_S),
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "3",
    "SGLANG_MIXKV_PATIENCE": "3",
}
GONE = "waiting left", "transfers left"  # a room that no request came for is known for a minute
