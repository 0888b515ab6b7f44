"""Time to the first token of the small pair, with the plugin and with stock SGLang.

Two deployments stand side by side, behind a router each. They get the same prompts one by one in
turns, in an order drawn anew each turn; the servers that are not asked sleep. No prompt comes
again, so that no cache has it. `difference`: the plugin's minus stock's, request by request, with
its interval of 95 %.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

import numpy as np
from common import Parts, Record, interval, options, show

from mixkv_demo.launch import Topology
from mixkv_demo.pair import prompts, request_body
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import disaggregated
from sglang_mixkv.tools.client import Answer, stream

FLAGS = {"stock": (), "channel": ("--enable-mixkv",)}
SIZES = (("2", "1"), ("1", "1"))
ENV = {"SGLANG_MIXKV_PATIENCE": "5"}
REQUESTS, WARMUP = 300, 8


def measure(prefill: str, decode: str, backend: str, count: int) -> list[Record]:
    order, taken = np.random.default_rng(1), dict[str, list[Answer]]()
    with ExitStack() as stack:
        made = {}
        for way, flags in FLAGS.items():
            sides = ("--tp", prefill), ("--tp", decode)
            topology = Topology(*sides, flags, flags, backend=backend, env=ENV)
            made[way] = disaggregated(stack.enter_context(Fleet()), "mla", topology)
        for turn, prompt in enumerate(prompts(count + WARMUP)):
            for way in order.permutation(list(FLAGS)):
                one, body = made[way], request_body(prompt)
                answer = one.watch(lambda url=one.url, body=body: stream(url, body))
                if turn >= WARMUP:
                    taken.setdefault(way, []).append(answer)
            if turn % 50 == 0:
                print(prefill, "to", decode, turn, file=sys.stderr)
    if any(a.tokens != b.tokens for a, b in zip(*taken.values(), strict=True)):
        raise RuntimeError("the two deployments gave different outputs")
    head = {"size": f"{prefill} to {decode}", "backend": backend, "requests": count}
    ttft = {way: np.array([a.first_token_s * 1e3 for a in taken[way]]) for way in FLAGS}
    difference = ttft["channel"] - ttft["stock"]
    low, high = interval(np.mean, difference)
    rows = [
        {**head, "way": way, "mean ms": ttft[way].mean(), "median ms": np.median(ttft[way]),
         "accept length": sum(len(a.tokens) for a in taken[way])
         / sum(a.verify_rounds for a in taken[way])}
        for way in FLAGS
    ]  # fmt: skip
    return [
        *rows,
        {**head, "way": "difference", "mean ms": difference.mean(),
         "median ms": np.median(difference), "low": low, "high": high},
    ]  # fmt: skip


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--backend", choices=("mooncake", "nixl"), default="mooncake")
    arguments = parser.parse_args()
    parts: Parts = {"ttft": []}
    for prefill, decode in SIZES[1:] if arguments.quick else SIZES:
        count = arguments.repeats or (8 if arguments.quick else REQUESTS)
        parts["ttft"] += measure(prefill, decode, arguments.backend, count)
    show(arguments, parts)


if __name__ == "__main__":
    main()
