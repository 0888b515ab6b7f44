"""The copy task: ``<bos> A <sep>`` -> ``A <sep>``, with A a string of distinct symbols.

Distinct, because a pair of symbols that occurs twice would make the next one ambiguous.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

PAD, BOS, SEP, UNK = 0, 1, 2, 3
"""Special tokens; <sep> also ends the answer."""

MASK = UNK
"""What stands for a token that a block is to be filled with."""

VOCAB = 256
FIRST_SYMBOL = 4
SYMBOLS = VOCAB - FIRST_SYMBOL

_SPECIAL = ["<pad>", "<bos>", "<sep>", "<unk>"]
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_WORDS = [c + v + end for end in ("", "n", "r", "s") for c in _CONSONANTS for v in _VOWELS]


def sample(
    rows: int, shortest: int, longest: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows of ``<bos> A <sep> A <sep>``, padded to one length T.

    Returns ids [rows, T], and [rows, T] bool: the positions whose next token is the answer's.
    """
    n = torch.randint(shortest, longest + 1, (rows,), generator=generator)[:, None]
    most = int(n.max())
    shuffled = torch.rand(rows, SYMBOLS, generator=generator).argsort(1) + FIRST_SYMBOL
    at = torch.arange(2 * most + 3)[None].expand(rows, -1)
    prompt = shuffled.gather(1, (at - 1).clamp(0, most - 1))
    answer = shuffled.gather(1, (at - n - 2).clamp(0, most - 1))
    ids = torch.full_like(at, PAD)
    ids = torch.where((at >= 1) & (at <= n), prompt, ids)
    ids = torch.where((at >= n + 2) & (at <= 2 * n + 1), answer, ids)
    ids = torch.where((at == n + 1) | (at == 2 * n + 2), torch.tensor(SEP), ids)
    ids[:, 0] = BOS
    return ids, (at >= n + 1) & (at <= 2 * n + 1)


def save_tokenizer(folder: Path) -> None:
    """A word-level tokenizer of syllables: "ba de ki" -> <bos> ba de ki <sep>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = [*_SPECIAL, *_WORDS[:SYMBOLS]]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <sep>", special_tokens=[("<bos>", BOS), ("<sep>", SEP)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _save_tokenizer_config(folder)


def _save_tokenizer_config(folder: Path) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<sep>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": (
            "{% for m in messages %}{{ '<bos> ' + m['content'] + ' <sep>' }}{% endfor %}"
        ),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
