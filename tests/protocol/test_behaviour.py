"""Check the behaviour of SGLang's functions that the plugin relies on, beyond names and parameters.

These tests search the functions' source, since calling them would need a server. If a new SGLang
release fails one, check whether the function still behaves as the sentence in its row says.
"""

from __future__ import annotations

import inspect
import pkgutil
import re

import pytest

pytestmark = pytest.mark.mooncake_only

SRT = "sglang.srt.disaggregation"
PREFILL = f"{SRT}.prefill:SchedulerDisaggregationPrefillMixin"
NIXL = f"{SRT}.nixl.conn:NixlKVManager"
QUEUES = f"{SRT}.prefill:PrefillBootstrapQueue", f"{SRT}.decode:DecodePreallocQueue"

# A function, a pattern in its source, and the behaviour that the pattern shows. The ranks of a
# group can reach different verdicts. That is safe because no row is touched after a room is closed,
# and SGLang closes a room on every rank before it frees the pages.
BEHAVIOURS = [
    (f"{SRT}.utils:_all_reduce_polls", r"ReduceOp\.MIN",
     "a queue acts on the lowest status among its ranks"),
    (f"{SRT}.decode:DecodeTransferQueue.pop_transferred",
     r"failure_exception\(\).*_release_request\(",
     "decode closes a failed room before it releases its pages"),
    (f"{PREFILL}.handle_inflight_transfer_failure", r"failure_exception\(\).*release_kv_cache\(",
     "prefill closes a failed room before it releases its pages"),
    *((f"{queue}.__init__", r"self\.kv_manager = self\._init_kv_manager\(\)",
       "a queue builds its manager in _init_kv_manager") for queue in QUEUES),
    *((f"{queue}._init_kv_manager", r"self\.draft_token_to_kv_pool",
       "only the queue's attribute adds the drafter's pool to KV args") for queue in QUEUES),
    (f"{PREFILL}._send_kv_chunk", r"num_kv_tokens=", "a chunk is sent with its number of tokens"),
    (f"{PREFILL}.maybe_send_cached_prefix_chunk",
     r"disagg_kv_sender\._early_send_wait_event = ",
     "the event of an early chunk is stored in its sender"),
    (f"{NIXL}.__init__", r"self\.transfer_queues\b.*enumerate\(self\.transfer_queues\).*"
     r"target=self\.transfer_worker,\s*args=\(queue,",
     "each NIXL worker has one of its manager's queues to itself"),
    (f"{NIXL}.add_transfer_request", r"self\.transfer_queues\[shard_idx\]\.put\(\s*TransferKVChunk",
     "a sender's send puts its chunk into a queue in the calling thread"),
    (f"{NIXL}.transfer_worker", r"while True:\s*kv_chunk: TransferKVChunk = queue\.get\(\)",
     "a NIXL worker posts only chunks from its queue"),
    (f"{SRT}.decode:DecodePreallocQueue.resume_retracted_reqs",
     r"self\.req_to_token_pool.*return resumed_reqs",
     "resumed requests are returned, with rows in the queue's table"),
    ("sglang.srt.speculative.base_spec_worker:BaseSpecWorker._build_hicache_draft_plan", r"return",
     "the host cache includes the drafter's pool"),
    ("sglang.srt.mem_cache.kv_cache_builder:maybe_register_hicache_draft", r"draft_plan",
     "a prefix loaded from the host includes its draft KV"),
    ("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller:HybridCacheController"
     ".should_backup", r'"mooncake" and transfer\.name in \(\s*PoolName\.DRAFT,.*MHATokenToKVPoolH',
     "every rank writes its draft heads to Mooncake's store"),
    ("sglang.srt.mem_cache.hicache_storage:SidecarPoolSpec", r"= PoolHitPolicy\.ALL_PAGES",
     "a storage hit ends at the first page without the drafter's object"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "pattern", "sentence"), BEHAVIOURS, ids=lambda text: text[-40:]
)
def test_sglangs_source_shows_the_behaviour(function: str, pattern: str, sentence: str) -> None:
    source = inspect.getsource(inspect.unwrap(pkgutil.resolve_name(function)))
    assert re.search(pattern, source, re.DOTALL), f"expected that {sentence}"
