"""Configuration: one frozen record. Flags override the environment, which overrides defaults.

On a server that has opted in, `plugin.py` attaches the record to SGLang's ServerArgs as `_mixkv`.
SGLang pickles ServerArgs with their attributes, so every process gets the same record. The
attribute is a plain dict, since SGLang's dumps also contain pickled ServerArgs and are read where
the plugin is not installed. If a launcher builds ServerArgs without SGLang's command line, the
environment decides, and the record is made when ServerArgs are resolved.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
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
API_KEY_ENV = "SGLANG_MIXKV_API_KEY"  # for servers with --api-key; only the tools read it
# The file to which a launch writes its resolved arguments instead of serving; the GPU to assume.
PLAN_ENV, PLAN_GPU_ENV = "SGLANG_MIXKV_PLAN", "SGLANG_MIXKV_PLAN_GPU"


class Config(msgspec.Struct, frozen=True):
    """The operator's settings; SETTINGS explains each field. `port`: 0 for any free port.
    `data_plane`: "" to choose by the transfer backend."""

    enabled: bool = False
    staging_mb: int = 256
    on_draft_mismatch: str = "refuse"
    allow_untested_sglang: bool = False
    patience: float = 1.0
    port: int = 0
    data_plane: str = ""
    gpu_copies: str = "auto"
    nixl_params: dict[str, str] = {}


class Setting(NamedTuple):
    """A setting: its variable `environ`, its `flag` if it has one, and `words`, which describes the
    accepted values. `read` parses a value; raises ValueError or KeyError if invalid."""

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
        """Parse the text of the flag or variable `name`. Raises MixKVError if it is invalid."""
        by_default = f": the default is {self.default}" if self.default else ""
        try:
            return self.read(text.strip())
        except (ValueError, KeyError):
            got = "a value that may contain keys" if self.field == "nixl_params" else repr(text)
            expected = f"{name} to be {self.words}"
            consequence = "the server would not run as configured"
            remedy = f"Correct it, or leave it out{by_default}"
            raise refuse("MIXKV-START-04", expected, got, consequence, remedy) from None


def _between(kind: type[int] | type[float], least: float, most: float) -> tuple[str, Any]:
    def read(text: str) -> int | float:
        value = kind(text)
        if not least <= value <= most:  # also rejects NaN
            raise ValueError
        return value

    name = "a whole number" if kind is int else "a number"
    return f"{name} from {least} to {most}", read


def _one_of(*names: str) -> tuple[str, Any]:
    return " or ".join(names), {name: name for name in names}.__getitem__


# The words of SGLang's EnvBool (environ.py), plus on and off.
OFF = "0", "false", "no", "n", "off"
_TRUTHS = dict.fromkeys(("1", "true", "yes", "y", "on"), True) | dict.fromkeys(OFF, False)
_TRUTH: tuple[str, Any] = "1 or 0", lambda text: _TRUTHS[text.lower()]

# Reasons for the bounds. --mixkv-staging-mb: one reader may hold 4 GiB (MOST slots), a prompt of
# 131,072 tokens at 32 KiB each. SGLANG_MIXKV_PATIENCE: with the minimum, the longest wait for
# progress is one tick of the channel thread; with the maximum, the whole wait is 300 s, SGLang's
# own limit for the target. SGLANG_MIXKV_PORT: the maximum leaves a port for each GPU of a host.
SETTINGS = (
    Setting(
        "enabled", ENABLE_ENV, *_TRUTH,
        "Transfer the drafter's KV by heads between prefill and decode servers of different "
        "attention-TP sizes. Set it on both sides.",
        "--enable-mixkv",
    ),
    Setting(
        "staging_mb", "SGLANG_MIXKV_STAGING_MB", *_between(int, 1, 16384),
        "MiB of each rank's staging buffer for draft KV: registered memory on the KV's device, "
        "outside --mem-fraction-static, in slots of 4 MiB, or 64 smaller ones. Allocated at start.",
        "--mixkv-staging-mb",
    ),
    Setting(
        "on_draft_mismatch", "SGLANG_MIXKV_ON_DRAFT_MISMATCH", *_one_of("refuse", "cold"),
        "Set on decode. If the two sides differ only in their drafters: refuse the prefill server, "
        "or serve its requests with only the target's KV (cold: same output, lower accept length).",
        "--mixkv-on-draft-mismatch",
    ),
    Setting(
        "allow_untested_sglang", ALLOW_UNTESTED_ENV, *_TRUTH,
        "Start even with an SGLang that the plugin refuses, and log each difference.",
    ),
    Setting(
        "patience", PATIENCE_ENV, *_between(float, 0.1, 60), "Multiplies the channel's times."
    ),
    Setting(
        "port", "SGLANG_MIXKV_PORT", *_between(int, 1024, 65000),
        "On prefill: the channel of the rank on GPU n listens on this port plus n; if unset, on "
        "any free port.",
    ),
    Setting(
        "data_plane", PLANE_ENV, *_one_of("mooncake", "nixl"),
        "The library with which decode reads slots; set the same on both sides. If unset, it is "
        "chosen by the transfer backend.",
    ),
    Setting(
        "gpu_copies", "SGLANG_MIXKV_GPU_COPIES", *_one_of("kernels", "torch", "auto"),
        "How draft KV is copied on a GPU. auto: by kernels or, if these fail, torch and a warning.",
    ),
    Setting(
        "nixl_params", "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS", "a JSON object of strings",
        partial(msgspec.json.decode, type=dict[str, str]),
        "SGLang's variable for parameters of NIXL's backend. The plugin's NIXL gets them, too.",
    ),
)  # fmt: skip

_OF_VARIABLE = {setting.environ: setting for setting in SETTINGS}
_OWN = re.compile(r"SGLANG_\w*MIX_?KV")
_KNOWN = {*_OF_VARIABLE, API_KEY_ENV, PLAN_ENV, PLAN_GPU_ENV}


def variable(name: str, text: str) -> Any:
    """Return an environment variable's value; None if empty or unused by servers. Raises MixKVError
    for an invalid value, or an unknown name like those of the plugin."""
    if setting := _OF_VARIABLE.get(name):
        return setting.value(name, text) if text.strip() else None
    if _OWN.match(name) and name not in _KNOWN and not _is_of_service(name, text):
        expected, consequence = "a variable that the plugin reads", "it would have no effect"
        remedy = f"Unset it{nearest(name, _KNOWN)}"
        raise refuse("MIXKV-START-04", expected, name, consequence, remedy)
    return None


def _is_of_service(name: str, text: str) -> bool:
    """Return whether Kubernetes set this variable for a Service in the pod's namespace. A Service
    named sglang-mixkv-router yields SGLANG_MIXKV_ROUTER_SERVICE_HOST and six others."""
    made = re.search(r"_SERVICE_(HOST|PORT)|_PORT_\d+_[A-Z]+", name)
    return bool(made or re.match(r"(tcp|udp|sctp)://", text))


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the closest known word, if any."""
    found = difflib.get_close_matches(word, known, 1, 0.85)
    return f"; the closest match is {found[0]}" if found else ""


def truth(name: str, environ: Mapping[str, str]) -> bool:
    """Return a boolean variable of SGLang or the plugin. Raises MixKVError if it is invalid."""
    text = environ.get(name, "")
    return bool(text.strip() and Setting("", name, *_TRUTH).value(name, text))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to SGLang's parser, once."""
    if any("--enable-mixkv" in action.option_strings for action in parser._actions):
        return
    group = parser.add_argument_group("sglang-mixkv")
    for one in (setting for setting in SETTINGS if setting.flag):
        if one.default is False:
            text = f"{one.help} [env: {one.environ}]"
            group.add_argument(one.flag, action="store_true", default=None, help=text)
        else:
            text = f"{one.help} Expected: {one.words} [default: {one.default}; env: {one.environ}]"
            read = partial(one.value, one.flag)
            group.add_argument(one.flag, type=read, metavar="VALUE", help=text)


def resolve(flags: argparse.Namespace | None, environ: Mapping[str, str] = os.environ) -> Config:
    """Make a Config. `flags`: None if the launcher lacks the plugin's flags. Raises MixKVError for
    the first invalid variable."""
    found = {name: variable(name, environ[name]) for name in sorted(environ)}
    values = {setting.field: found.get(setting.environ) for setting in SETTINGS}
    for setting in SETTINGS:
        given = getattr(flags, setting.flag.removeprefix("--").replace("-", "_"), None)
        values[setting.field] = values[setting.field] if given is None else given
    return Config(**{field: value for field, value in values.items() if value is not None})


def resolve_if_enabled(flags: argparse.Namespace | None) -> Config:
    """Call `resolve` if this process has opted in. Otherwise return the defaults and read no other
    variable, so that none can stop the process. An error ends the process, without a traceback."""
    try:
        asked = getattr(flags, "enable_mixkv", None) or truth(ENABLE_ENV, os.environ)
        return resolve(flags) if asked else Config()
    except MixKVError as error:
        raise SystemExit(str(error)) from None


def attach(server_args: Any, config: Config) -> None:
    if config.enabled:
        setattr(server_args, ATTRIBUTE, msgspec.structs.asdict(config))


def config_of(server_args: Any) -> Config:
    """Return the record attached to these ServerArgs, or one made from the environment."""
    record = getattr(server_args, ATTRIBUTE, None)
    return resolve_if_enabled(None) if record is None else msgspec.convert(record, Config)
