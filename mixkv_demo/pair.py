"""The small trained pairs, and the prompts of their copy task.

The task is ``<bos> A <sep>`` -> ``A <sep>`` with a string A of distinct symbols. The drafter knows
A only from its own KV of the prompt, and was trained to need every KV head of it. So wrong draft
bytes lower this drafter's accept length; production drafters may lose less or more.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from mixkv_demo.client import Answer, generate
from sglang_mixkv.tools.client import REQUEST_TIMEOUT_S

TARGETS = ("mla", "gqa")
"""The shipped targets, named after their attention."""

DRAFTERS = ("eagle3", "dflash", "dspark")
"""The shipped drafters; the last two exist only for the MLA target."""

DRAFT_STEPS = 3
"""Tokens drafted per verify round."""

PROMPTS = 8
"""The number of fixed prompts."""

BOS, SEP = 1, 2
SYMBOLS = range(4, 256)

_MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Pair:
    """A target and a drafter, as folders of ``models/``. ``steps``: flags for the draft's length,
    if the drafter's config.json lacks it. ``lengths``: the number of symbols in each prompt."""

    target: str
    drafter: str
    algorithm: str
    steps: tuple[str, ...]
    lengths: tuple[int, ...]


def _eagle3(target: str) -> Pair:
    steps = {
        "--speculative-num-steps": DRAFT_STEPS,
        "--speculative-eagle-topk": 1,
        "--speculative-num-draft-tokens": DRAFT_STEPS + 1,
    }
    flags = tuple(str(part) for item in steps.items() for part in item)
    lengths = (24, 24, 48, 48, 96, 96, 160, 200)
    return Pair(f"{target}/target", f"{target}/drafter", "EAGLE3", flags, lengths)


def _block(name: str) -> Pair:
    """Make a pair with a DFLASH or DSPARK drafter, which supports strings of one length only."""
    return Pair("mla/target", f"mla/{name}", name.upper(), (), (48,))


PAIRS = {
    "mla": _eagle3("mla"),
    "gqa": _eagle3("gqa"),
    "mla-dflash": _block("dflash"),
    "mla-dspark": _block("dspark"),
}
"""The shipped pairs by name."""


def pair_name(target: str, drafter: str) -> str:
    """Return the name of a target with a drafter, whether or not PAIRS contains it."""
    return target if drafter == DRAFTERS[0] else f"{target}-{drafter}"


def model_path(pair: str) -> Path:
    """Return the folder of a pair's target, with its tokenizer."""
    return _MODELS / PAIRS[pair].target


def model_flags(pair: str, speculative: bool = True) -> list[str]:
    """Return the launch flags that name the models and turn on speculation."""
    target = ["--model-path", str(model_path(pair))]
    if not speculative:
        return target
    chosen = PAIRS[pair]
    drafter = ["--speculative-draft-model-path", str(_MODELS / chosen.drafter)]
    return [*target, "--speculative-algorithm", chosen.algorithm, *drafter, *chosen.steps]


def prompts(count: int = PROMPTS, pair: str = "mla") -> list[list[int]]:
    """Return a pair's first ``count`` prompts as token ids, the same on every machine."""
    source = random.Random(2024)
    lengths = islice(cycle(PAIRS[pair].lengths), count)
    return [[BOS, *source.sample(SYMBOLS, length), SEP] for length in lengths]


def cousins(pair: str = "mla") -> list[list[int]]:
    """Return each fixed prompt with the same first half and a shuffled second half."""
    source = random.Random(2025)
    found = []
    for prompt in prompts(pair=pair):
        half = len(prompt) // 2
        found.append([*prompt[:half], *source.sample(prompt[half:-1], len(prompt) - 1 - half), SEP])
    return found


def request_body(prompt: list[int]) -> dict[str, Any]:
    """Return a greedy request for a prompt, for as many tokens as the correct answer has."""
    limits = {"max_new_tokens": len(prompt) - 1, "temperature": 0}
    return {"input_ids": prompt, "sampling_params": limits}


def ask(url: str, prompt: list[int], timeout: float = REQUEST_TIMEOUT_S) -> Answer:
    """Send one prompt to a server or router. Raises RequestFailed."""
    return generate(url, request_body(prompt), timeout)
