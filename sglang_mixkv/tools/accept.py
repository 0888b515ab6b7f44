"""Compare the acceptance of a pair of servers with that of a single server, on your own prompts.

    python -m sglang_mixkv accept --single URL --pair ROUTER_URL --prompts FILE [--gate 0.05]
    python -m sglang_mixkv accept --baseline FIGURES --pair ROUTER_URL [--gate 0.05]

The single server and the pair get the same token ids, and decode greedily. A baseline is the file
that an earlier run wrote with `--json`: its prompts, and the single server's answers to them. The
report shows accept length, acceptance by position, and whether the outputs agree. The loss of
accept length is judged at 95 % confidence, over all prompts and on each of decode's DP ranks. A
prompt that fails with status 502 or 503 is sent once more.

Exit status: 0 within `--gate`; 1 the accept length is lower, or too many outputs differ in their
first tokens; 2 no verdict: too few prompts, a failed request, or a server that does not answer or
does not speculate.

If the servers require an API key, set SGLANG_MIXKV_API_KEY to it.
"""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import msgspec

from sglang_mixkv.tools import as_json, parser
from sglang_mixkv.tools.accept_figures import Asked, Comparison, Decision, compare, lengths
from sglang_mixkv.tools.client import RequestFailed, read_event, request, stream

MAX_NEW_TOKENS = 128
LEAST = 1.1  # the least accept length of a useful drafter; below it, no loss could be seen
NOT_JUDGED, INTERRUPTED = 2, 130
AWAY, PAUSE_S = (502, 503), 2.0  # the statuses of a router that reaches no server
EXIT = {Decision.WITHIN: 0, Decision.UNDECIDED: NOT_JUDGED}  # 1 for others


Prompt = tuple[int, ...] | dict[str, Any]
"""Token ids, or the request to a server's /tokenize that returns them."""


class _PromptRow(msgspec.Struct):
    """A prompt in JSON, with one of these fields. `turns`: as in SPEED-Bench (speed_bench.py in
    SGLang's benchmark/datasets/); only the first turn is sent."""

    input_ids: tuple[int, ...] = ()
    text: str = ""
    messages: list[dict[str, Any]] = []
    turns: list[str] = []


class _Tokens(msgspec.Struct):
    tokens: tuple[int, ...]


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts, one per line, as plain text or JSON. Raises ValueError or OSError."""
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    found = [_prompt(f"{path}, line {n}", ln) for n, ln in enumerate(lines, 1) if ln.strip()]
    if not found:
        raise ValueError(f"{path} has no prompts: put one on each line, text or JSON")
    return found


def _prompt(where: str, line: bytes) -> Prompt:
    try:
        if not line.lstrip().startswith(b"{"):
            return {"prompt": line.decode().rstrip("\r")}
        row = msgspec.json.decode(line, type=_PromptRow)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if row.input_ids:
        return row.input_ids
    if row.text:
        return {"prompt": row.text}
    if row.messages:
        whole: dict[str, Any] = msgspec.json.decode(line)  # with its tools and template arguments
        return whole
    if row.turns:
        return {"messages": [{"role": "user", "content": row.turns[0]}]}
    raise ValueError(f"{where}: expected input_ids, text, messages or turns")


def token_ids(url: str, prompt: Prompt) -> tuple[int, ...]:
    """Return a prompt's token ids, from the single server's /tokenize unless the prompt has them,
    so that both deployments get the same ids. Raises RequestFailed."""
    if isinstance(prompt, tuple):
        return prompt
    url = f"{url}/tokenize"
    return read_event(url, request("POST", url, json=prompt).content, _Tokens).tokens


class Baseline(msgspec.Struct):
    """The fields that are read back from a `--json` file."""

    max_new_tokens: int
    each: list[Asked]


def to_ask(args: argparse.Namespace) -> tuple[Sequence[Any], int]:
    """Read the prompts and the token limit, from `--prompts` and the options or from an earlier
    run's `--json` file. Raises ValueError or OSError."""
    if args.prompts:
        return read_prompts(args.prompts), args.max_new_tokens or MAX_NEW_TOKENS
    path: Path = args.baseline
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Baseline)
    except ValueError as error:
        text = f"{path} was not written by accept --json ({error}). Record it again"
        raise ValueError(text) from None
    if not found.each:
        raise ValueError(f"{path} has no prompts: its run failed. Record it again")
    return found.each, found.max_new_tokens


def ask(args: argparse.Namespace, number: int, prompt: Any, again: bool = True) -> Any:
    """Send a prompt to both deployments, for at most `number` tokens; retry if a server was down.
    Return Asked or RequestFailed."""
    sampling = {"max_new_tokens": number, "temperature": 0}
    try:
        if isinstance(prompt, Asked):
            ids, single = prompt.input_ids, prompt.single
        else:
            ids = token_ids(args.single, prompt)
            single = stream(args.single, {"input_ids": ids, "sampling_params": sampling})
        pair = stream(args.pair, {"input_ids": ids, "sampling_params": sampling})
        return Asked(ids, single, pair)
    except RequestFailed as error:
        if not again or error.status not in AWAY:
            return error
    time.sleep(PAUSE_S)
    return ask(args, number, prompt, again=False)


def ask_all(args: argparse.Namespace, number: int, prompts: Sequence[Any]) -> list[Any]:
    """Send all prompts, until Ctrl-C, and return the results of `ask`. Print the progress after the
    first prompt, on a terminal after each. Raises RequestFailed if the first, sent alone, fails."""
    begin, once, screen = time.monotonic(), partial(ask, args, number), sys.stderr.isatty()
    found = [once(prompts[0])]
    if isinstance(found[0], RequestFailed):
        raise found[0]
    begin += (time.monotonic() - begin) * (1 - 1 / args.at_once)  # others will run concurrently
    with ThreadPool(min(args.at_once, len(prompts))) as pool, suppress(KeyboardInterrupt):
        answers = pool.imap(once, prompts[1:])
        while len(found) < len(prompts):
            if screen or len(found) == 1:
                text = progress(found, len(prompts), time.monotonic() - begin)
                line = f"\r{text}\x1b[K" if screen else f"{text} with --at-once {args.at_once}\n"
                print(line, end="", file=sys.stderr, flush=True)
            found.append(next(answers))
    print(end="\r\x1b[K" * screen, file=sys.stderr, flush=True)
    return found


def progress(found: list[Any], number: int, seconds: float) -> str:
    asked, done = [one for one in found if isinstance(one, Asked)], len(found)
    text = "{} of {} prompts, {} failed, accept length {:.2f} single, {:.2f} pair, {:.1f} min left"
    left = seconds / 60 / done * (number - done)
    return text.format(done, number, done - len(asked), *lengths(asked), left)


def judge(args: argparse.Namespace) -> int:
    """Send all prompts, print and write the comparison, and return the exit status. Raises
    ValueError, OSError, or RequestFailed if the first prompt, sent alone, fails."""
    prompts, number = to_ask(args)
    if args.json:
        args.json.open("a").close()  # raises OSError before the run, not after it
    found = ask_all(args, number, prompts)
    asked, left = [one for one in found if isinstance(one, Asked)], len(prompts) - len(found)
    failed = [str(one) for one in found if isinstance(one, RequestFailed)]
    compared = compare(asked, args.gate)
    why_not = [*why_invalid(asked, compared)]
    why_not += [f"interrupted: {left} prompts were not asked, or not answered"] * (left > 0)
    verdict = compared.verdict
    if why_not or (failed and verdict is Decision.WITHIN):  # a loss stands even if prompts failed
        verdict = Decision.UNDECIDED
    if failed:
        why_not.append(f"{len(failed)} of {len(found)} prompts failed, the first: {failed[0]}")
    if args.json:
        run = {
            "verdict": verdict.value, "not_judged": why_not, "failed": failed,
            **msgspec.structs.asdict(compared), "max_new_tokens": number, "each": asked,
        }  # fmt: skip
        args.json.write_text(as_json(run))
    print("\n".join(compared.table()))
    if why_not:
        print("\n".join(why_not), file=sys.stderr)
    if verdict is not Decision.UNDECIDED or not why_not:
        print(compared.words())
    return INTERRUPTED if left else EXIT.get(verdict, 1)


def why_invalid(asked: list[Asked], compared: Comparison) -> Iterator[str]:
    """Yield the reasons why these answers show nothing about the pair's drafter."""
    sides = [one.single for one in asked], [one.pair for one in asked]
    for name, answers in zip(("single server", "pair"), sides, strict=True):
        silent = [answer for answer in answers if not answer.verify_rounds]
        if len(silent) == len(answers) or any(len(answer.tokens) > 1 for answer in silent):
            text = f"for {len(silent)} of {len(answers)} answers: turn it on"
            yield f"the {name} reports no speculative decoding {text}"
    if 0 < (length := compared.single.accept_length) < LEAST:
        text = f"is of no use (accept length {length:.3f}). Give it the right one, or other prompts"
        yield f"the single server's own drafter {text}"
    drafted = [{a.drafted for a in answers} - {0} for answers in sides]
    if all(drafted) and drafted[0] != drafted[1]:
        text = "tokens per round: give both the same flags"
        yield f"the single server and the pair draft {drafted[0]} and {drafted[1]} {text}"


def main(argv: list[str]) -> int:
    made = parser("accept", __doc__)
    url: dict[str, Any] = {"metavar": "URL", "type": lambda text: text.rstrip("/")}
    add, one = made.add_argument, made.add_mutually_exclusive_group(required=True)
    one.add_argument("--single", **url, help="a single server with the same models")
    earlier = "an earlier run's --json file, in place of --single and --prompts"
    one.add_argument("--baseline", type=Path, metavar="FIGURES", help=earlier)
    add("--pair", **url, required=True, help="the pair's router")
    add("--prompts", type=Path, help="one prompt per line, text or JSON; with --single")
    of_answer = f"tokens per answer (default {MAX_NEW_TOKENS}; a baseline has its own)"
    add("--max-new-tokens", type=int, help=of_answer)
    add("--at-once", type=int, default=1, help="prompts in flight (default %(default)s)")
    share = "share of accept length that may be lost (default %(default)s)"
    add("--gate", type=float, default=0.05, help=share)
    add("--json", type=Path, help="write the figures to this file; it can be a later baseline")
    args = made.parse_args(argv)
    if not 0 <= args.gate < 1 or min(args.at_once, args.max_new_tokens or 1) < 1:
        made.error("expected --gate from 0 to 1, --at-once and --max-new-tokens of 1 or more")
    if args.single and not args.prompts:
        made.error("--single needs --prompts")
    if args.baseline and (args.prompts or args.max_new_tokens):
        made.error("--baseline replaces --prompts and --max-new-tokens: leave them out")
    try:
        return judge(args)
    except (ValueError, RequestFailed, OSError) as error:
        print(error, file=sys.stderr)
        return NOT_JUDGED
