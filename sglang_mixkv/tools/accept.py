"""Acceptance of a pair of servers against a single server, on your own prompts.

    python -m sglang_mixkv accept --single URL --pair ROUTER_URL --prompts FILE [--gate 0.05]

The same token ids go to both, greedy. Side by side: accept length, acceptance by position, and
whether the outputs agree. Exit status 0 when the pair's accept length is at most `--gate` below
the single server's.

Each prompt is tokenized once, by the single server, and sent as `input_ids`. A text that starts
with the model's BOS already gets no second one: a double BOS costs about 5 % of acceptance and
hides the difference looked for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from sglang_mixkv.tools import simulated
from sglang_mixkv.tools.client import (
    Answer,
    RequestFailed,
    accept_length,
    acceptance_by_position,
    generate,
    longest_draft,
    post,
)

MAX_NEW_TOKENS = 128
GATE = 0.05


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """One prompt a line: plain text, or JSON with `text`, `input_ids`, `messages` of a chat, or
    `turns`, as in SPEED-Bench (sglang/benchmark/datasets/speed_bench.py), whose first is taken."""
    lines = filter(str.strip, path.read_text().splitlines())
    return [json.loads(ln) if ln.lstrip().startswith("{") else {"text": ln} for ln in lines]


def token_ids(url: str, prompt: dict[str, Any]) -> list[int]:
    """A prompt as the server's own tokenizer and chat template have it."""
    if "input_ids" in prompt:
        return list(prompt["input_ids"])
    if "text" in prompt:
        return tokenize(url, prompt["text"])
    chat = prompt.get("messages") or [{"role": "user", "content": prompt["turns"][0]}]
    return _tokens(url, {"messages": chat, "add_generation_prompt": True})


def tokenize(url: str, text: str) -> list[int]:
    """Token ids with one BOS where the model has one, by the server's own tokenizer."""
    plain = _tokens(url, {"prompt": text, "add_special_tokens": False})
    full = _tokens(url, {"prompt": text, "add_special_tokens": True})
    spare = len(full) - len(plain)  # a tokenizer may add tokens on both sides
    front = next((n for n in range(spare + 1) if full[n : n + len(plain)] == plain), 0)
    return full[front:] if plain[:front] == full[:front] else full


def _tokens(url: str, what: dict[str, Any]) -> list[int]:
    """SGLang's /tokenize (entrypoints/http_server.py)."""
    answer = post(f"{url}/tokenize", what)
    if answer.status_code != requests.codes.ok:
        raise RequestFailed(f"HTTP {answer.status_code} from {url}/tokenize: {answer.text}")
    return list(answer.json()["tokens"])


def ask(url: str, ids: list[int], max_new_tokens: int) -> Answer:
    """One greedy request; raises RequestFailed."""
    limits = {"max_new_tokens": max_new_tokens, "temperature": 0}
    return generate(url, {"input_ids": ids, "sampling_params": limits})


def compare(single: list[Answer], pair: list[Answer], gate: float) -> dict[str, Any]:
    """The figures of both, and whether the pair is within the gate."""
    left, right = accept_length(single), accept_length(pair)
    steps = longest_draft(single + pair)
    return {
        "prompts": len(single),
        "same_output": sum(a.tokens == b.tokens for a, b in zip(single, pair, strict=True)),
        "single": {"accept_length": left, "by_position": acceptance_by_position(single, steps)},
        "pair": {"accept_length": right, "by_position": acceptance_by_position(pair, steps)},
        "gate": gate,
        "within_gate": right >= left * (1 - gate),
    }


def table(found: dict[str, Any]) -> Iterator[str]:
    """The comparison in words."""
    yield f"{'':>8}  accept length  by position"
    for name in ("single", "pair"):
        figures = found[name]
        shares = "  ".join(f"{share:6.1%}" for share in figures["by_position"])
        yield f"{name:>8}  {figures['accept_length']:13.3f}  {shares}"
    yield f"outputs equal: {found['same_output']} of {found['prompts']}"
    verdict = "within" if found["within_gate"] else "OUTSIDE"
    yield f"accept length {verdict} the gate of {found['gate']:.0%}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m sglang_mixkv accept",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--single", required=True, help="URL of a single server with the same models")
    made.add_argument("--pair", required=True, help="URL of the router before the pair")
    made.add_argument("--prompts", type=Path, required=True, help="one prompt a line, text or JSON")
    made.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    made.add_argument("--gate", type=float, default=GATE, help="share of accept length lost")
    made.add_argument("--json", type=Path, help="write the figures to this file")
    return made


def main(argv: list[str]) -> int:
    """Run the comparison; 0 within the gate, 1 outside, 2 when there is nothing to judge by."""
    args = parser().parse_args(argv)
    try:
        prompts = read_prompts(args.prompts)
        ids = [token_ids(args.single, prompt) for prompt in prompts]
        single = [ask(args.single, prompt, args.max_new_tokens) for prompt in ids]
        pair = [ask(args.pair, prompt, args.max_new_tokens) for prompt in ids]
    except (RequestFailed, requests.RequestException) as error:
        print(error, file=sys.stderr)
        return 2
    for url, answers in ((args.single, single), (args.pair, pair)):
        made_up = simulated.reason(url, [answer.tokens for answer in answers])
        if made_up:
            print(made_up, file=sys.stderr)
            return 2
    if not accept_length(single):
        print(
            f"{args.single} reports no speculative decoding for the {len(ids)} prompts of "
            f"{args.prompts}, so there is nothing to compare with. Start it with the pair's "
            "speculative flags.",
            file=sys.stderr,
        )
        return 2
    found = compare(single, pair, args.gate)
    print("\n".join(table(found)))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0 if found["within_gate"] else 1
