"""One server as SGLang resolves its launch line. SGLang's own parser, resolution, checks and model
configuration run here, without a GPU or weights."""

from __future__ import annotations

import argparse
import logging
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import msgspec

from sglang_mixkv import refusals
from sglang_mixkv.channel.handshake import Target
from sglang_mixkv.config import ATTRIBUTE, SETTINGS, Config, add_flags, nearest, resolve, truth
from sglang_mixkv.draft.layout import DraftFacts
from sglang_mixkv.engine.releases import rules, sglang_version
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.tools.plan_model import Model, model_of, stage_of
from sglang_mixkv.tools.plan_text import Line, split, unreadable

OF_HOST = (
    "disaggregation_ib_device", "mooncake_ib_device", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs",
)  # fmt: skip
"""Flags whose devices and files SGLang looks for on the host that resolves a line."""
GPUS = {"hopper": (9, 0), "blackwell": (10, 0)}  # compute capabilities


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """FLAGS are SGLang's, resolved. `enabled`: opted in. `gpu`: the one it was resolved for.
    `attention_tp`: 0 if TP does not divide. `stage`: the target's part in the first pipeline stage.
    `tcp`: Mooncake is told to use TCP. `stock`: why SGLang does not start it; `refused`: why the
    plugin does not."""

    attn_cp_size: int = 1
    enable_kv_cache_sharding: bool | None = False
    tp_size: int
    attn_dp_size: int
    dp_size: int
    pp_size: int
    dcp_size: int
    page_size: int | None
    kv_cache_dtype: str
    disaggregation_transfer_backend: str
    disaggregation_enable_kv_checksum: bool
    speculative_eagle_topk: int | None
    role: str
    enabled: bool
    config: Config
    gpu: str
    attention_tp: int
    target: Model
    stage: Target
    draft: Model | None
    tcp: bool = False
    stock: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def facts(self) -> DraftFacts | None:
        """The facts of a drafter with KV heads."""
        return self.draft.facts if self.draft and self.draft.kv_heads else None


FLAGS = Server.__struct_fields__[:12]


def read(role: str, text: str, *, gpu: str | None = None) -> Server:
    """Resolve a launch line. `gpu`: a name in GPUS; None for the first on which SGLang starts it.
    Raises MixKVError or ValueError if it cannot be read, ImportError without SGLang."""
    try:
        line = split(text, role)
        with alone(line.environ):
            return _read(role, line, [gpu] if gpu else [*GPUS])
    except MixKVError as error:
        raise error.about(role) from None
    except ValueError as error:  # SGLang's
        raise ValueError(f"{role}: {error}") from None


def _read(role: str, line: Line, gpus: list[str]) -> Server:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import ServerArgs

    args, of_dynamo = parse(line)
    config = resolve(args, line.environ)
    _check_models(args)
    notes = [*_unread(role, line, of_dynamo, args)]
    refused = list[str]()
    if args.disaggregation_mode in (None, "null"):
        args.disaggregation_mode = role
        if config.enabled and line.launcher:  # flags alone may be incomplete
            refused.append(f"[MIXKV-START-03] {role}: {refusals.SINGLE_SERVER}")
        else:
            notes.append(f"{role}: taken as --disaggregation-mode {role}, which is not given")
    args.device = args.device or "cuda"
    gpus = gpus if args.device == "cuda" else [""]
    for gpu in (*gpus, gpus[0]):  # if none will do, the first says why
        server_args = ServerArgs.from_cli_args(args)
        # `refused` has what the plugin's hook would raise.
        setattr(server_args, ATTRIBUTE, Config())
        with as_on(gpu) if gpu else nullcontext():
            stock = [*_not_started(role, server_args)]
        if not stock:
            break
    if args.device.partition(":")[0] not in refusals.DEVICES:  # SGLang would look for it here
        stock, notes = [], [*notes, f"{role}: SGLang's checks for {args.device} were not run"]
    view = resolving_view(server_args)
    notes += _amd(role, view, line.environ)
    values: dict[str, Any] = {name: getattr(view, name, None) for name in FLAGS}
    if values["attn_dp_size"] is None:  # SGLang up to 0.5.21 has no such flag
        values["attn_dp_size"] = view.dp_size if view.enable_dp_attention else 1
        values["dp_size"] //= values["attn_dp_size"]
    parts = values["attn_dp_size"] * view.attn_cp_size
    target = model_of(server_args, view, is_draft=False)
    draft = model_of(server_args, view, is_draft=True) if refusals.has_drafter(view) else None
    attention_tp = view.tp_size // parts if parts and not view.tp_size % parts else 0
    # SGLang finds the drafter in a target with MTP or DSPARK; else it would load the target as one.
    if draft and args.speculative_draft_model_path in (None, args.model_path):
        is_same = draft.facts.architecture == target.facts.architecture
        is_none = is_same and view.speculative_draft_model_path is None
        if is_none or draft.facts.algorithm in ("EAGLE3", "STANDALONE"):
            text = "needs --speculative-draft-model-path: the target has no such drafter"
            stock.append(f"{role}: {draft.facts.algorithm} {text}")
    if draft and draft.kv_heads and view.hicache_storage_backend == refusals.STORED:
        text = f"only servers of attention TP {attention_tp} find its draft KV in Mooncake's store"
        notes.append(f"{role}: with the plugin, {text}")
    refused += _refused(role, line, view, args)
    return Server(
        **values, role=role, enabled=config.enabled, config=config, gpu=gpu, stock=tuple(stock),
        attention_tp=attention_tp, target=target, stage=stage_of(target, view), draft=draft,
        refused=tuple(refused), notes=tuple(notes),
        tcp="MC_FORCE_TCP" in line.environ or line.environ.get("MOONCAKE_PROTOCOL") == "tcp",
    )  # fmt: skip


def _unread(role: str, line: Line, of_dynamo: list[str], args: argparse.Namespace) -> Iterator[str]:
    """Note what was left out of account, and clear the flags that only the server's host knows."""
    if line.unread:
        yield f"{role}: no shell runs here, so this is taken literally: {' '.join(line.unread)}"
    if of_dynamo:
        yield f"{role}: taken as Dynamo's own flags, and not checked: {' '.join(of_dynamo)}"
    for name in OF_HOST:
        if value := getattr(args, name, None):
            setattr(args, name, None)
            flag = f"--{name.replace('_', '-')}"
            yield f"{role}: {flag} {value} depends on the server's host, and was not checked"


def _amd(role: str, view: Any, environ: Mapping[str, str]) -> Iterator[str]:
    """Note an AMD GPU, which shows only in these backends, or in this image's torch."""
    import torch

    flags = "attention_backend", "prefill_attention_backend", "decode_attention_backend"
    named = {"aiter", "wave"} & {getattr(view, flag) for flag in flags}
    if named or truth("SGLANG_USE_AITER", environ) or torch.version.hip:
        yield f"{role}: no AMD GPU has run the plugin; torch would make its copies there, slowly"


def _check_models(args: argparse.Namespace) -> None:
    """Raise MixKVError if a model is not here: SGLang would ask the Hub again and again."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if args.model_path is None:
        raise unreadable("--model-path is missing on the launch line")
    for flag in ("--model-path", "--speculative-draft-model-path"):
        path = getattr(args, flag[2:].replace("-", "_"))
        with suppress(HFValidationError):  # not a Hub name
            if path is None or Path(path).exists() or try_to_load_from_cache(path, "config.json"):
                continue
        text = "neither a folder nor in the Hub's cache here: copy its config.json into a folder"
        raise unreadable(f"{flag} {path}: {text}")


def _not_started(role: str, server_args: Any) -> Iterator[str]:
    """Yield what SGLang raises or, if an error has no text, the source line that raises it. A step
    of its resolution that raises does not hide later errors."""
    from sglang.srt.arg_groups import pipeline

    raised, run = list[Exception](), pipeline.run_hook

    def go_on(step: Any, *args: Any) -> None:
        try:
            step(*args)
        except Exception as error:
            raised.append(error)

    with patch.object(pipeline, "run_hook", lambda step, args: go_on(run, step, args)):
        go_on(server_args.resolve_once)
        go_on(server_args.check_server_args)
    said = (ValueError, RuntimeError, AssertionError)  # others may follow from an earlier one
    raised[1:] = [error for error in raised[1:] if isinstance(error, said) and str(error)]
    texts = (str(e) or str(traceback.extract_tb(e.__traceback__)[-1].line) for e in raised)
    for text in dict.fromkeys(" ".join(text.split()) for text in texts):
        yield f"{role}: SGLang {sglang_version()} does not start it: {text}"


def _refused(role: str, line: Line, view: Any, args: argparse.Namespace) -> Iterator[str]:
    given = {word.partition("=")[0] for word in line.flags} if line.is_dynamos else set()
    for setting in SETTINGS:
        if setting.flag in given:
            yield f"{role}: Dynamo's parser ends at {setting.flag}: set {setting.environ} instead"
    for reason in refusals.broken(rules(), view, line.environ, args):
        yield f"[MIXKV-START-03] {role}: {reason}"
    if view.disaggregation_mode != role:
        text = f"expected --disaggregation-mode {role}; got {view.disaggregation_mode}"
        yield f"[MIXKV-START-03] {role}: {text}. Are the two launch lines swapped?"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise unreadable(message)


def parse(line: Line) -> tuple[argparse.Namespace, list[str]]:
    """Return the parsed flags, and those taken as Dynamo's. Raises MixKVError with all words that
    SGLang does not know."""
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser, words = _parser(), list(line.flags)
    try:
        if "--config" in words:
            words = list(ConfigArgumentMerger(parser).merge_config_with_args(words))
    except Exception as error:  # from SGLang or the YAML parser
        raise unreadable(f"--config: {error}") from None
    args, unknown = parser.parse_known_args(words)
    if unknown and not line.is_dynamos:
        hint = nearest(unknown[0].partition("=")[0], parser._option_string_actions)
        raise unreadable(f"SGLang does not know {' '.join(unknown)}{hint}")
    return args, unknown


@cache
def _parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(add_help=False)
    ServerArgs.add_cli_args(parser)
    add_flags(parser)
    for action in parser._actions:
        action.required = False  # else a missing flag would hide a mistyped one
    return parser


@contextmanager
def alone(environ: Mapping[str, str]) -> Iterator[None]:
    """Let only the line's SGLANG_ variables count; keep SGLang from logging and downloading."""
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
    """Answer what SGLang asks about the GPU while it resolves a line, as this GPU would. The
    answers decide attention backends and KV types."""
    import torch
    from sglang.srt.runtime_context import override_platform

    capability, is_hopper = GPUS[gpu], gpu == "hopper"
    facts = dict.fromkeys(("is_sm90", "is_hopper_with_cuda_12_3"), is_hopper)
    facts |= dict.fromkeys(("is_sm100", "is_sm100_or_sm110", "is_blackwell"), not is_hopper)
    sm = 10 * capability[0] + capability[1]
    with (
        patch.object(torch.cuda, "get_device_capability", lambda device=None: capability),
        override_platform(is_cuda=True, device_capability=capability, device_sm=sm, **facts),
    ):
        yield
