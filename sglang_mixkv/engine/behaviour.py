"""What SGLang does, beyond names and parameters (seams.py), that the draft channel relies on.

Read off the source of SGLang's functions, without a server, in some 20 ms. `doctor --selftest`,
tests/protocol/test_behaviour.py and, with an untested release, the start compare the installed one.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_PREFILL = "sglang.srt.disaggregation.prefill"
_DECODE = "sglang.srt.disaggregation.decode"
_CONN = "sglang.srt.disaggregation.common.conn"


class Behaviour(NamedTuple):
    """`pattern`: what the function's source has where SGLang does so."""

    sentence: str
    function: str
    pattern: str


# One rank's verdict is not its group's: rows are not touched once the room is closed, and SGLang
# closes it on every rank before it gives the pages back.
BEHAVIOURS = (
    Behaviour(
        "a queue acts on the lowest of the statuses of its ranks",
        "sglang.srt.disaggregation.utils:_all_reduce_polls", r"ReduceOp\.MIN",
    ),
    Behaviour(
        "decode closes a failed room before it releases its pages",
        f"{_DECODE}:DecodeTransferQueue.pop_transferred",
        r"(?s)failure_exception\(\).*_release_request\(",
    ),
    Behaviour(
        "prefill closes a failed room before it releases its pages",
        f"{_PREFILL}:SchedulerDisaggregationPrefillMixin.handle_inflight_transfer_failure",
        r"(?s)failure_exception\(\).*release_kv_cache\(",
    ),
    *(
        Behaviour(
            "a queue builds its manager in _init_kv_manager",
            f"{queue}.__init__", r"self\.kv_manager = self\._init_kv_manager\(\)",
        )
        for queue in (f"{_PREFILL}:PrefillBootstrapQueue", f"{_DECODE}:DecodePreallocQueue")
    ),
    *(
        Behaviour(
            "the drafter's pool comes to KV args from the queue's attribute alone",
            f"{queue}._init_kv_manager", r"self\.draft_token_to_kv_pool",
        )
        for queue in (f"{_PREFILL}:PrefillBootstrapQueue", f"{_DECODE}:DecodePreallocQueue")
    ),
    Behaviour(
        "a chunk comes with its number of tokens",
        f"{_PREFILL}:SchedulerDisaggregationPrefillMixin._send_kv_chunk", r"num_kv_tokens=",
    ),
    Behaviour(
        "the event of an early chunk lies on its sender",
        f"{_PREFILL}:SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk",
        r"disagg_kv_sender\._early_send_wait_event = ",
    ),
    Behaviour(
        "a receiver knows which ranks send no target",
        f"{_CONN}:CommonKVReceiver._setup_bootstrap_infos", r'bootstrap_info\["is_dummy"\] = ',
    ),
    Behaviour(
        "resumed requests are returned, with rows in the queue's table",
        f"{_DECODE}:DecodePreallocQueue.resume_retracted_reqs",
        r"(?s)self\.req_to_token_pool.*return resumed_reqs",
    ),
)  # fmt: skip


def problems(expected: Iterable[Behaviour] = BEHAVIOURS) -> Iterator[str]:
    """Where the installed SGLang may do otherwise."""
    for sentence, function, pattern in expected:
        try:
            source = inspect.getsource(inspect.unwrap(pkgutil.resolve_name(function)))
        except (ImportError, AttributeError, OSError, TypeError) as error:
            yield f"{function}: expected that {sentence}; it cannot be read ({error})"
            continue
        if not re.search(pattern, source):
            yield f"{function}: expected that {sentence}; its source does not have {pattern}"
