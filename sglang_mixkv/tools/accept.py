"""Acceptance of a pair of servers against a single server, on your own prompts.

    python -m sglang_mixkv accept --single URL --pair ROUTER_URL --prompts FILE [--gate 0.05]
    python -m sglang_mixkv accept --baseline FIGURES --pair ROUTER_URL [--gate 0.05]

The same token ids go to both, greedy. A baseline is the file that an earlier run wrote with
`--json`: its prompts, and what the single server answered then. Side by side: accept length,
acceptance by position, time to the first token, and whether the outputs agree; with `--metrics`
also the transfer's share of that time, the bytes sent, and the share of warm drafters. The accept
length's loss is judged by what so many prompts can tell, with 95 % confidence, and on each of
decode's DP ranks.

Exit status: 0 within `--gate`; 1 the accept length is lower, or the output is another one; 2
nothing can be judged: too few prompts, a request that failed, a server that does not answer or not
speculate, or one that makes its accept length up.

Servers that ask for an API key get that of SGLANG_MIXKV_API_KEY.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sglang_mixkv.tools import simulated
from sglang_mixkv.tools.accept_baseline import (
    BadBaseline,
    Baseline,
    SingleServer,
    Yardstick,
    body,
)
from sglang_mixkv.tools.accept_figures import Asked, Comparison, Side, Verdict
from sglang_mixkv.tools.accept_prompts import BadPrompts, read_prompts
from sglang_mixkv.tools.accept_wire import NothingToJudge, Wire, look
from sglang_mixkv.tools.client import REQUEST_TIMEOUT_S, RequestFailed, stream

MAX_NEW_TOKENS = 128
GATE = 0.05
LEAST = 1.1
"""An accept length of a drafter that is of use; below it there is nothing to lose."""

NOT_JUDGED = 2
EXIT = {
    Verdict.WITHIN: 0,
    Verdict.BELOW: 1,
    Verdict.OTHER_OUTPUT: 1,
    Verdict.UNDECIDED: NOT_JUDGED,
}


@dataclass
class Trial:
    """The two sides, and what became of the prompts: `asked` of both, or `failed`."""

    single: Yardstick
    pair: str
    timeout: float
    asked: list[Asked] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def run(self, prompts: Sequence[Any], at_once: int) -> None:
        """The first prompt goes alone: raises RequestFailed where a deployment does not answer
        it."""
        self.asked.append(self._ask(prompts[0]))
        with ThreadPoolExecutor(at_once) as pool:
            for found in pool.map(self._try, prompts[1:]):
                if isinstance(found, Asked):
                    self.asked.append(found)
                else:
                    self.failed.append(found)

    def _try(self, prompt: Any) -> Asked | str:
        try:
            return self._ask(prompt)
        except RequestFailed as error:
            return str(error)

    def _ask(self, prompt: Any) -> Asked:
        ids, single = self.single.ask(prompt)
        pair = stream(self.pair, body(ids, self.single.max_new_tokens), self.timeout)
        return Asked(tuple(ids), single, pair)

    def no_yardstick(self, compared: Comparison) -> Iterator[str]:
        """Why these answers say nothing of the pair's drafter."""
        one = self.single.name, compared.single, self.single.made_up
        for name, side, made_up in (
            one, (self.pair, compared.pair, partial(simulated.reason, self.pair))
        ):  # fmt: skip
            yield from filter(None, [made_up([answer.tokens for answer in side.answers])])
            yield from self._why_not(name, side)
        length = compared.single.accept_length
        if 0 < length < LEAST:
            yield (
                f"{self.single.name} accepts {length:.3f} tokens a round: its own drafter drafts "
                "nothing that a pair could lose. Give it the right drafter"
            )
        drafted = [{a.drafted for a in s.answers} - {0} for s in (compared.single, compared.pair)]
        if all(drafted) and drafted[0] != drafted[1]:
            yield (
                f"{self.single.name} and {self.pair} draft {drafted[0]} and {drafted[1]} tokens a "
                "round. Give both the same speculative flags"
            )

    def failures(self) -> Iterator[str]:
        if self.failed:
            number = len(self.failed) + len(self.asked)
            yield f"{len(self.failed)} of {number} prompts failed, the first: {self.failed[0]}"

    def _why_not(self, name: str, side: Side) -> Iterator[str]:
        silent = sum(len(a.tokens) > 1 and not a.verify_rounds for a in side.answers)
        if silent or not side.accept_length:
            yield (
                f"{name} reports no speculative decoding (meta_info's spec_verify_ct) for "
                f"{silent or len(side.answers)} of {len(side.answers)} answers. Start all its "
                "servers with the same speculative flags"
            )


def judge(args: argparse.Namespace) -> int:
    """The exit status. Raises NothingToJudge, BadPrompts, BadBaseline, RequestFailed, OSError."""
    single, prompts = yardstick(args)
    if args.json:
        args.json.open("a").close()  # an OSError before the work, not after it
    trial = Trial(single, args.pair, args.timeout)
    before = look(args.metrics)
    trial.run(prompts, args.at_once)
    compared = Comparison(trial.asked, args.gate)
    wire = Wire(look(args.metrics) - before, compared.pair.first_token_s)
    return report(trial, compared, wire, args.json)


def yardstick(args: argparse.Namespace) -> tuple[Yardstick, Sequence[Any]]:
    """And its prompts."""
    if args.baseline:
        baseline = Baseline(args.baseline)
        return baseline, baseline.each
    tokens = args.max_new_tokens or MAX_NEW_TOKENS
    return SingleServer(args.single, tokens, args.timeout), read_prompts(args.prompts)


def report(trial: Trial, compared: Comparison, wire: Wire, out: Path | None) -> int:
    """Tell everything, and the exit status. A loss stays one where prompts failed."""
    no_yardstick, failures = list(trial.no_yardstick(compared)), list(trial.failures())
    why_not, verdict = [*no_yardstick, *failures], compared.verdict
    if no_yardstick or (failures and verdict is Verdict.WITHIN):
        verdict = Verdict.UNDECIDED
    if out is not None:
        head = {
            "verdict": verdict.value, "not_judged": why_not, "failed": trial.failed,
            "max_new_tokens": trial.single.max_new_tokens,
        }  # fmt: skip
        out.write_text(json.dumps(head | compared.figures() | wire.figures(), indent=1))
    print("\n".join([*compared.table(), *wire.table()]))
    if why_not:
        print("\n".join(why_not), file=sys.stderr)
    if verdict is not Verdict.UNDECIDED or not why_not:
        print(compared.words())
    return EXIT[verdict]


# ---------------------------------------------------------------- the command line


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return number


def seconds(text: str) -> float:
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
    return number


def share(text: str) -> float:
    if not 0 <= (number := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, got {text}")
    return number


def address(text: str) -> str:
    return text.rstrip("/")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m sglang_mixkv accept",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    one = made.add_mutually_exclusive_group(required=True)
    one.add_argument("--single", type=address, help="a single server with the same models")
    one.add_argument(
        "--baseline", type=Path, metavar="FIGURES",
        help="an earlier run's --json file in place of --single and --prompts",
    )  # fmt: skip
    add("--pair", type=address, required=True, help="the router before the pair")
    add("--prompts", type=Path, help="one prompt a line, text or JSON; with --single")
    add(
        "--max-new-tokens", type=positive,
        help=f"of an answer (default {MAX_NEW_TOKENS}); of a baseline its own",
    )  # fmt: skip
    add("--at-once", type=positive, default=1, help="prompts in flight (default %(default)s)")
    add(
        "--timeout", type=seconds, default=REQUEST_TIMEOUT_S,
        help="seconds without a token (default %(default)s)",
    )  # fmt: skip
    add(
        "--gate", type=share, default=GATE,
        help="share of accept length that may be lost (default %(default)s)",
    )  # fmt: skip
    add(
        "--metrics",
        nargs="+",
        default=[],
        metavar="URL",
        help="/metrics of the pair's servers",
    )
    add("--json", type=Path, help="write the figures to this file; later a baseline")
    return made


def parse(argv: list[str]) -> argparse.Namespace:
    """SystemExit for flags that do not go together."""
    made = parser()
    args = made.parse_args(argv)
    if args.single and not args.prompts:
        made.error("--single needs --prompts")
    if args.baseline and (args.prompts or args.max_new_tokens):
        made.error("--prompts and --max-new-tokens are the baseline's: leave them out")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    try:
        return judge(args)
    except (NothingToJudge, BadPrompts, BadBaseline, RequestFailed, OSError) as error:
        print(error, file=sys.stderr)
        return NOT_JUDGED
