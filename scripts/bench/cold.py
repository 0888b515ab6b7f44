"""What drafting on decode only costs: accept length of a cold drafter, a warm one, a single server.

    warm      prefill and decode with a drafter, and the plugin
    cold      the same decode server, after a prefill server without a drafter
    single    one server

Of the small trained pairs, and of nothing else: their drafters were trained to need each byte of
the prompt's KV (scripts/train_pair/README.md), so they lose more than those of language do.

    by prompt length       the first TOKENS tokens of the answer. A prompt is a string of at
                           most MOST symbols; longer ones have <bos> repeated in front. No pair was
                           trained for that: the single server shows what it can do.
    by tokens generated    an answer that repeats the string, in parts: does a cold drafter learn
                           from the answer? DFLASH's was trained for the first time alone.

Accept length: tokens a verify round; the first token, of prefill, is left out.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import chart
from common import Check, Record, Result, options, repeats

from mixkv_demo.launch import Topology
from mixkv_demo.pair import BOS, PAIRS, SEP, SYMBOLS
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import Deployment, one_cold, single
from sglang_mixkv.tools.client import Answer, generate

WAYS = ("single", "warm", "cold")
DRAWN = ("warm", "cold", "single")  # the last one on top
ENABLE, FLAGS = ("--enable-mixkv",), ("--tp", "1", "--disable-radix-cache")
ENV = {"SGLANG_MIXKV_PATIENCE": "20"}  # a warm drafter is not to be cold for want of a core
LONGEST, MOST, TOKENS = 1920, 126, 64  # the context, 2,048, takes the answer and drafts, too
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, LONGEST)
TRAINED = 202  # tokens of the longest prompt
SHOWN = (16, 128, 512, LONGEST)  # of LENGTHS, on the page
AT_ONCE, CLOSE = 4, 0.98
AXIS = (1, 2, 3, 4)
BY_LENGTH, BY_TOKENS = "by prompt length", "by tokens generated"
OTHERS = "TensorRT-LLM, of MiniMax-M3"

ELSEWHERE = (
    ("chat (GSM8K)", 0.04),
    ("1K tokens, answers refer to them", 0.13),
    ("30K tokens", 0.25),
)
"""What TensorRT-LLM measured with MiniMax-M3 and its EAGLE3 drafter, with no draft KV transferred:
the share of accept length lost (github.com/NVIDIA/TensorRT-LLM/pull/17371)."""


@dataclass(frozen=True)
class Kind:
    """A pair. `symbols`: of the string whose answer is followed, in parts that end at `ends`."""

    pair: str
    symbols: int
    ends: tuple[int, ...]
    lengths: tuple[int, ...] = ()

    @property
    def drafter(self) -> str:
        return PAIRS[self.pair].algorithm


KINDS = (
    Kind("mla", 30, (16, 32, 64, 96, 128, 160), LENGTHS),
    Kind("mla-dflash", 48, (16, 32)),
)  # fmt: skip


def prompts(tokens: int, count: int, most: int = MOST) -> list[list[int]]:
    source = random.Random(tokens)
    symbols = min(tokens - 2, most)
    return [
        [*[BOS] * (tokens - symbols - 1), *source.sample(SYMBOLS, symbols), SEP]
        for _ in range(count)
    ]


# ---------------------------------------------------------------- answers

Asked = dict[tuple[int, int], list[Answer]]
"""By tokens of the prompt and of the answer: one way's answers."""


def ask(url: str, tokens: int, prompt: list[int]) -> Answer:
    """An answer of so many tokens, whatever they are."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return generate(url, {"input_ids": prompt, "sampling_params": sampling})


def asked(url: str, kind: Kind, count: int, lengths: Sequence[int]) -> Asked:
    wanted = [*((n, TOKENS) for n in lengths), *((kind.symbols + 2, n) for n in kind.ends)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {
            (length, tokens): [*pool.map(partial(ask, url, tokens), prompts(length, count))]
            for length, tokens in wanted
        }


def measure(kind: Kind, count: int, lengths: Sequence[int]) -> dict[str, Asked]:
    """The answers of each way."""

    def of(deployment: Deployment, way: str) -> Asked:
        print("cold", kind.drafter, way, file=sys.stderr)
        return deployment.watch(lambda: asked(deployment.url, kind, count, lengths))

    found = {}
    with Fleet() as fleet:
        found["single"] = of(single(fleet, kind.pair, FLAGS), "single")
    with Fleet() as fleet:
        servers = one_cold(fleet, kind.pair, Topology(FLAGS, FLAGS, ENABLE, ENABLE, env=ENV))
        for way, prefill in (("warm", servers.warm), ("cold", servers.cold)):
            found[way] = of(servers.behind_a_router(prefill), way)
    return found


# ---------------------------------------------------------------- records


def rounds(answers: Sequence[Answer]) -> int:
    return sum(answer.verify_rounds for answer in answers)


def lost(record: Record) -> float:
    return max(0.0, 1 - record["cold"] / record["warm"])


def by_prompt_length(found: dict[str, Asked], lengths: Sequence[int]) -> list[Record]:
    records = []
    for length in lengths:
        answers, known = found["single"][length, TOKENS], min(length - 2, MOST)
        right = [
            answer.tokens[:known] == tuple(prompt[-1 - known : -1][:TOKENS])
            for answer, prompt in zip(answers, prompts(length, len(answers)), strict=True)
        ]
        record: Record = {"prompt_tokens": length, "trained": length <= TRAINED}
        record |= {"answers_right": sum(right) / len(right)}
        for way in WAYS:
            of_way = found[way][length, TOKENS]
            record[way] = len(of_way) * (TOKENS - 1) / rounds(of_way)
        records.append({**record, "lost": lost(record)})
    return records


def by_tokens(kind: Kind, found: dict[str, Asked]) -> list[Record]:
    """Between two ends: what the rounds of the longer answers are more."""
    records, length = [], kind.symbols + 2
    for begin, end in pairwise((1, *kind.ends)):
        record: Record = {"drafter": kind.drafter, "prompt_tokens": length}
        record |= {"from_token": begin + 1, "to_token": end}
        for way in WAYS:
            longer = found[way][length, end]
            before = 0 if begin == 1 else rounds(found[way][length, begin])
            record[way] = len(longer) * (end - begin) / (rounds(longer) - before)
        records.append({**record, "lost": lost(record)})
    return records


def checks(parts: dict[str, list[Record]]) -> list[Check]:
    """Where the pair was trained, a warm drafter is as good as the single server's."""
    trained = [one for one in parts[BY_LENGTH] if one["trained"]]
    shares = [one["warm"] / one["single"] for one in trained]
    return [Check("warm to single, prompts as trained", CLOSE, min(shares), at_most=False)]


# ---------------------------------------------------------------- the page and the picture


def page(parts: dict[str, list[Record]]) -> str:
    """A short table for docs/metrics.md."""
    lines = ["| prompt tokens | single | warm | cold | lost |", "|---:|---:|---:|---:|---:|"]
    for one in parts[BY_LENGTH]:
        if one["prompt_tokens"] in SHOWN:
            lengths = " | ".join(f"{one[way]:.2f}" for way in WAYS)
            lines.append(f"| {one['prompt_tokens']:,} | {lengths} | {one['lost']:.0%} |")
    return "\n".join(lines) + "\n"


def draw(parts: dict[str, list[Record]]) -> str:
    colours = {"single": chart.GREY, "warm": chart.BLUE, "cold": chart.ORANGE}
    names = {"single": "single server", "warm": "warm drafter", "cold": "cold drafter"}
    by_length = parts[BY_LENGTH]
    lines = [
        chart.Line(
            names[way], [(math.log2(one["prompt_tokens"]), one[way]) for one in by_length],
            colours[way], chart.DASHED if way == "single" else "",
        )
        for way in DRAWN
    ]  # fmt: skip
    ticks = [(math.log2(n), f"{n:,}") for n in (one["prompt_tokens"] for one in by_length)]
    left = chart.Lines(
        "Accept length by prompt length", "prompt tokens", ticks, AXIS, lines,
        (math.log2(TRAINED), "longer than trained for"),
    )  # fmt: skip
    growing = [
        chart.Line(
            f"{way} drafter, {kind.drafter}",
            [(middle(r), r[way]) for r in parts[BY_TOKENS] if r["drafter"] == kind.drafter],
            colours[way], dashes,
        )
        for kind, dashes in zip(KINDS, ("", chart.DASHED), strict=True) for way in ("warm", "cold")
    ]  # fmt: skip
    most = max(KINDS[0].ends)
    right = chart.Lines(
        "Accept length as the answer grows", "tokens generated",
        [(n, str(n)) for n in range(0, most + 1, 32)], AXIS, growing,
    )  # fmt: skip
    ours = [(f"the small pair, {n:,} tokens", lost_at(by_length, n)) for n in (32, 128)]
    theirs = [(f"TensorRT-LLM, MiniMax-M3: {name}", share) for name, share in ELSEWHERE]
    bars = chart.Bars(
        "Share of accept length lost by a cold drafter", [*theirs, *ours],
        frozenset(name for name, _ in ours),
    )  # fmt: skip
    return chart.svg([left, right, bars], columns=3)


def middle(record: Record) -> float:
    return float(record["from_token"] + record["to_token"]) / 2


def lost_at(records: list[Record], tokens: int) -> float:
    return next(float(one["lost"]) for one in records if one["prompt_tokens"] == tokens)


def main() -> int:
    parser = options((__doc__ or "").splitlines()[0])
    parser.add_argument("--svg", type=Path, help="draw the picture there")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="of this result; nothing is run")
    arguments = parser.parse_args()
    if arguments.draw:
        arguments.svg.write_text(draw(json.loads(arguments.draw.read_text())["parts"]))
        return 0
    quick = arguments.quick
    result = Result("cold", quick, {BY_LENGTH: [], BY_TOKENS: []})
    for kind in KINDS:
        lengths = kind.lengths[1:4:2] if quick else kind.lengths
        found = measure(kind, repeats(arguments, 8), lengths)
        result.parts[BY_LENGTH] += by_prompt_length(found, lengths)
        result.parts[BY_TOKENS] += by_tokens(kind, found)
    result.parts[OTHERS] = [{"prompts": name, "lost": share} for name, share in ELSEWHERE]
    result.checks += checks(result.parts)
    if arguments.svg:
        arguments.svg.write_text(draw(result.parts))
    result.finish(arguments)
    return 0 if all(check.met for check in result.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
