"""Configuration: flags over environment over defaults, one frozen record.

The record is made where SGLang builds its ServerArgs (`plugin.py`), as their attribute `_mixkv`:
SGLang pickles ServerArgs with their attributes, so every process gets the same record. If a
launcher builds ServerArgs without SGLang's command line, its environment decides, and the record is
made when they are resolved.

This module is imported while ServerArgs are unpickled in child processes: it imports
neither SGLang nor torch.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from sglang_mixkv.errors import MixKVError, refuse

ATTRIBUTE = "_mixkv"
ENABLE_ENV = "SGLANG_ENABLE_MIXKV"
ALLOW_UNTESTED_ENV = "SGLANG_MIXKV_ALLOW_UNTESTED_SGLANG"
PATIENCE_ENV = "SGLANG_MIXKV_PATIENCE"
PLANE_ENV = "SGLANG_MIXKV_DATA_PLANE"
API_KEY_ENV = "SGLANG_MIXKV_API_KEY"  # of servers with --api-key; commands read it, servers do not


class Config(msgspec.Struct, frozen=True):
    """The operator's settings of the plugin; SETTINGS says what each field means. `port`: 0 for any
    free one. `data_plane`: "" for the transfer backend's own."""

    enabled: bool = False
    staging_mb: int = 256
    on_draft_mismatch: str = "refuse"
    allow_untested_sglang: bool = False
    patience: float = 1.0
    port: int = 0
    data_plane: str = ""
    gpu_copies: str = "auto"
    nixl_params: dict[str, str] = {}

    def __reduce__(self) -> Any:
        return _unpickled, msgspec.structs.astuple(self)


def _unpickled(*values: Any) -> Config:
    """Load plugins in SGLang's workers of --tokenizer-worker-num, which take requests without
    plugins, but unpickle ServerArgs (http_server.py, init_multi_tokenizer). Elsewhere that module
    is not imported before plugins are loaded."""
    config = Config(*values)
    if config.enabled and "sglang.srt.entrypoints.http_server" in sys.modules:
        sys.modules["sglang.srt.plugins"].load_plugins()  # once in a process
    return config


class Setting(NamedTuple):
    """One setting: its variable, its flag if it has one, and the values that either takes, as text.
    `read` raises ValueError or KeyError for others."""

    field: str
    environ: str
    words: str
    read: Callable[[str], Any]
    help: str = ""
    flag: str = ""

    @property
    def default(self) -> Any:
        return getattr(Config(), self.field, None)

    def value(self, name: str, text: str) -> Any:
        """Read it. `name`: of the flag or variable. MixKVError for text outside of the bounds."""
        by_default = f": the default is {self.default}" if self.default else ""
        try:
            return self.read(text.strip())
        except (ValueError, KeyError):
            raise refuse(
                "MIXKV-START-04", f"{name} to be {self.words}", repr(text),
                "the server would not run as it was asked to",
                f"Correct it, or leave it out{by_default}",
            ) from None  # fmt: skip


def _between(kind: type[int] | type[float], least: float, most: float) -> tuple[str, Any]:
    def read(text: str) -> int | float:
        value = kind(text)
        if not least <= value <= most:  # false for NaN
            raise ValueError
        return value

    name = "a whole number" if kind is int else "a number"
    return f"{name} from {least} to {most}", read


def _one_of(*names: str) -> tuple[str, Any]:
    return " or ".join(names), {name: name for name in names}.__getitem__


# SGLang's words (EnvBool in environ.py), and on and off.
_TRUTHS = dict.fromkeys(("1", "true", "yes", "y", "on"), True)
_TRUTHS |= dict.fromkeys(("0", "false", "no", "n", "off"), False)
_TRUTH: tuple[str, Any] = "1 or 0", lambda text: _TRUTHS[text.lower()]

# Bounds. --mixkv-staging-mb: half of the largest, which one reader may hold, is 8 GiB, or a prompt
# of 262,144 tokens at 32 KiB each. SGLANG_MIXKV_PATIENCE: with the smallest the longest wait is one
# tick of the channel's threads, with the largest the whole wait is 300 s, as long as SGLang waits
# for the target. SGLANG_MIXKV_PORT: from the largest on there are ports for all GPUs of a host.
SETTINGS = (
    Setting(
        "enabled", ENABLE_ENV, *_TRUTH,
        "Transfer the drafter's KV by heads between prefill and decode servers of different "
        "attention-TP sizes. Set it on both sides.",
        "--enable-mixkv",
    ),
    Setting(
        "staging_mb", "SGLANG_MIXKV_STAGING_MB", *_between(int, 1, 16384),
        "MiB of a rank's staging buffer for draft KV: registered memory of the KV's kind, outside "
        "--mem-fraction-static, in slots of 4 MiB, or 64 smaller ones. Taken at start.",
        "--mixkv-staging-mb",
    ),
    Setting(
        "on_draft_mismatch", "SGLANG_MIXKV_ON_DRAFT_MISMATCH", *_one_of("refuse", "cold"),
        "Set on decode. When only the drafters of both sides differ: refuse the prefill server, or "
        "serve its requests with the target's KV alone (cold: same output, lower accept length).",
        "--mixkv-on-draft-mismatch",
    ),
    Setting(
        "allow_untested_sglang", ALLOW_UNTESTED_ENV, *_TRUTH,
        "Start with an SGLang that is refused. Each difference is logged.",
    ),
    Setting(
        "patience", PATIENCE_ENV, *_between(float, 0.1, 60), "A factor on the channel's times."
    ),
    Setting(
        "port", "SGLANG_MIXKV_PORT", *_between(int, 1024, 65000),
        "On prefill: the channel of the rank on GPU n listens on this port plus n. By default on "
        "any free port.",
    ),
    Setting(
        "data_plane", PLANE_ENV, *_one_of("mooncake", "nixl"),
        "What decode reads slots with, the same on both sides. By default by the transfer backend.",
    ),
    Setting(
        "gpu_copies", "SGLANG_MIXKV_GPU_COPIES", *_one_of("kernels", "torch", "auto"),
        "What copies draft KV on a GPU. auto: kernels, or torch where they cannot, with a warning.",
    ),
    Setting(
        "nixl_params", "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS", "a JSON object of strings",
        partial(msgspec.json.decode, type=dict[str, str]),
        "SGLang's own: parameters of NIXL's backend. The plugin's NIXL takes the same.",
    ),
)  # fmt: skip

_OF_VARIABLE = {setting.environ: setting for setting in SETTINGS}
_OWN = re.compile(r"SGLANG_\w*MIX_?KV")
_KNOWN = {*_OF_VARIABLE, API_KEY_ENV}


def variable(name: str, text: str) -> Any:
    """Return the value of an environment variable; None if it is empty, or no server reads it.
    MixKVError if it is outside of its bounds, or unknown and has the plugin's name."""
    if setting := _OF_VARIABLE.get(name):
        return setting.value(name, text) if text.strip() else None
    if _OWN.match(name) and name not in _KNOWN and not _is_of_service(name, text):
        raise refuse(
            "MIXKV-START-04", "variables that the plugin reads", name,
            "a setting would have no effect", f"Unset it{nearest(name, _KNOWN)}",
        )  # fmt: skip
    return None


def _is_of_service(name: str, text: str) -> bool:
    """True if Kubernetes set it, as it does for each Service of a pod's namespace: for one named
    sglang-mixkv-router it sets SGLANG_MIXKV_ROUTER_SERVICE_HOST, and six more."""
    made = re.search(r"_SERVICE_(HOST|PORT)|_PORT_\d+_[A-Z]+", name)
    return bool(made or re.match(r"(tcp|udp|sctp)://", text))


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown word."""
    found = difflib.get_close_matches(word, known, 1, 0.85)
    return f"; the nearest that is known is {found[0]}" if found else ""


def truth(name: str, environ: Mapping[str, str]) -> bool:
    """A boolean variable, of SGLang's or the plugin's; MixKVError for text that is neither."""
    text = environ.get(name, "")
    return bool(text.strip() and Setting("", name, *_TRUTH).value(name, text))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to SGLang's parser, once."""
    if any("--enable-mixkv" in action.option_strings for action in parser._actions):
        return
    group = parser.add_argument_group("sglang-mixkv")
    for setting in SETTINGS:
        if setting.flag == "--enable-mixkv":
            text = f"{setting.help} [env: {setting.environ}]"
            group.add_argument(setting.flag, action="store_true", default=None, help=text)
        elif setting.flag:
            group.add_argument(
                setting.flag, type=partial(setting.value, setting.flag), metavar="VALUE",
                help=f"{setting.help} Expected: {setting.words} [default: "
                f"{setting.default}; env: {setting.environ}]",
            )  # fmt: skip


def resolve(flags: argparse.Namespace | None, environ: Mapping[str, str] = os.environ) -> Config:
    """Make the record for these flags (None: a launcher without the plugin's flags). MixKVError for
    the first variable that is refused."""
    found = {name: variable(name, environ[name]) for name in sorted(environ)}
    values = {setting.field: found.get(setting.environ) for setting in SETTINGS}
    for setting in SETTINGS:
        given = getattr(flags, setting.flag.removeprefix("--").replace("-", "_"), None)
        values[setting.field] = values[setting.field] if given is None else given
    return Config(**{field: value for field, value in values.items() if value is not None})


def resolve_if_enabled(flags: argparse.Namespace | None) -> Config:
    """Do as `resolve` in a process that opted in. In others nothing more is read, so that nothing
    can stop them. A refusal ends the process with its message alone, as all refusals at start."""
    try:
        asked = getattr(flags, "enable_mixkv", None) or truth(ENABLE_ENV, os.environ)
        return resolve(flags) if asked else Config()
    except MixKVError as error:
        raise SystemExit(str(error)) from None


def config_of(server_args: Any) -> Config:
    """Return the record of these ServerArgs, or else what the environment says."""
    record = getattr(server_args, ATTRIBUTE, None)
    return record if isinstance(record, Config) else resolve_if_enabled(None)
