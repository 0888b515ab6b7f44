"""A launch line, read by SGLang's own parser, in an environment like that of its server."""

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
from typing import NoReturn

from sglang_mixkv.config import add_flags, nearest
from sglang_mixkv.errors import MixKVError

GPUS = {"hopper": (9, 0), "blackwell": (10, 0)}
"""Compute capabilities."""

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


def parse(flags: Sequence[str]) -> argparse.Namespace:
    """What these flags set. Raises MixKVError with all words that SGLang does not know."""
    parser, words = _parser(), list(flags)
    if "--config" in words:
        words = _with_config(parser, words)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        flag = unknown[0].partition("=")[0]
        hint = nearest(flag, parser._option_string_actions)
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


def _with_config(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    import yaml
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    try:
        return list(ConfigArgumentMerger(parser).merge_config_with_args(words))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise unreadable(f"--config: {error}") from None


@contextmanager
def alone(environ: Mapping[str, str]) -> Iterator[None]:
    """The line's variables alone decide. SGLang logs nothing and downloads nothing."""
    saved, level = dict(os.environ), logging.root.manager.disable
    for name in filter(lambda name: name.startswith("SGLANG_"), saved):
        del os.environ[name]
    os.environ.update(environ, HF_HUB_OFFLINE="1")
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        os.environ.clear()
        os.environ.update(saved)


def has_device() -> bool:
    """Whether SGLang finds a device on this host."""
    from sglang.srt.utils import get_device

    try:
        get_device()
    except RuntimeError:
        return False
    return True


@contextmanager
def as_on(gpu: str) -> Iterator[None]:
    """Answers what SGLang asks of a GPU while it resolves a line, as such a GPU would: it decides
    attention backends and types of KV. Without an answer SGLang ends early for targets with DSA or
    linear attention."""
    import torch
    from sglang.srt.runtime_context import override_platform

    capability, is_hopper = GPUS[gpu], gpu == "hopper"
    facts = {
        "is_cuda": True, "device_capability": capability,
        "device_sm": 10 * capability[0] + capability[1],
        "is_sm90": is_hopper, "is_hopper_with_cuda_12_3": is_hopper,
        "is_sm100": not is_hopper, "is_sm100_or_sm110": not is_hopper,
        "is_blackwell": not is_hopper,
    }  # fmt: skip
    asked = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: capability
    try:
        with override_platform(**facts):
            yield
    finally:
        torch.cuda.get_device_capability = asked
