"""What a pair is compared with: a single server, or its answers as an earlier run wrote them.

Both answer a prompt of theirs with its token ids and an Answer, and say where the answers come
from and whether they are made up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from sglang_mixkv.tools import simulated
from sglang_mixkv.tools.accept_prompts import token_ids
from sglang_mixkv.tools.client import Answer, stream


class BadBaseline(ValueError):
    """The file has no answers to compare with."""


class Yardstick(Protocol):
    """`name`: a URL or a file. `ask` raises RequestFailed."""

    @property
    def name(self) -> str: ...

    @property
    def max_new_tokens(self) -> int: ...

    def ask(self, prompt: Any) -> tuple[list[int], Answer]: ...

    def made_up(self, outputs: Iterable[Sequence[int]]) -> str | None: ...


@dataclass(frozen=True)
class SingleServer:
    """Prompts are those of accept_prompts.py."""

    name: str
    max_new_tokens: int
    timeout: float

    def ask(self, prompt: Any) -> tuple[list[int], Answer]:
        ids = token_ids(self.name, prompt)
        return ids, stream(self.name, body(ids, self.max_new_tokens), self.timeout)

    def made_up(self, outputs: Iterable[Sequence[int]]) -> str | None:
        return simulated.reason(self.name, outputs)


def body(ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    """The greedy request for these token ids."""
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0}
    return {"input_ids": ids, "sampling_params": sampling}


class _Single(msgspec.Struct):
    output_ids: list[int]
    verify_rounds: int
    rounds_by_right_drafts: list[int]
    drafted: int
    first_token_s: float


class Recorded(msgspec.Struct):
    """One prompt and the single server's answer, of accept_figures.Asked.row."""

    input_ids: list[int]
    single: _Single


class _File(msgspec.Struct):
    max_new_tokens: int
    each: list[Recorded]


class Baseline:
    """A file of `--json`. Its prompts are `each`. Raises BadBaseline, OSError."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_File)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadBaseline(
                f"{path}: expected what accept wrote with --json, got something else ({error}). "
                "Record it again with this release: --single, --pair, --prompts, --json"
            ) from None
        if not found.each:
            raise BadBaseline(f"{path} has no prompts: its run failed. Record it again")
        self.max_new_tokens, self.each = found.max_new_tokens, found.each

    def ask(self, prompt: Any) -> tuple[list[int], Answer]:
        one = prompt.single
        return prompt.input_ids, Answer(
            tokens=tuple(one.output_ids),
            verify_rounds=one.verify_rounds,
            rounds_by_right_drafts=tuple(one.rounds_by_right_drafts),
            seconds=0.0,
            drafted=one.drafted,
            first_token_s=one.first_token_s,
        )

    def made_up(self, outputs: Iterable[Sequence[int]]) -> str | None:
        return simulated.reason(self.name, outputs) if simulated.answered(outputs) else None
