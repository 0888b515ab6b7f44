"""Prompts of a file, as token ids.

Each is tokenized once, by the single server, so that both deployments get the same ids. A text
that starts with the model's BOS already gets no second one: a double BOS costs about 5 % of
acceptance and hides the difference looked for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_mixkv.tools.client import ask_for

CHAT = ("tools", "tool_choice", "reasoning_effort", "chat_template_kwargs")
"""What a row of a chat may have besides its messages, and /tokenize takes."""

Prompt = dict[str, Any]


class BadPrompts(ValueError):
    """The file has no prompts, or a line that is none."""


def read_prompts(path: Path) -> list[Prompt]:
    """One prompt a line: plain text, or JSON with `text`, `input_ids`, `messages` of a chat, or
    `turns`, as in SPEED-Bench (sglang/benchmark/datasets/speed_bench.py), whose first is taken.
    Raises BadPrompts, OSError."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise BadPrompts(f"{path} is not UTF-8: {error}") from None
    found = [_read(f"{path}, line {n}", ln) for n, ln in enumerate(lines, 1) if ln.strip()]
    if not found:
        raise BadPrompts(f"{path} has no prompts: one a line, text or JSON")
    return found


def _read(where: str, line: str) -> Prompt:
    if not line.lstrip().startswith("{"):
        return {"text": line.rstrip("\r")}
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadPrompts(f"{where}: {error}") from None
    if not any(row.get(kind) for kind in ("input_ids", "text", "messages", "turns")):
        raise BadPrompts(f"{where}: expected input_ids, text, messages or turns, got {[*row]}")
    return dict(row)


def token_ids(url: str, prompt: Prompt) -> list[int]:
    """A prompt as the server's own tokenizer and chat template have it. Raises RequestFailed."""
    if prompt.get("input_ids"):
        return list(prompt["input_ids"])
    if prompt.get("text"):
        return tokenize(url, prompt["text"])
    chat = prompt.get("messages") or [{"role": "user", "content": prompt["turns"][0]}]
    return _tokens(url, {"messages": chat} | {k: prompt[k] for k in CHAT if prompt.get(k)})


def tokenize(url: str, text: str) -> list[int]:
    """Token ids with one BOS where the model has one, by the server's own tokenizer."""
    plain = _tokens(url, {"prompt": text, "add_special_tokens": False})
    full = _tokens(url, {"prompt": text, "add_special_tokens": True})
    spare = len(full) - len(plain)  # a tokenizer may add tokens on both sides
    front = next((n for n in range(spare + 1) if full[n : n + len(plain)] == plain), 0)
    return full[front:] if plain[:front] == full[:front] else full


def _tokens(url: str, what: dict[str, Any]) -> list[int]:
    """SGLang's /tokenize (entrypoints/http_server.py)."""
    return list(ask_for(f"{url}/tokenize", what).json()["tokens"])
