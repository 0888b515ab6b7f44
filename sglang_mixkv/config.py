"""Configuration: flags over environment over defaults, one frozen record.

The record is made where SGLang builds its ServerArgs (`plugin.py`) and rides on that
object as the attribute `_mixkv`: SGLang pickles ServerArgs with their attributes, so
every process gets the same record. Where a launcher builds ServerArgs without SGLang's
command line, the environment decides.

This module is imported while ServerArgs are unpickled in child processes: it imports
neither SGLang nor torch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

import msgspec

ATTRIBUTE = "_mixkv"
ENABLE_ENV = "SGLANG_ENABLE_MIXKV"
ALLOW_UNTESTED_ENV = "SGLANG_MIXKV_ALLOW_UNTESTED_SGLANG"
STATS_DIR_ENV = "SGLANG_MIXKV_STATS_DIR"

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


class Config(msgspec.Struct, frozen=True):
    """What the operator asked of the plugin.

    `stats_dir`: folder into which each process writes its byte counters; off when empty.
    """

    enabled: bool = False
    allow_untested_sglang: bool = False
    stats_dir: str = ""


def truth(name: str, environ: Mapping[str, str]) -> bool:
    """A boolean environment variable; raises ValueError for text that is neither."""
    text = environ.get(name, "").strip().lower()
    if text in _TRUE | _FALSE:
        return text in _TRUE
    raise ValueError(f"{name}={text!r}: expected one of {sorted(_TRUE | _FALSE - {''})}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to SGLang's parser, once."""
    if any("--enable-mixkv" in action.option_strings for action in parser._actions):
        return
    group = parser.add_argument_group("sglang-mixkv")
    group.add_argument(
        "--enable-mixkv",
        action="store_true",
        default=None,
        help="Transfer the drafter's KV by heads between prefill and decode servers of "
        "different attention-TP sizes. Set it on both sides. "
        f"[env: {ENABLE_ENV}]",
    )


def resolve(flags: argparse.Namespace | None, environ: Mapping[str, str] = os.environ) -> Config:
    """The record for these flags (None: a launcher without the plugin's flags)."""
    enabled = getattr(flags, "enable_mixkv", None)
    return Config(
        enabled=truth(ENABLE_ENV, environ) if enabled is None else bool(enabled),
        allow_untested_sglang=truth(ALLOW_UNTESTED_ENV, environ),
        stats_dir=environ.get(STATS_DIR_ENV, ""),
    )


def config_of(server_args: Any) -> Config:
    """The record that rides on these ServerArgs, else what the environment says."""
    record = getattr(server_args, ATTRIBUTE, None)
    return record if isinstance(record, Config) else resolve(None)
