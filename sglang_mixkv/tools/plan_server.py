"""One server as SGLang resolves its launch line. SGLang's own parser, resolution, checks and model
configuration run here, without a GPU or weights."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock, patch

import msgspec

from sglang_mixkv import refusals
from sglang_mixkv.channel.handshake import Target
from sglang_mixkv.channel.mooncake import forces_tcp
from sglang_mixkv.config import ATTRIBUTE, SETTINGS, Config, add_flags, nearest, resolve
from sglang_mixkv.draft.layout import DraftFacts
from sglang_mixkv.engine.releases import rules, sglang_version
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.tools.plan_model import Model, model_of, stage_of
from sglang_mixkv.tools.plan_shell import Line, unreadable, value_of
from sglang_mixkv.tools.plan_text import Given, split

OF_HOST = re.compile("(disaggregation|mooncake)_ib_device|ssl_(keyfile|certfile|ca_certs)")
"""Flags that name devices and files of the server's host, for which SGLang would look here."""
GPUS = {"hopper": (9, 0), "blackwell": (10, 0)}  # compute capabilities


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """FLAGS have the values that SGLang resolved. `enabled`: the server has opted in. `gpu`: the
    GPU assumed. `mode`: the line's --disaggregation-mode; `role`: the role that plan was asked for.
    `sglang`: SGLang's release. `resolved`: whether SGLang resolved all flags. `attention_tp`: 0 if
    TP does not divide. `stage`: layers of the target's first stage. `tcp`: Mooncake is set to TCP.
    `store`: its store's settings, if used. `stock`, `refused`: why SGLang or the plugin refuses."""

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
    sglang: str
    attention_tp: int
    target: Model
    stage: Target
    draft: Model | None
    mode: str
    resolved: bool = True
    tcp: bool = False
    store: str | None = None
    stock: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def facts(self) -> DraftFacts | None:
        """The facts of a drafter with KV heads."""
        return self.draft.facts if self.draft and self.draft.kv_heads else None


FLAGS = Server.__struct_fields__[:12]


def read(role: str, given: Given | str, *, gpu: str | None = None) -> Server:
    """Resolve a launch line. `gpu`: a name in GPUS; None for the first with which SGLang starts.
    Raises MixKVError or ValueError for an unreadable line, ImportError without SGLang."""
    try:
        line = split(given, role)
        with alone(line.environ):
            return _read(role, line, [gpu] if gpu else [*GPUS])
    except MixKVError as error:
        raise error.about(role) from None
    except ValueError as error:  # SGLang's
        raise ValueError(f"{role}: {error}") from None


def _read(role: str, line: Line, gpus: list[str]) -> Server:
    from sglang.srt.server_args import ServerArgs

    args, of_dynamo, ends = parse(line)
    refused = [f"{role}: {why}" for why in of_dynamo]
    config, plugins = resolve(args, line.environ), line.environ.get("SGLANG_PLUGINS", "")
    if config.enabled and plugins and "mixkv" not in re.split(r"[\s,]+", plugins):
        refused.append(f"{role}: SGLANG_PLUGINS leaves out mixkv: add it, or unset the variable")
    _check_models(args)
    notes = [*line.notes]
    for name, value in vars(args).items():
        if value and OF_HOST.fullmatch(name):
            setattr(args, name, None)
            flag = f"--{name.replace('_', '-')}"
            notes.append(f"{flag} {value} depends on the server's host, and was not checked")
    if args.disaggregation_mode in (None, "null"):
        args.disaggregation_mode = role
        if config.enabled and line.launcher:  # flags alone may be incomplete
            refused.append(f"[MIXKV-START-03] {role}: {refusals.SINGLE_SERVER}")
        else:
            notes.append(f"taken as --disaggregation-mode {role}, which is not given")
    args.device = args.device or "cuda"
    made, gpu, stock = resolved(lambda: ServerArgs.from_cli_args(args), gpus)
    return server_of(made, gpu, [*stock, *ends], config, role=role, refused=refused, notes=notes)


def resolved(make: Callable[[], Any], gpus: list[str]) -> tuple[Any, str, list[str]]:
    """Resolve and check new arguments for the first GPU on which SGLang starts them. Return them,
    the GPU, and why SGLang does not start them."""
    for one in (*gpus, gpus[0]):  # if none works, report the errors of the first
        made = make()
        gpu = one if made.device == "cuda" else ""
        setattr(made, ATTRIBUTE, Config())  # `refused` has what the plugin's hook would raise
        with as_on(gpu) if gpu else nullcontext():
            stock = [*_not_started(made)]
        if not (stock and gpu):
            break
    return made, gpu, stock


def server_of(
    made: Any, gpu: str, stock: list[str], config: Config, *, role: str = "",
    refused: Sequence[str] = (), notes: Sequence[str] = (),
) -> Server:  # fmt: skip
    """Describe resolved arguments, for `role` or theirs. Raises MixKVError for an unread model."""
    from sglang.srt.arg_groups.overrides import resolving_view

    view, notes, refused = resolving_view(made), [*notes], [*refused]
    if view.device.partition(":")[0] not in refusals.DEVICES:  # SGLang would probe this host
        stock, notes = [], [*notes, f"SGLang's checks for {view.device} were not run"]
    values: dict[str, Any] = {name: getattr(view, name, None) for name in FLAGS}
    if values["attn_dp_size"] is None:  # SGLang up to 0.5.21 has no such flag
        values["attn_dp_size"] = view.dp_size if view.enable_dp_attention else 1
        values["dp_size"] //= values["attn_dp_size"]
    parts = values["attn_dp_size"] * view.attn_cp_size
    target = model_of(made, view, is_draft=False)
    draft = model_of(made, view, is_draft=True) if refusals.has_drafter(view) else None
    attention_tp = view.tp_size // parts if parts and not view.tp_size % parts else 0
    # SGLang finds an MTP or DSPARK drafter in the target; otherwise it loads the target as drafter.
    if draft and made.speculative_draft_model_path in (None, made.model_path):
        is_same = draft.facts.architecture == target.facts.architecture
        is_none = is_same and view.speculative_draft_model_path is None
        if is_none or draft.facts.algorithm in ("EAGLE3", "STANDALONE"):
            text = "needs --speculative-draft-model-path: the target has no such drafter"
            stock.append(f"{draft.facts.algorithm} {text}")
    store = None
    if view.hicache_storage_backend == refusals.STORED:
        store = str(view.hicache_storage_backend_extra_config or "")
    if draft and draft.kv_heads and store is not None:
        text = f"only servers of attention TP {attention_tp} find its draft KV in Mooncake's store"
        notes.append(f"with the plugin, {text}")
    given, tokens = made.speculative_num_draft_tokens, view.speculative_num_draft_tokens
    if not stock and given not in (None, tokens):
        notes.append(f"SGLang takes --speculative-num-draft-tokens {tokens} instead of {given}")
    mode = view.disaggregation_mode
    role = role or mode
    refused += (
        f"[MIXKV-START-03] {role}: {why}"
        for why in refusals.broken(rules(), view, os.environ, made)
    )
    stage = stage_of(target, view)
    return Server(
        **values, role=role, mode=mode, enabled=config.enabled, config=config, gpu=gpu,
        sglang=sglang_version(), attention_tp=attention_tp, target=target, stage=stage, draft=draft,
        stock=tuple(f"{role}: {why}" for why in stock or _ends(view, stage)),
        resolved=not stock, refused=tuple(refused), notes=tuple(f"{role}: {n}" for n in notes),
        tcp=forces_tcp() or os.environ.get("MOONCAKE_PROTOCOL") == "tcp",
        store=store,
    )  # fmt: skip


def _ends(view: Any, stage: Target) -> Iterator[str]:
    """Yield each reason for SGLang to exit while it makes its queues (prefill.py, decode.py)."""
    from sglang.srt.environ import envs

    is_prefill, why = view.disaggregation_mode == "prefill", ""
    chunk, page = view.chunked_prefill_size or 8192, view.page_size or 1
    if stage.is_mla:
        why = "is for targets with KV heads: unset it"
    elif is_prefill and (chunk <= 0 or chunk % page):
        why = f"needs --chunked-prefill-size to be a positive multiple of the page, {page}"
        why += f"; got {chunk}"
    elif is_prefill and view.pp_size > 1 and view.disaggregation_transfer_backend != "mooncake":
        why = "with --pp-size above 1 needs Mooncake"
    if why and envs.SGLANG_DISAGG_STAGING_BUFFER.get():
        yield f"SGLang exits at startup, since SGLANG_DISAGG_STAGING_BUFFER=1 {why}"


def _check_models(args: argparse.Namespace) -> None:
    """Raise MixKVError if a model is not here: SGLang would query the Hub repeatedly."""
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


def _not_started(made: Any) -> Iterator[str]:
    """Yield each error's text, or its source line. Steps after one that raises run, too."""
    from sglang.srt.arg_groups import pipeline

    raised, run = list[Exception](), pipeline.run_hook

    def go_on(step: Any, *args: Any) -> None:
        try:
            step(*args)
        except Exception as error:
            raised.append(error)

    with patch.object(pipeline, "run_hook", lambda step, args: go_on(run, step, args)):
        go_on(made.resolve_once)
        go_on(made.check_server_args)
    said = (ValueError, RuntimeError, AssertionError)  # others may follow from an earlier one
    raised[1:] = [error for error in raised[1:] if isinstance(error, said) and str(error)]
    yield from dict.fromkeys(
        f"SGLang {sglang_version()} does not start it: {_words(error, made)}" for error in raised
    )


def _words(error: Exception, made: Any) -> str:
    """Return an error's text. SGLang has none for missing speculative flags, so add them."""
    text = str(error) or str(traceback.extract_tb(error.__traceback__)[-1].line)
    all_three = "num_steps", "eagle_topk", "num_draft_tokens"
    missing = [name for name in all_three if getattr(made, f"speculative_{name}", None) is None]
    is_bare = isinstance(error, TypeError) or not str(error)
    if is_bare and made.speculative_algorithm and 0 < len(missing) < len(all_three):
        flags = [f"--speculative-{name.replace('_', '-')}" for name in missing]
        text += f" ({' and '.join(flags)} missing: give all three, or none)"
    return " ".join(text.split())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise unreadable(re.sub(r"=.* could match", " could match", message))  # no value is shown


def parse(line: Line) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return the parsed flags, the plugin's flags that Dynamo refuses, and why Dynamo does not
    start the server. Raises MixKVError with all flags that SGLang does not know."""
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser, words = _parser(), line.flags
    merger = ConfigArgumentMerger(parser)
    if any(word.startswith("--config=") for word in words):
        raise unreadable("SGLang takes --config FILE only, and ignores --config=FILE")
    try:
        if line.config and not line.flags:
            words = [*_flags(line.config)]
        elif settings := line.config or (_section(words) if line.is_dynamos else {}):
            rest = _without(words, "--config|--disagg-config(-key)?")
            words = [*merger._convert_config_to_args(settings), *rest]
        elif "--config" in words:
            words = list(merger.merge_config_with_args(words))
    except Exception as error:  # from SGLang or the YAML parser
        raise unreadable(f"--config: {error}") from None
    given = {word.partition("=")[0] for word in words} if line.is_dynamos else set()
    refused = [f"Dynamo's parser rejects {one.flag}: set {one.environ} instead"
               for one in SETTINGS if one.flag in given]  # fmt: skip
    args, unknown = parser.parse_known_args(_after_dynamo(words) if line.is_dynamos else words)
    if not unknown:
        return args, refused, []
    # A word may be a key: only flags are printed.
    names = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    text = "a word that follows no flag"
    if names:
        text = " ".join(names) + nearest(names[0], parser._option_string_actions)
    if not line.is_dynamos:
        raise unreadable(f"SGLang does not know {text}")
    return args, refused, [f"neither Dynamo nor SGLang {sglang_version()} knows {text}"]


def _flags(settings: Mapping[Any, Any]) -> Iterator[str]:
    """Write a mapping as flags. A value of true is a flag without a value, and false no flag."""
    for key, value in settings.items():
        if value is not False:
            yield f"--{key}"
            values = value if isinstance(value, list) else [value] * (value is not True)
            yield from (json.dumps(v) if isinstance(v, dict) else str(v) for v in values)


def _section(words: list[str]) -> Mapping[Any, Any]:
    """Return the section of --disagg-config's file that --disagg-config-key names."""
    import yaml

    path, key = value_of(words, "--disagg-config"), value_of(words, "--disagg-config-key")
    return dict(yaml.safe_load(Path(path).read_text())[key]) if path and key else {}


def _without(words: list[str], names: str | re.Pattern[str]) -> list[str]:
    """Return the words without the flags that match `names`, and without a value after each."""
    kept, is_value = list[str](), False
    for word in words:
        name, equals, _ = word.partition("=")
        is_dropped = re.fullmatch(names, name) is not None
        if not is_dropped and (word.startswith("--") or not is_value):
            kept.append(word)
        is_value = is_dropped and not equals
    return kept


_DYNAMOS = re.compile(
    r"--(?:no-)?(?:(?:dyn-|router|nats|tcp-tls|disagg-config|multimodal-embedding|media-output|engine"
    r"-r|embedding|endpoint|rerank|image-diffusion|video-generation|enable-(?:multimodal|rl|session-p)"
    r"|active-(?:decode|prefill)|kv-overlap|track-|shared-cache|assume-kv|load-aware|use-remote)\S*"
    r"|use-sglang-tokenizer|gateway-workers|namespace|connector|(?:discovery|store)-backend"
    r"|(?:request|response|event)-plane|custom-jinja-template|dump-config-to|dedicated-mm-encoder"
    r"|fpm-trace|frontend-decoding|health-check-payload|output-modalities|kv-(?:state-endpoint"
    r"|events)|sglang-trace-level|exclude-tools-\S*|disable-piecewise-cuda-graph)"
)
"""The flags of dynamo.sglang 1.6 and 1.7, which are used if Dynamo is not installed."""


def _after_dynamo(words: list[str]) -> list[str]:
    """Return the words that Dynamo's parser, if installed, leaves to SGLang's parser."""
    try:
        from dynamo.common.configuration.groups import router_args, runtime_args
        from dynamo.sglang.backend_args import DynamoSGLangArgGroup
    except ImportError:
        return _without(words, _DYNAMOS)
    parser = _Parser(add_help=False)
    for group in (runtime_args.DynamoRuntimeArgGroup, DynamoSGLangArgGroup):
        group().add_arguments(parser)
    rest: list[str] = router_args.parse_worker_router_config(parser.parse_known_args(words)[1])[1]
    return [word for word in rest if word != "--disable-piecewise-cuda-graph"]


@cache
def _parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(add_help=False)
    ServerArgs.add_cli_args(parser)
    add_flags(parser)
    for action in parser._actions:
        action.required = False  # a missing flag would hide a mistyped one
    return parser


@contextmanager
def alone(environ: Mapping[str, str]) -> Iterator[None]:
    """Give SGLang and Mooncake the line's variables, not this shell's, and no logs or downloads."""
    level = logging.root.manager.disable
    line_only = "SGLANG_", "SGL_", "MC_", "MOONCAKE_"
    own = {re.sub("^SGL_", "SGLANG_", name): value for name, value in environ.items()}  # as SGLang
    of_shell = {name: v for name, v in os.environ.items() if not name.startswith(line_only)}
    whole = {**of_shell, **own, "HF_HUB_OFFLINE": "1"}
    with patch.dict(os.environ, whole, clear=True), warnings.catch_warnings(action="ignore"):
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)


@contextmanager
def as_on(gpu: str) -> Iterator[None]:
    """Answer SGLang's queries as this GPU would: they decide attention backends and KV types."""
    import torch
    from sglang.srt.runtime_context import _PLATFORM_PROBES, override_platform
    from sglang.srt.utils import common

    capability, is_hopper = GPUS[gpu], gpu == "hopper"
    facts = dict.fromkeys(("is_sm90", "is_hopper_with_cuda_12_3"), is_hopper)
    facts |= dict.fromkeys(("is_sm100", "is_sm100_or_sm110", "is_blackwell"), not is_hopper)
    sm = 10 * capability[0] + capability[1]
    # Some of SGLang's hooks call the probes directly.
    probes = {_PLATFORM_PROBES[fact]: Mock(return_value=value) for fact, value in facts.items()}
    with (
        patch.object(torch.cuda, "get_device_capability", lambda device=None: capability),
        override_platform(is_cuda=True, device_capability=capability, device_sm=sm, **facts),
        patch.multiple(common, **probes),
    ):
        yield
