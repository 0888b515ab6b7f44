"""A launch line, read by SGLang's own parser and resolved as on a server with the GPUs that it is
for: what this host has, and what its shell has set, decides nothing.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple, NoReturn
from unittest.mock import patch

from sglang_mixkv.config import add_flags, nearest
from sglang_mixkv.errors import MixKVError

GPUS = {"hopper": (9, 0), "blackwell": (10, 0)}
"""Compute capabilities."""

LAUNCHERS = ("sglang.launch_server", "dynamo.sglang", "serve")

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_REDIRECTION = re.compile(r"\d?[<>]")


def unreadable(text: str) -> MixKVError:
    return MixKVError("MIXKV-START-04", f"{text}.")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise unreadable(message)


class Line(NamedTuple):
    """`unread`: what a shell would replace, and variables that it would not export."""

    environ: dict[str, str]
    flags: list[str]
    unread: list[str]


def split(text: str) -> Line:
    """A launch line, or a script with one, of which what it exports before counts, too. Raises
    MixKVError for unmatched quotes, and unless one command starts a server."""
    line, found = Line({}, [], []), 0
    for words in _commands(text):
        begin = next((n for n, word in enumerate(words) if word in LAUNCHERS), -1) + 1
        if not begin:
            begin = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
        assigned = dict(word.split("=", 1) for word in words[:begin] if _ASSIGNMENT.match(word))
        if flags := words[begin:]:
            found += 1
            end = next((n for n, w in enumerate(flags) if _REDIRECTION.match(w)), len(flags))
            model = [] if flags[0].startswith("-") else ["--model-path"]
            line.flags[:] = [*model, *flags[:end]]
        if flags or "export" in words:
            line.environ.update(assigned)
        else:
            line.unread.extend(name for name in assigned if name.startswith("SGLANG_"))
    if found != 1:
        raise unreadable(
            f"expected one launch line, got {found}. Give the command or its flags, or the text of "
            'a script that has it, as in "$(cat prefill.sh)"'
        )
    line.unread.extend(word for word in line.flags if "$" in word or "`" in word)
    return line


def _commands(text: str) -> Iterator[list[str]]:
    """Words of each, without comments."""
    text = re.sub(r"(?m)^\s*#.*$", "", text).replace("\\\n", " ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars="\n;&|")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    words = list[str]()
    try:
        for word in lexer:
            if word and set(word) <= set("\n;&|"):
                yield words
                words = []
            else:
                words.append(word)
    except ValueError as error:
        raise unreadable(str(error)) from None
    yield words


def parse(flags: Sequence[str]) -> argparse.Namespace:
    """Return what these flags set. Raises MixKVError with all words that SGLang does not know."""
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser, words = _parser(), list(flags)
    try:
        if "--config" in words:
            words = list(ConfigArgumentMerger(parser).merge_config_with_args(words))
    except Exception as error:  # of SGLang or the YAML parser
        raise unreadable(f"--config: {error}") from None
    args, unknown = parser.parse_known_args(words)
    if unknown:
        hint = nearest(unknown[0].partition("=")[0], parser._option_string_actions)
        raise unreadable(f"SGLang does not know {' '.join(unknown)}{hint}")
    return args


@cache
def _parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(add_help=False)
    ServerArgs.add_cli_args(parser)
    add_flags(parser)
    for action in parser._actions:
        action.required = False  # else a missing flag hides the mistyped one
    return parser


@contextmanager
def alone(environ: Mapping[str, str]) -> Iterator[None]:
    """The line's variables alone decide. SGLang logs nothing and downloads nothing."""
    level = logging.root.manager.disable
    of_shell = {name: v for name, v in os.environ.items() if not name.startswith("SGLANG_")}
    whole = {**of_shell, **environ, "HF_HUB_OFFLINE": "1"}
    with patch.dict(os.environ, whole, clear=True), warnings.catch_warnings(action="ignore"):
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)


@contextmanager
def as_on(gpu: str) -> Iterator[None]:
    """Answers what SGLang asks of a GPU while it resolves a line, as such a GPU would: it decides
    attention backends and types of KV. Without an answer SGLang ends early for targets with DSA or
    linear attention. "": on no GPU."""
    import torch
    from sglang.srt.runtime_context import override_platform

    if not gpu:
        yield
        return
    capability, is_hopper = GPUS[gpu], gpu == "hopper"
    facts = dict.fromkeys(("is_sm90", "is_hopper_with_cuda_12_3"), is_hopper)
    facts |= dict.fromkeys(("is_sm100", "is_sm100_or_sm110", "is_blackwell"), not is_hopper)
    sm = 10 * capability[0] + capability[1]
    with (
        patch.object(torch.cuda, "get_device_capability", lambda device=None: capability),
        override_platform(is_cuda=True, device_capability=capability, device_sm=sm, **facts),
    ):
        yield
