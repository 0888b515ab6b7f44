"""The behaviour of SGLang's functions, beyond their names and parameters, that the plugin relies
on.

They are read, since each needs a server to run. A release of SGLang that does otherwise fails here,
and needs a look at what is named.
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

# A function, what its source has, and what that means. One rank's verdict is not its group's: rows
# are not touched once a room is closed, and SGLang closes it on every rank before it gives the
# pages back.
BEHAVIOURS = [
    (f"{SRT}.utils:_all_reduce_polls", r"ReduceOp\.MIN",
     "a queue acts on the lowest of the statuses of its ranks"),
    (f"{SRT}.decode:DecodeTransferQueue.pop_transferred",
     r"failure_exception\(\).*_release_request\(",
     "decode closes a failed room before it releases its pages"),
    (f"{PREFILL}.handle_inflight_transfer_failure", r"failure_exception\(\).*release_kv_cache\(",
     "prefill closes a failed room before it releases its pages"),
    *((f"{queue}.__init__", r"self\.kv_manager = self\._init_kv_manager\(\)",
       "a queue builds its manager in _init_kv_manager") for queue in QUEUES),
    *((f"{queue}._init_kv_manager", r"self\.draft_token_to_kv_pool",
       "the drafter's pool comes to KV args from the queue's attribute alone") for queue in QUEUES),
    (f"{PREFILL}._send_kv_chunk", r"num_kv_tokens=", "a chunk comes with its number of tokens"),
    (f"{PREFILL}.maybe_send_cached_prefix_chunk",
     r"disagg_kv_sender\._early_send_wait_event = ",
     "the event of an early chunk lies on its sender"),
    (f"{NIXL}.__init__", r"self\.transfer_queues\b.*enumerate\(self\.transfer_queues\).*"
     r"target=self\.transfer_worker,\s*args=\(queue,",
     "a worker of NIXL's has one of the queues that its manager was given, to itself"),
    (f"{NIXL}.add_transfer_request", r"self\.transfer_queues\[shard_idx\]\.put\(\s*TransferKVChunk",
     "a sender's send puts its chunk into a queue itself"),
    (f"{NIXL}.transfer_worker", r"while True:\s*kv_chunk: TransferKVChunk = queue\.get\(\)",
     "a worker of NIXL's posts nothing but what its queue gives"),
    (f"{SRT}.decode:DecodePreallocQueue.resume_retracted_reqs",
     r"self\.req_to_token_pool.*return resumed_reqs",
     "resumed requests are returned, with rows in the queue's table"),
    ("sglang.srt.speculative.base_spec_worker:BaseSpecWorker._build_hicache_draft_plan", r"return",
     "the host cache knows the drafter's pool"),
    ("sglang.srt.mem_cache.kv_cache_builder:maybe_register_hicache_draft", r"draft_plan",
     "a prefix that comes back from the host brings its draft KV"),
    ("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller:HybridCacheController"
     ".should_backup", r'"mooncake" and transfer\.name in \(\s*PoolName\.DRAFT,.*MHATokenToKVPoolH',
     "all ranks store a drafter's heads in Mooncake's store"),
    ("sglang.srt.mem_cache.hicache_storage:SidecarPoolSpec", r"= PoolHitPolicy\.ALL_PAGES",
     "a page without the drafter's object ends what is found in storage"),
    ("sglang.srt.managers.scheduler:Scheduler",
     r"self\.init_disaggregation\(\).*self\.init_request_dispatcher\(\).*"
     r"def init_request_dispatcher.*self\.attach_hicache_storage_wrapped",
     "a scheduler binds what attaches storage after its queues are made"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "pattern", "sentence"), BEHAVIOURS, ids=lambda text: text[-40:]
)
def test_sglang_does_so(function: str, pattern: str, sentence: str) -> None:
    source = inspect.getsource(inspect.unwrap(pkgutil.resolve_name(function)))
    assert re.search(pattern, source, re.DOTALL), f"expected that {sentence}"
