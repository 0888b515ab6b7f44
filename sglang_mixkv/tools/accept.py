"""Acceptance of a pair of servers against a single server, on your own prompts.

    python -m sglang_mixkv accept --single URL --pair ROUTER_URL --prompts FILE [--gate 0.05]

The same token ids go to both, greedy. Side by side: accept length, acceptance by position, time
to the first token, and whether the outputs agree; with `--metrics` also the transfer's share of
that time, and the bytes sent. The accept length's loss is judged by what prompts as these can
tell, with 95 % confidence, and on each of decode's DP ranks.

Exit status: 0 within `--gate`; 1 the accept length is lower, or the output is another from the
start; 2 nothing can be judged: too few prompts, a request that failed, a server that does not
answer or not speculate, or one that makes its accept length up.

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

import requests

from sglang_mixkv.tools import pages, simulated
from sglang_mixkv.tools.accept_figures import Asked, Comparison, Verdict
from sglang_mixkv.tools.accept_prompts import BadPrompts, Prompt, read_prompts, token_ids
from sglang_mixkv.tools.client import REQUEST_TIMEOUT_S, Answer, RequestFailed, stream

MAX_NEW_TOKENS = 128
GATE = 0.05
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
        except (RequestFailed, requests.RequestException) as error:
            return str(error)

    def _ask(self, prompt: Prompt) -> Asked:
        ids = token_ids(self.single, prompt)
        sampling = {"max_new_tokens": self.max_new_tokens, "temperature": 0}
        body = {"input_ids": ids, "sampling_params": sampling}
        single, pair = (stream(url, body, self.timeout) for url in (self.single, self.pair))
        return Asked(len(ids), single, pair)

    def check(self) -> None:
        """Raises NothingToJudge where the answers say nothing of a drafter."""
        for url, answers in (
            (self.single, [one.single for one in self.asked]),
            (self.pair, [one.pair for one in self.asked]),
        ):
            made_up = simulated.reason(url, [answer.tokens for answer in answers])
            if made_up:
                raise NothingToJudge(made_up)
            self._check_rounds(url, answers)

    def _check_rounds(self, url: str, answers: list[Answer]) -> None:
        silent = sum(len(a.tokens) > 1 and not a.verify_rounds for a in answers)
        if silent or not any(a.verify_rounds for a in answers):
            raise NothingToJudge(
                f"{url} reports no speculative decoding (meta_info's spec_verify_ct) for "
                f"{silent or len(answers)} of {len(answers)} answers. Start all its servers with "
                "the same speculative flags"
            )


@dataclass
class Wire:
    """What prefill servers' metrics say of the run. `urls`: their pages."""

    urls: list[str]
    before: pages.Transfers = field(default_factory=pages.Transfers)

    def begin(self) -> None:
        self.before = self._read()

    def figures(self, asked: list[Asked]) -> dict[str, Any]:
        """Nothing without pages. The share is of the pair's mean time to the first token."""
        if not self.urls:
            return {}
        found = self._read() - self.before
        first = sum(one.pair.first_token_s for one in asked) / len(asked)
        mean = found.mean_s
        return {
            "transfer_s": mean,
            "transfer_share": mean / first if mean is not None and first else None,
            "sent_bytes": found.sent,
        }

    def _read(self) -> pages.Transfers:
        found = {url: pages.fetch(url) for url in self.urls}
        lacking = [url for url, page in found.items() if page is None]
        if lacking:
            raise NothingToJudge(
                f"no metrics at {', '.join(lacking)}. Give a prefill server's own page, "
                "http://HOST:PORT/metrics, and start it with --enable-metrics"
            )
        return pages.read(page for page in found.values() if page is not None)


def wire_table(found: dict[str, Any]) -> Iterator[str]:
    if found.get("transfer_s") is not None:
        share = found["transfer_share"]
        of_first = f", {share:.1%} of the time to the first token" if share is not None else ""
        yield f"transfer: {found['transfer_s'] * 1e3:.1f} ms per request{of_first}"
    if found.get("sent_bytes"):
        sizes = (f"{name} {size / 2**20:.2f} MiB" for name, size in found["sent_bytes"].items())
        yield f"bytes sent: {', '.join(sizes)}"


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
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
    add("--timeout", type=float, default=REQUEST_TIMEOUT_S, help="seconds between two tokens")
    add("--gate", type=float, default=GATE, help="share of accept length that may be lost")
    add("--metrics", nargs="+", default=[], metavar="URL", help="/metrics of each prefill server")
    add("--json", type=Path, help="write the figures to this file")
    return made


def judge(args: argparse.Namespace) -> int:
    """The exit status. Raises NothingToJudge, BadPrompts, RequestFailed, OSError."""
    prompts = read_prompts(args.prompts)
    if args.json:
        args.json.touch()  # before the work, not after it
    trial = Trial(args.single, args.pair, args.max_new_tokens, args.timeout)
    wire = Wire(args.metrics)
    wire.begin()
    trial.run(prompts, args.at_once)
    trial.check()
    compared = Comparison(trial.asked, args.gate)
    sent = wire.figures(trial.asked)
    figures = {**compared.figures(), **sent, "failed": trial.failed}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    *figures_told, last = compared.table()
    print("\n".join([*figures_told, *wire_table(sent), last]))
    if trial.failed:
        number = len(trial.failed)
        raise NothingToJudge(f"{number} of {len(prompts)} prompts failed: {trial.failed[0]}")
    return EXIT[compared.verdict]


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    try:
        return judge(args)
    except (NothingToJudge, BadPrompts, RequestFailed, OSError) as error:
        print(error, file=sys.stderr)
        return NOT_JUDGED
