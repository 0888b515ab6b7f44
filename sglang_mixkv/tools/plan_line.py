"""A launch line: variables in front, the command, and flags, which SGLang's own parser reads."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

from sglang_mixkv.config import add_flags
from sglang_mixkv.errors import MixKVError

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


def unreadable(text: str) -> MixKVError:
    return MixKVError("MIXKV-START-04", f"{text}.")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise unreadable(message)


def split(line: str) -> tuple[dict[str, str], list[str]]:
    """The variables and the flags of a launch line. Raises MixKVError for unmatched quotes."""
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise unreadable(str(error)) from None
    environ: dict[str, str] = {}
    while words and (words[0] == "env" or _ASSIGNMENT.match(words[0])):
        name, assigned, value = words.pop(0).partition("=")
        environ |= {name: value} if assigned else {}
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    model = ["--model-path", words[first - 1]] if "serve" in words[: max(0, first - 1)] else []
    return environ, [*model, *words[first:]]


def parse(flags: Sequence[str], known: Mapping[str, Any] | None = None) -> argparse.Namespace:
    """What these flags set; `known` stands in for SGLang's defaults.

    Raises MixKVError with all words that SGLang does not know.
    """
    parser, words = _parser(), list(flags)
    if "--config" in words:
        words = _with_config(parser, words)
    args, unknown = parser.parse_known_args(words, argparse.Namespace(**(known or {})))
    if unknown:
        raise unreadable("; ".join(_complaints(parser, unknown)))
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


def _with_config(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    import yaml
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    try:
        return list(ConfigArgumentMerger(parser).merge_config_with_args(words))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise unreadable(f"--config: {error}") from None


def _complaints(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> Iterator[str]:
    for before, word in zip(["", *unknown], unknown, strict=False):
        flag = word.partition("=")[0]
        if word.startswith("-"):
            near = difflib.get_close_matches(flag, parser._option_string_actions, 1)
            yield f"unknown flag {flag}" + (f", the nearest is {near[0]}" if near else "")
        elif not before.startswith("-"):  # else its value
            yield f"unexpected word {word!r}"
