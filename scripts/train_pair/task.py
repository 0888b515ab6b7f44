"""The copy task: `<bos> A <sep>` -> `A <sep>`, with A a string of distinct symbols.

Distinct, because a pair of symbols that occurs twice would make the next one ambiguous. The
tokenizer of syllables that the shipped models have (models/*/*/tokenizer.json) knows the same ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAD, BOS, SEP, MASK = 0, 1, 2, 3  # <sep> also ends the answer; a block is filled in for masks
FIRST_SYMBOL, VOCAB = 4, 256


def sample(
    rows: int, shortest: int, longest: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows of `<bos> A <sep> A <sep>`, padded to one length T: ids [rows, T], and [rows, T] bool,
    the positions whose next token is the answer's."""
    n = torch.randint(shortest, longest + 1, (rows,), generator=generator)[:, None]
    most = int(n.max())
    shuffled = torch.rand(rows, VOCAB - FIRST_SYMBOL, generator=generator).argsort(1) + FIRST_SYMBOL
    at = torch.arange(2 * most + 3)[None].expand(rows, -1)
    prompt = shuffled.gather(1, (at - 1).clamp(0, most - 1))
    answer = shuffled.gather(1, (at - n - 2).clamp(0, most - 1))
    ids = torch.full_like(at, PAD)
    ids = torch.where((at >= 1) & (at <= n), prompt, ids)
    ids = torch.where((at >= n + 2) & (at <= 2 * n + 1), answer, ids)
    ids = torch.where((at == n + 1) | (at == 2 * n + 2), torch.tensor(SEP), ids)
    ids[:, 0] = BOS
    return ids, (at >= n + 1) & (at <= 2 * n + 1)
