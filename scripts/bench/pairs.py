"""Real pairs with the plugin and without: TTFT, tokens a second, memory, start-up.

Two ways stand beside each other: stock and channel, or unchecked (`--mixkv-verify off`) and
channel.

    pairs     two deployments of the small pair stand side by side, behind a router each, and get
              the same prompts one by one in turns, in an order drawn anew each turn; idle servers
              sleep. Prompts never come again, so that no cache has them.
    servers   seconds until a deployment has served its first request, and the resident memory of
              its ranks then; deployments are started one at a time, in turns.
    ranks     the same of a rank of each side without a model: seconds that SGLang's manager takes,
              and memory before and after requests of 8,192 tokens.

Intervals of 95 % are a bootstrap's over the turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import psutil
import rings
from common import Check, Record, Result, interval, options
from members import SIDES

from mixkv_demo.launch import Topology
from mixkv_demo.pair import prompts, request_body
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import Deployment, disaggregated
from sglang_mixkv.tools.client import Answer, stream

WAYS = ("stock", "channel")
FLAGS = {
    "stock": (),
    "unchecked": ("--enable-mixkv", "--mixkv-verify", "off"),
    "channel": ("--enable-mixkv",),
}
ENV = {"SGLANG_MIXKV_PATIENCE": "5"}
SIZES = ("2-1", "1-1")
PAIRS, STARTS, WARMUP, RANK_STARTS = 300, 3, 8, 5
LONG, LONG_REQUESTS = 8192, 8
MOST_TTFT_MS = 5.0


@contextmanager
def deployment(way: str, size: str, backend: str) -> Iterator[Deployment]:
    prefill, decode = size.split("-")
    flags = FLAGS[way]
    topology = Topology(("--tp", prefill), ("--tp", decode), flags, flags, backend=backend, env=ENV)
    with Fleet() as fleet:
        yield disaggregated(fleet, "mla", topology)


# ---------------------------------------------------------------- requests


def pairs(ways: tuple[str, ...], size: str, backend: str, count: int, tokens: int) -> list[Record]:
    """One record a way, and one of the difference."""
    asked = prompts(count + WARMUP)
    order = np.random.default_rng(1)
    found: dict[str, list[Answer]] = {way: [] for way in ways}
    with ExitStack() as stack:
        made = {way: stack.enter_context(deployment(way, size, backend)) for way in ways}
        for turn, prompt in enumerate(asked):
            body = request_body(prompt)
            if tokens:
                body["sampling_params"]["max_new_tokens"] = tokens
            for way in order.permutation(ways):
                answer = made[way].watch(lambda w=way, b=body: stream(made[w].url, b))
                if turn >= WARMUP:
                    found[way].append(answer)
            if turn % 50 == 0:
                print("pairs", size, backend, turn, "of", len(asked), file=sys.stderr)
    other = [a.tokens != b.tokens for a, b in zip(*found.values(), strict=True)]
    head = {"size": size, "backend": backend, "requests": count}
    records = [{**head, "way": way, **figures(answers)} for way, answers in found.items()]
    return [*records, {**head, "way": "difference", "other_outputs": sum(other), **compared(found)}]


def figures(answers: list[Answer]) -> Record:
    return {
        "ttft_ms": float(np.mean(ttft(answers))),
        "ttft_median_ms": float(np.median(ttft(answers))),
        "tokens_s": float(np.mean(speed(answers))),
        "accept_length": sum(len(a.tokens) for a in answers)
        / sum(a.verify_rounds for a in answers),
    }


def ttft(answers: list[Answer]) -> Any:
    """Milliseconds."""
    return np.array([answer.first_token_s for answer in answers]) * 1e3


def speed(answers: list[Answer]) -> Any:
    """Tokens a second of each request, from its sending to its end."""
    return np.array([len(answer.tokens) / answer.seconds for answer in answers])


def compared(found: dict[str, list[Answer]]) -> Record:
    """The second way's minus the first's, request by request."""
    first, second = found.values()
    record: Record = {}
    for name, values in (
        ("ttft", ttft(second) - ttft(first)), ("tokens_s", speed(second) - speed(first)),
    ):  # fmt: skip
        unit = "_ms" if name == "ttft" else ""
        low, high = interval(np.mean, values)
        record |= {
            f"{name}{unit}": float(values.mean()), f"{name}_low": low, f"{name}_high": high,
        }  # fmt: skip
    record["ttft_median_ms"] = float(np.median(ttft(second) - ttft(first)))
    return record


# ---------------------------------------------------------------- memory and start-up


def servers(ways: tuple[str, ...], size: str, backend: str, starts: int) -> list[Record]:
    taken: dict[str, list[Record]] = {way: [] for way in ways}
    for turn in range(starts):
        for way in ways if turn % 2 else ways[::-1]:
            print("servers", size, backend, way, file=sys.stderr)
            begin = time.monotonic()
            with deployment(way, size, backend) as one:
                seconds = time.monotonic() - begin
                memory = {f"{side}_mib": resident(one.fleet.pids()[side]) for side in SIDES}
            taken[way].append({"seconds": seconds, **memory})
    return [
        {"size": size, "backend": backend, "way": way, "starts": starts, **medians(records)}
        for way, records in taken.items()
    ]


def resident(server: int) -> float:
    """MiB of a server's ranks. What forked ranks share counts in parts (PSS)."""
    found = [
        child.memory_full_info().pss / 2**20
        for child in psutil.Process(server).children(recursive=True)
        if child.cmdline()[:1] and child.cmdline()[0].startswith("sglang::scheduler")
    ]
    if not found:
        raise RuntimeError("a server without a process called sglang::scheduler")
    return float(np.mean(found))


def medians(records: list[Record]) -> Record:
    return {name: float(np.median([one[name] for one in records])) for name in records[0]}


def ranks(ways: tuple[str, ...], size: str, backend: str, starts: int) -> list[Record]:
    prefill, decode = map(int, size.split("-"))
    taken: dict[tuple[str, str], list[Record]] = {}
    for turn in range(starts):
        for way in ways if turn % 2 else ways[::-1]:
            with rings.rings((way,), prefill, decode, backend, LONG) as made:
                ring = made[way]
                before = {side: ring.sizes(side)[0] for side in SIDES}
                for _ in range(LONG_REQUESTS):
                    ring.transfer(LONG, "random")
                    ring.clear()
                for side in SIDES:
                    after = ring.sizes(side)[0]
                    record = {
                        "manager_s": ring.starts[side][0], "threads": after["threads"],
                        "started_mib": before[side]["resident"] / 2**20,
                        "used_mib": after["resident"] / 2**20,
                    }  # fmt: skip
                    taken.setdefault((side, way), []).append(record)
    return [
        {"size": size, "backend": backend, "side": side, "way": way, **medians(records)}
        for (side, way), records in taken.items()
    ]


# ---------------------------------------------------------------- main


def checks(ways: tuple[str, ...], parts: dict[str, list[Record]]) -> list[Check]:
    return [
        Check(
            f"{one['backend']} {one['size']}: TTFT to {ways[0]}'s, ms, upper end of 95 %",
            MOST_TTFT_MS, one["ttft_high"],
        )
        for one in parts["pairs"] if one["way"] == "difference"
    ]  # fmt: skip


def main() -> None:
    parser = options((__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="ranks,servers,pairs", help="which to run")
    parser.add_argument("--ways", default=",".join(WAYS), help="two of stock, unchecked, channel")
    parser.add_argument("--sizes", default=",".join(SIZES), help="default 2-1,1-1")
    parser.add_argument("--backend", default="mooncake", choices=("mooncake", "nixl"))
    parser.add_argument("--pairs", type=int, default=0, help="requests a way (default 300)")
    parser.add_argument("--tokens", type=int, default=0, help="generated (default: the answer)")
    arguments = parser.parse_args()
    quick, parts = arguments.quick, arguments.parts.split(",")
    ways = tuple(arguments.ways.split(","))
    result = Result("pairs", quick, {"pairs": [], "servers": [], "ranks": []})
    if "ranks" in parts:
        rings.load_sglang()
    for size in arguments.sizes.split(","):
        common = (ways, size, arguments.backend)
        if "ranks" in parts:
            result.parts["ranks"] += ranks(*common, 1 if quick else RANK_STARTS)
        if "servers" in parts:
            result.parts["servers"] += servers(*common, 1 if quick else STARTS)
        if "pairs" in parts:
            count = arguments.pairs or (4 if quick else PAIRS)
            result.parts["pairs"] += pairs(*common, count, arguments.tokens)
    result.checks = checks(ways, result.parts)
    result.finish(arguments)


if __name__ == "__main__":
    main()
