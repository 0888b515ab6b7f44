"""One server as SGLang resolves its launch line: its own parser, resolution, checks and model
configuration run here, without a GPU and without weights."""

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
from sglang_mixkv.config import ATTRIBUTE, SETTINGS, Config, add_flags, nearest, resolve, truth
from sglang_mixkv.draft.handshake import Target
from sglang_mixkv.draft.layout import DraftFacts
from sglang_mixkv.engine.releases import rules, sglang_version
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.tools.plan_model import Model, model_of, stage_of
from sglang_mixkv.tools.plan_text import Line, split, unreadable

OF_HOST = (
    "disaggregation_ib_device", "mooncake_ib_device", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs",
)  # fmt: skip
"""Flags whose devices and files SGLang looks for where it resolves a line."""
GPUS = {"hopper": (9, 0), "blackwell": (10, 0)}  # compute capabilities


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """FLAGS are SGLang's, resolved. `enabled`: opted in. `gpu`: what it was resolved for.
    `attention_tp`: 0 where TP does not split. `stage`: the target of the first pipeline stage.
    `tcp`: Mooncake was told to take it. `stock`: why SGLang does not start it; `refused`: why the
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
    """Raises MixKVError or ValueError for what cannot be read, ImportError without SGLang. `gpu`: a
    name of GPUS; without one, the first on which SGLang starts the line."""
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
        if config.enabled and line.launcher:  # flags alone may not be all
            refused.append(f"[MIXKV-START-03] {role}: {refusals.SINGLE_SERVER}")
        else:
            notes.append(f"{role}: taken as --disaggregation-mode {role}, which is not given")
    args.device = args.device or "cuda"
    gpus = gpus if args.device == "cuda" else [""]
    for gpu in (*gpus, gpus[0]):  # where none will do, the first says why
        server_args = ServerArgs.from_cli_args(args)
        # `refused` has what the plugin's hook would raise.
        setattr(server_args, ATTRIBUTE, Config())
        with as_on(gpu) if gpu else nullcontext():
            stock = [*_not_started(role, server_args)]
        if not stock:
            break
    if args.device.partition(":")[0] not in refusals.DEVICES:  # SGLang would look for one here
        stock, notes = [], [*notes, f"{role}: what SGLang checks on {args.device} was not checked"]
    view = resolving_view(server_args)
    notes += _amd(role, view, line.environ)
    values: dict[str, Any] = {name: getattr(view, name, None) for name in FLAGS}
    if values["attn_dp_size"] is None:  # no flag of its own up to SGLang 0.5.21
        values["attn_dp_size"] = view.dp_size if view.enable_dp_attention else 1
        values["dp_size"] //= values["attn_dp_size"]
    parts = values["attn_dp_size"] * view.attn_cp_size
    target = model_of(server_args, view, is_draft=False)
    draft = model_of(server_args, view, is_draft=True) if refusals.has_drafter(view) else None
    attention_tp = view.tp_size // parts if parts and not view.tp_size % parts else 0
    # Of a target with an MTP layer, or DSPARK's, SGLang knows; of others it would load the target.
    if draft and args.speculative_draft_model_path in (None, args.model_path):
        is_same = draft.facts.architecture == target.facts.architecture
        is_none = is_same and view.speculative_draft_model_path is None
        if is_none or draft.facts.algorithm in ("EAGLE3", "STANDALONE"):
            text = "needs --speculative-draft-model-path: the target has no such drafter"
            stock.append(f"{role}: {draft.facts.algorithm} {text}")
    if draft and draft.kv_heads and view.hicache_storage_backend == refusals.STORED:
        text = "draft KV in Mooncake's store is found by servers of the same attention TP alone"
        notes.append(f"{role}: with the plugin, its {text} ({attention_tp})")
    refused += _refused(role, line, view, args)
    return Server(
        **values, role=role, enabled=config.enabled, config=config, gpu=gpu, stock=tuple(stock),
        attention_tp=attention_tp, target=target, stage=stage_of(target, view), draft=draft,
        refused=tuple(refused), notes=tuple(notes),
        tcp="MC_FORCE_TCP" in line.environ or line.environ.get("MOONCAKE_PROTOCOL") == "tcp",
    )  # fmt: skip


def _unread(role: str, line: Line, of_dynamo: list[str], args: argparse.Namespace) -> Iterator[str]:
    """Note what decides nothing here. Takes the flags away that the server's host answers."""
    if line.unread:
        yield f"{role}: no shell runs, so this is taken as it stands: {' '.join(line.unread)}"
    if of_dynamo:
        yield f"{role}: taken as Dynamo's own flags, and not checked: {' '.join(of_dynamo)}"
    for name in OF_HOST:
        if value := getattr(args, name, None):
            setattr(args, name, None)
            flag = f"--{name.replace('_', '-')}"
            yield f"{role}: {flag} {value} depends on the server's host and was not looked at"


def _amd(role: str, view: Any, environ: Mapping[str, str]) -> Iterator[str]:
    """For AMD's GPUs, of which a line says no more than this; `torch` is that of this image."""
    import torch

    flags = "attention_backend", "prefill_attention_backend", "decode_attention_backend"
    named = {"aiter", "wave"} & {getattr(view, flag) for flag in flags}
    if named or truth("SGLANG_USE_AITER", environ) or torch.version.hip:
        yield f"{role}: no AMD GPU has run the plugin; torch would make its copies there, slowly"


def _check_models(args: argparse.Namespace) -> None:
    """SGLang would ask the Hub, again and again."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if args.model_path is None:
        raise unreadable("--model-path is missing on the launch line")
    for flag in ("--model-path", "--speculative-draft-model-path"):
        path = getattr(args, flag[2:].replace("-", "_"))
        with suppress(HFValidationError):  # no name of the Hub's
            if path is None or Path(path).exists() or try_to_load_from_cache(path, "config.json"):
                continue
        text = "neither a folder nor in the Hub's cache here: copy its config.json into a folder"
        raise unreadable(f"{flag} {path}: {text}")


def _not_started(role: str, server_args: Any) -> Iterator[str]:
    """Return what SGLang raises, and where it says nothing, the line that does. A step of its
    resolution that raises hides no later one."""
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
    """Return what the flags set, and those that are Dynamo's. Raises MixKVError with all words that
    SGLang does not know."""
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser, words = _parser(), list(line.flags)
    try:
        if "--config" in words:
            words = list(ConfigArgumentMerger(parser).merge_config_with_args(words))
    except Exception as error:  # of SGLang or the YAML parser
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
    """Answers what SGLang asks of a GPU while it resolves a line, as this GPU would. It decides
    attention backends and types of KV."""
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
