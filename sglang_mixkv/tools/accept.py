"""Acceptance of a pair of servers against a single server, on your own prompts.

    python -m sglang_mixkv accept --single URL --pair ROUTER_URL --prompts FILE [--gate 0.05]

The same token ids go to both, greedy. Side by side: accept length, acceptance by position, time
to the first token, and whether the outputs agree; with `--metrics` also the transfer's share of
that time, the bytes sent, and the share of warm drafters. The accept length's loss is judged by
what so many prompts can tell, with 95 % confidence, and on each of decode's DP ranks.

Exit status: 0 within `--gate`; 1 the accept length is lower, or the output is another one; 2
nothing can be judged: too few prompts, a request that failed, a server that does not answer or not
speculate, or one that makes its accept length up.

Servers that ask for an API key get that of SGLANG_MIXKV_API_KEY.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_mixkv.tools import pages, simulated
from sglang_mixkv.tools.accept_figures import Asked, Comparison, Side, Verdict
from sglang_mixkv.tools.accept_prompts import BadPrompts, Prompt, read_prompts, token_ids
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


class NothingToJudge(RuntimeError):
    """Why there is no verdict."""


@dataclass
class Trial:
    """The two deployments, and what became of the prompts: `asked` of both, or `failed`."""

    single: str
    pair: str
    max_new_tokens: int
    timeout: float
    asked: list[Asked] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def run(self, prompts: list[Prompt], at_once: int) -> None:
        """The first prompt goes alone: raises RequestFailed where a deployment does not answer
        it."""
        self.asked.append(self._ask(prompts[0]))
        with ThreadPoolExecutor(at_once) as pool:
            for found in pool.map(self._try, prompts[1:]):
                if isinstance(found, Asked):
                    self.asked.append(found)
                else:
                    self.failed.append(found)

    def _try(self, prompt: Prompt) -> Asked | str:
        try:
            return self._ask(prompt)
        except RequestFailed as error:
            return str(error)

    def _ask(self, prompt: Prompt) -> Asked:
        ids = token_ids(self.single, prompt)
        sampling = {"max_new_tokens": self.max_new_tokens, "temperature": 0}
        body = {"input_ids": ids, "sampling_params": sampling}
        single, pair = (stream(url, body, self.timeout) for url in (self.single, self.pair))
        return Asked(len(ids), single, pair)

    def no_yardstick(self, compared: Comparison) -> Iterator[str]:
        """Why these answers say nothing of the pair's drafter."""
        for url, side in ((self.single, compared.single), (self.pair, compared.pair)):
            yield from self._why_not(url, side)
        length = compared.single.accept_length
        if 0 < length < LEAST:
            yield (
                f"{self.single} accepts {length:.3f} tokens a round: its own drafter drafts "
                "nothing that a pair could lose. Give it the right drafter"
            )
        drafted = [{a.drafted for a in s.answers} - {0} for s in (compared.single, compared.pair)]
        if all(drafted) and drafted[0] != drafted[1]:
            yield (
                f"{self.single} and {self.pair} draft {drafted[0]} and {drafted[1]} tokens a "
                "round. Give both the same speculative flags"
            )

    def failures(self) -> Iterator[str]:
        if self.failed:
            number = len(self.failed) + len(self.asked)
            yield f"{len(self.failed)} of {number} prompts failed, the first: {self.failed[0]}"

    def _why_not(self, url: str, side: Side) -> Iterator[str]:
        made_up = simulated.reason(url, [answer.tokens for answer in side.answers])
        if made_up:
            yield made_up
        silent = sum(len(a.tokens) > 1 and not a.verify_rounds for a in side.answers)
        if silent or not side.accept_length:
            yield (
                f"{url} reports no speculative decoding (meta_info's spec_verify_ct) for "
                f"{silent or len(side.answers)} of {len(side.answers)} answers. Start all its "
                "servers with the same speculative flags"
            )


@dataclass(frozen=True)
class Wire:
    """What servers' pages say of a run. `first_token_s`: the pair's mean."""

    transfers: pages.Transfers
    first_token_s: float

    @property
    def share(self) -> float | None:
        """The transfer's, of the time to the first token."""
        mean = self.transfers.mean_s
        return mean / self.first_token_s if mean is not None and self.first_token_s else None

    def figures(self) -> dict[str, Any]:
        sent, rooms = self.transfers.sent, self.transfers.rooms
        return {
            "transfer_s": self.transfers.mean_s, "transfer_share": self.share, "sent_bytes": sent,
            "warm_share": rooms.warm_share, "rooms": rooms.counts,
        }  # fmt: skip

    def table(self) -> Iterator[str]:
        if (mean := self.transfers.mean_s) is not None:
            share = "" if self.share is None else f", {self.share:.1%} of the first token's time"
            yield f"transfer: {mean * 1e3:.1f} ms per request{share}"
        sent = self.transfers.sent.items()
        if sent:
            sizes = ", ".join(f"{name} {size / 2**20:.2f} MiB" for name, size in sent)
            yield f"bytes sent, to anyone: {sizes}"
        rooms = self.transfers.rooms
        if (warm := rooms.warm_share) is not None:
            cold = ", ".join(f"{why} {n}" for why, n in rooms.counts.items() if why != "warm" and n)
            why = f"; cold: {cold}" if cold else ""
            yield f"drafters: {warm:.1%} of {rooms.counts.total()} warm{why}"


def look(urls: list[str]) -> pages.Transfers:
    """Raises NothingToJudge where a page has no metrics."""
    try:
        return pages.read([pages.page(url) for url in urls])
    except (RequestFailed, ValueError) as error:
        raise NothingToJudge(
            f"no metrics: {error}. Give servers' own pages, http://HOST:PORT/metrics, and start "
            "them with --enable-metrics"
        ) from error


def judge(args: argparse.Namespace) -> int:
    """The exit status. Raises NothingToJudge, BadPrompts, RequestFailed, OSError."""
    prompts = read_prompts(args.prompts)
    if args.json:
        args.json.write_text("")  # before the work, not after it
    trial = Trial(args.single, args.pair, args.max_new_tokens, args.timeout)
    before = look(args.metrics)
    trial.run(prompts, args.at_once)
    compared = Comparison(trial.asked, args.gate)
    wire = Wire(look(args.metrics) - before, compared.pair.first_token_s)
    return report(trial, compared, wire, args.json)


def report(trial: Trial, compared: Comparison, wire: Wire, out: Path | None) -> int:
    """Tell everything, and the exit status. A loss stays one where prompts failed."""
    no_yardstick, failures = list(trial.no_yardstick(compared)), list(trial.failures())
    why_not, verdict = [*no_yardstick, *failures], compared.verdict
    if no_yardstick or (failures and verdict is Verdict.WITHIN):
        verdict = Verdict.UNDECIDED
    if out is not None:
        head = {"verdict": verdict.value, "not_judged": why_not, "failed": trial.failed}
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
    add("--single", type=address, required=True, help="a single server with the same models")
    add("--pair", type=address, required=True, help="the router before the pair")
    add("--prompts", type=Path, required=True, help="one prompt a line, text or JSON")
    add("--max-new-tokens", type=positive, default=MAX_NEW_TOKENS)
    add("--at-once", type=positive, default=1, help="prompts in flight (default 1)")
    add("--timeout", type=seconds, default=REQUEST_TIMEOUT_S, help="seconds without a token")
    add("--gate", type=share, default=GATE, help="share of accept length that may be lost")
    add(
        "--metrics",
        nargs="+",
        default=[],
        metavar="URL",
        help="/metrics of the pair's servers",
    )
    add("--json", type=Path, help="write the figures to this file")
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    try:
        return judge(args)
    except (NothingToJudge, BadPrompts, RequestFailed, OSError) as error:
        print(error, file=sys.stderr)
        return NOT_JUDGED
