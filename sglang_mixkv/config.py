"""Configuration: flags over environment over defaults, one frozen record.

The record is made where SGLang builds its ServerArgs (`plugin.py`) and rides on that
object as the attribute `_mixkv`: SGLang pickles ServerArgs with their attributes, so
every process gets the same record. Where a launcher builds ServerArgs without SGLang's
command line, its environment decides, and the record is made when they are resolved.

This module is imported while ServerArgs are unpickled in child processes: it imports
neither SGLang nor torch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

ATTRIBUTE = "_mixkv"
ENABLE_ENV = "SGLANG_ENABLE_MIXKV"
ALLOW_UNTESTED_ENV = "SGLANG_MIXKV_ALLOW_UNTESTED_SGLANG"
STATS_DIR_ENV = "SGLANG_MIXKV_STATS_DIR"
PATIENCE_ENV = "SGLANG_MIXKV_PATIENCE"
PORT_ENV = "SGLANG_MIXKV_PORT"
UNREADABLE = "MIXKV-START-04"

ON_MISMATCH = ("refuse", "cold")
VERIFY = ("checksum", "off")

# SGLang's (EnvBool in environ.py), and on and off.
_TRUE = {"1", "true", "yes", "y", "on"}
_FALSE = {"", "0", "false", "no", "n", "off"}


class Config(msgspec.Struct, frozen=True):
    """What the operator asked of the plugin.

    `staging_mb`: MiB of a rank's staging buffer, taken at start. `on_draft_mismatch`: refuse or
    cold. `verify`: checksum or off. `stats_dir`: folder into which each process writes its counts;
    off when empty.
    """

    enabled: bool = False
    allow_untested_sglang: bool = False
    staging_mb: int = 256
    on_draft_mismatch: str = "refuse"
    verify: str = "checksum"
    stats_dir: str = ""


def truth(name: str, environ: Mapping[str, str]) -> bool:
    """A boolean environment variable; raises ValueError for text that is neither."""
    text = environ.get(name, "").strip().lower()
    if text in _TRUE | _FALSE:
        return text in _TRUE
    values = sorted(_TRUE | _FALSE - {""})
    raise ValueError(f"[{UNREADABLE}] {name}={text!r}: expected one of {values}")


@dataclass(frozen=True)
class Option:
    """One setting: its flag, its environment variable, how text becomes a value."""

    flag: str
    environ: str
    field: str
    parse: Callable[[str], Any]
    help: str
    choices: tuple[str, ...] | None = None

    @property
    def attribute(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError(f"expected a positive number, got {text}")
    return value


OPTIONS = (
    Option(
        "--mixkv-staging-mb",
        "SGLANG_MIXKV_STAGING_MB",
        "staging_mb",
        _positive,
        "MiB of a rank's staging buffer for draft KV: registered memory of the KV's kind, outside "
        "--mem-fraction-static, in 64 slots. Taken at start.",
    ),
    Option(
        "--mixkv-on-draft-mismatch",
        "SGLANG_MIXKV_ON_DRAFT_MISMATCH",
        "on_draft_mismatch",
        str,
        "Set on decode. When only the drafters of both sides differ: refuse the prefill server, or "
        "serve its requests with the target's KV alone (cold: same output, lower accept length).",
        ON_MISMATCH,
    ),
    Option(
        "--mixkv-verify",
        "SGLANG_MIXKV_VERIFY",
        "verify",
        str,
        "Set on decode. Compare a checksum of each segment of draft KV with prefill's; where they "
        "differ the drafter starts cold. Costs some two copies of these bytes on each side.",
        VERIFY,
    ),
)


REMOVED = (
    (
        "--mixkv-draft-transfer",
        "SGLANG_MIXKV_DRAFT_TRANSFER",
        "is no longer a setting: draft KV is always packed into slots. Remove it",
    ),
)
"""Flag, environment variable, and what to do. Each stops the start of an opted-in server."""


def _refuses(sentence: str) -> Callable[[str], Any]:
    def parse(_: str) -> Any:
        raise argparse.ArgumentTypeError(f"[{UNREADABLE}] it {sentence}")

    return parse


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
        f"different attention-TP sizes. Set it on both sides. [env: {ENABLE_ENV}]",
    )
    defaults = Config()
    for option in OPTIONS:
        group.add_argument(
            option.flag,
            type=option.parse,
            choices=option.choices,
            default=None,
            help=f"{option.help} [default: {getattr(defaults, option.field)}; "
            f"env: {option.environ}]",
        )
    for flag, _, sentence in REMOVED:
        group.add_argument(flag, type=_refuses(sentence), help=argparse.SUPPRESS)


def resolve(flags: argparse.Namespace | None, environ: Mapping[str, str] = os.environ) -> Config:
    """The record for these flags (None: a launcher without the plugin's flags)."""
    for _, variable, sentence in REMOVED:
        if variable in environ:
            raise ValueError(f"[{UNREADABLE}] {variable} {sentence}")
    enabled = getattr(flags, "enable_mixkv", None)
    values = {option.field: _value(option, flags, environ) for option in OPTIONS}
    return Config(
        enabled=truth(ENABLE_ENV, environ) if enabled is None else bool(enabled),
        allow_untested_sglang=truth(ALLOW_UNTESTED_ENV, environ),
        stats_dir=environ.get(STATS_DIR_ENV, ""),
        **values,
    )


def _value(option: Option, flags: argparse.Namespace | None, environ: Mapping[str, str]) -> Any:
    """Flag over environment over default. Raises ValueError for unusable text."""
    given = getattr(flags, option.attribute, None)
    if given is not None:
        return given
    text = environ.get(option.environ, "").strip()
    if not text:
        return getattr(Config(), option.field)
    if option.choices and text not in option.choices:
        raise ValueError(
            f"[{UNREADABLE}] {option.environ}={text!r}: expected one of {option.choices}"
        )
    try:
        return option.parse(text)
    except ValueError as error:
        raise ValueError(f"[{UNREADABLE}] {option.environ}={text!r}: {error}") from None


def resolve_if_enabled(flags: argparse.Namespace | None) -> Config:
    """As `resolve` for a process that opted in; of another's environment nothing else is read that
    could stop it."""
    asked = getattr(flags, "enable_mixkv", None) or truth(ENABLE_ENV, os.environ)
    return resolve(flags) if asked else Config()


def config_of(server_args: Any) -> Config:
    """The record that rides on these ServerArgs, else what the environment says."""
    record = getattr(server_args, ATTRIBUTE, None)
    return record if isinstance(record, Config) else resolve_if_enabled(None)
