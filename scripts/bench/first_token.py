"""Measure the time to the first token with the plugin and without, and the parts of the wait.

`pairs`: two small pairs of real servers at TP 1 -> 1, one without the plugin, answer the same
prompts of 128 tokens alternately, one by one. `crowd`: the same with 16 prompts at once. Figures
are medians in ms, and the median ratio of two answers to a prompt. `waits`: bucket bounds of
decode's `sglang:mixkv_wait_seconds` and prefill's `sglang:mixkv_ready_seconds` with the plugin.

`parts`: the median time between two calls, for a request of one chunk in a ring, from SGLang's
`send` to the poll that returns Success. The ring polls every 0.2 ms. SGLang polls once per forward.
"""

from __future__ import annotations

import itertools
import pkgutil
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import requests
import rings
from common import Record, options, show

from mixkv_demo.launch import Topology
from mixkv_demo.pair import BOS, SEP, SYMBOLS, request_body
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import Deployment, disaggregated
from sglang_mixkv.tools import client, status

TP1, ENABLE, CROWD = ("--tp", "1"), ("--enable-mixkv",), 16
WAYS = {"stock": Topology(TP1, TP1), "channel": Topology(TP1, TP1, ENABLE, ENABLE)}
TOKENS = (128, 1024)  # of `parts`

Times = dict[str, list[tuple[float, float]]]


def timed(of: Deployment, prompt: list[int]) -> tuple[float, float]:
    """Stream an answer; return the ms until the first token and until the last."""
    body, began = {**request_body(prompt), "stream": True}, time.perf_counter()
    with client.session() as made, made.post(f"{of.url}/generate", json=body, stream=True) as reply:
        assert reply.status_code == requests.codes.ok, reply.text
        events = (line for line in reply.iter_lines(chunk_size=1) if line.startswith(b"data:"))
        next(events)
        first = time.perf_counter() - began
        assert sum(1 for _ in events)
    return first * 1e3, (time.perf_counter() - began) * 1e3


def answers(made: dict[str, Deployment], turns: int, at_once: int) -> Times:
    """Send the same prompts to every pair in each turn, in a random order of pairs."""
    draw, found = random.Random(turns), Times((way, []) for way in made)
    with ThreadPoolExecutor(at_once) as pool:
        for _ in range(turns):
            asked = [[BOS, *draw.sample(SYMBOLS, 126), SEP] for _ in range(at_once)]
            for way in draw.sample([*made], len(made)):
                found[way] += pool.map(partial(timed, made[way]), asked)
    return found


def compared(found: Times) -> list[Record]:
    rows = []
    for number, name in enumerate(("first token", "whole answer")):
        stock, mine = ([one[number] for one in found[way]] for way in WAYS)
        ratio = statistics.median(a / b for a, b in zip(mine, stock, strict=True))
        medians = statistics.median(stock), statistics.median(mine)
        rows.append({"": name, "stock ms": medians[0], "channel ms": medians[1], "ratio": ratio})
    return rows


def page(of: Deployment, number: int) -> status.Page:
    server = of.servers[number]
    (found,) = status.read(server.url, client.request("GET", f"{server.url}/metrics").text).values()
    return found


def engine(pairs: int, crowds: int) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {"waits": []}
    with ExitStack() as stack:
        made = {
            way: disaggregated(stack.enter_context(Fleet()), "mla", topology)
            for way, topology in WAYS.items()
        }
        answers(made, 3, 1)  # to warm up
        for name, turns, at_once in (("pairs", pairs, 1), ("crowd", crowds, CROWD)):
            before = [page(made["channel"], number) for number in (0, 1)]
            found[name] = compared(answers(made, turns, at_once))
            made["channel"].counters()  # once they stop changing
            for number, series in enumerate(("ready_seconds", "wait_seconds")):
                added = page(made["channel"], number).since(before[number])
                bounds = {f"p{share}": added.within(series, share / 100) for share in (50, 99)}
                found["waits"].append({"of": name, "series": series, **bounds})
    return found


# ---------------------------------------------------------------- parts of the wait

stamps: dict[str, float] = {}  # in a rank's process: when each call was last made
CALLS = {
    "prefill.worker:PrefillWorker.add_chunk": "",
    "prefill.machine:Machine.add_chunk": "hand-over, query of events",
    "prefill.machine:Machine.copied": "pack",
    "prefill.worker:PrefillWorker._send": "READY, until it is sent",
    "decode.machine:Machine.ready": "READY, until it is handled",
    "decode.machine:Machine.read_ended": "read",
    "decode.machine:Machine.copied": "unpack",
    "decode.worker:DecodeWorker._decide": "verdict",
}
"""The plugin's calls in their order, each with the part of the wait that it ends."""


def stamp(rank: Any) -> None:
    """Record when the plugin's steps begin, in a rank's process."""
    for call in CALLS:
        owner, _, name = call.rpartition(".")
        if call.startswith(rank.side):
            _note(pkgutil.resolve_name(f"sglang_mixkv.{owner}"), name, call)


def _note(owner: Any, name: str, key: str) -> None:
    original = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        stamps[key] = time.monotonic()
        return original(*args, **kwargs)

    setattr(owner, name, noted)


def latest(_: Any) -> dict[str, float]:
    return stamps


def parts(tokens: int, turns: int) -> list[Record]:
    special = rings.special.Special(before={(side, 0): stamp for side in rings.SIDES})
    names = [*CALLS.items()]
    taken: dict[str, list[float]] = {part: [] for _, part in names[1:]}
    with closing(rings.Ring("channel", 1, 1, tokens, special=special)) as ring:
        for number in range(turns + 1):
            ring.open(tokens, "random")
            _, polled = ring.send(rings.DecodeMember.conclude)
            at = {k: v for side in rings.SIDES for k, v in ring.ask(side, latest)[0].items()}
            ring.clear()
            if number:
                for (before, _), (after, part) in itertools.pairwise(names):
                    taken[part].append((at[after] - at[before]) * 1e3)
                taken.setdefault("poll", []).append((polled - at[names[-1][0]]) * 1e3)
    return [{"part": part, f"{tokens} tokens, ms": statistics.median(of)}
            for part, of in taken.items()]  # fmt: skip


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    turns = arguments.repeats or (2 if arguments.quick else 160)
    found = engine(turns, -(-turns // 8))
    rings.load_sglang()
    columns = [parts(tokens, turns) for tokens in TOKENS]
    found["parts"] = [a | b for a, b in zip(*columns, strict=True)]
    show(arguments, found)


if __name__ == "__main__":
    main()
