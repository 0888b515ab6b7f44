"""One server as its launch line, or its /server_info, describes it. SGLang is not imported.

Names and defaults are those of SGLang 0.5.23's ServerArgs, so that `startup.refusals` reads
this record as it reads the real one. What SGLang resolves later (page size, top-k) stays None.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from sglang_mixkv.config import ENABLE_ENV, add_flags, truth
from sglang_mixkv.errors import MixKVError, refuse

# field, type, default, option strings
_VALUES: tuple[tuple[str, type, Any, tuple[str, ...]], ...] = (
    ("model_path", str, None, ("--model-path", "--model")),
    ("tp_size", int, 1, ("--tp-size", "--tensor-parallel-size", "--tp")),
    ("dp_size", int, 1, ("--dp-size", "--data-parallel-size", "--dp")),
    ("attn_dp_size", int, 1, ("--attn-dp-size", "--attention-data-parallel-size")),
    ("pp_size", int, 1, ("--pp-size", "--pipeline-parallel-size")),
    ("attn_cp_size", int, 1, ("--attn-cp-size", "--attention-context-parallel-size")),
    ("cp_strategy", str, None, ("--cp-strategy",)),
    ("dcp_size", int, 1, ("--dcp-size", "--decode-context-parallel-size")),
    ("page_size", int, None, ("--page-size",)),
    ("dtype", str, "auto", ("--dtype",)),
    ("kv_cache_dtype", str, "auto", ("--kv-cache-dtype",)),
    ("device", str, None, ("--device",)),
    ("attention_backend", str, None, ("--attention-backend",)),
    ("decode_attention_backend", str, None, ("--decode-attention-backend",)),
    ("prefill_attention_backend", str, None, ("--prefill-attention-backend",)),
    ("speculative_draft_attention_backend", str, None, ("--speculative-draft-attention-backend",)),
    ("radix_cache_backend", str, None, ("--radix-cache-backend",)),
    ("hicache_storage_backend", str, None, ("--hicache-storage-backend",)),
    ("kv_canary", str, "none", ("--kv-canary",)),
    ("speculative_algorithm", str, None, ("--speculative-algorithm",)),
    (
        "speculative_draft_model_path",
        str,
        None,
        ("--speculative-draft-model-path", "--speculative-draft-model"),
    ),
    ("speculative_num_steps", int, None, ("--speculative-num-steps",)),
    ("speculative_eagle_topk", int, None, ("--speculative-eagle-topk",)),
    ("speculative_num_draft_tokens", int, None, ("--speculative-num-draft-tokens",)),
    ("speculative_dflash_block_size", int, None, ("--speculative-dflash-block-size",)),
    ("speculative_dspark_block_size", int, None, ("--speculative-dspark-block-size",)),
    ("speculative_draft_window_size", int, None, ("--speculative-draft-window-size",)),
    ("speculative_draft_kv_cache_dtype", str, None, ("--speculative-draft-kv-cache-dtype",)),
    ("decoupled_spec_role", str, "null", ("--decoupled-spec-role",)),
    ("disaggregation_mode", str, None, ("--disaggregation-mode",)),
    ("disaggregation_transfer_backend", str, "mooncake", ("--disaggregation-transfer-backend",)),
    (
        "disaggregation_decode_allocation_policy",
        str,
        "early",
        ("--disaggregation-decode-allocation-policy",),
    ),
    (
        "disaggregation_decode_host_receive_threshold",
        float,
        1.0,
        ("--disaggregation-decode-host-receive-threshold",),
    ),
    ("config", str, None, ("--config",)),
)

_SWITCHES = (
    "enable_dp_attention",
    "enable_dp_lm_head",
    "enable_prefill_cp",
    "use_ray",
    "enable_pd_role_switch",
    "enable_hisparse",
    "enable_unified_memory",
    "enable_kv_cache_sharding",
    "enable_multi_layer_eagle",
    "enable_hierarchical_cache",
    "enable_lmcache",
    "enable_flexkv",
    "enable_unified_cache_external_linker",
    "disaggregation_decode_enable_radix_cache",
    "disaggregation_enable_kv_checksum",
)

# overrides.py, _mla_backend_page_constraints: with this attention backend, asked for by one of the
# first so many flags, pages have one of these sizes, or else 64 tokens. tokenspeed_mla is 0.5.22's.
BACKEND_FLAGS = (
    "attention_backend",
    "decode_attention_backend",
    "prefill_attention_backend",
    "speculative_draft_attention_backend",
)
_PAGE_SIZES: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    ("flashmla", 2, (64,)),
    ("trtllm_mla", 2, (32, 64)),
    ("tokenspeed_mla", 2, (32, 64)),
    ("cutedsl_mla", 3, (32, 64)),
    ("trtllm_mha", 4, (16, 32, 64, 128)),
    ("hpc_ops", 3, (64,)),
)

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise MixKVError("MIXKV-START-04", f"launch line: {message}.")


def _parser() -> argparse.ArgumentParser:
    """SGLang's flags as far as they decide the plan; like SGLang's it takes abbreviations."""
    parser = _Parser(add_help=False)
    for name, kind, default, options in _VALUES:
        parser.add_argument(*options, dest=name, type=kind, default=default)
    for name in _SWITCHES:
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    add_flags(parser)
    return parser


@contextmanager
def about(role: str) -> Iterator[None]:
    """Errors say which of the two servers they are about."""
    try:
        yield
    except MixKVError as error:
        raise error.about(role) from None
    except ValueError as error:  # an environment variable that config.py cannot read
        raise ValueError(f"{role}: {error}") from None


@dataclass(frozen=True)
class Server:
    """`role`: prefill or decode. `enabled`: opted in; None where that cannot be seen."""

    role: str
    args: argparse.Namespace
    enabled: bool | None
    environ: Mapping[str, str] = field(default_factory=dict)

    def with_args(self, **changed: Any) -> Server:
        """The same server with other flags."""
        return replace(self, args=argparse.Namespace(**{**vars(self.args), **changed}))

    @property
    def attention_tp(self) -> int:
        """Ranks that share one request's heads. Raises MixKVError for an uneven split."""
        groups = self.dp_groups * self.args.attn_cp_size
        if self.args.tp_size < 1 or groups < 1 or self.args.tp_size % groups:
            raise refuse(
                "MIXKV-PAIR-04",
                f"a {self.role} TP size that the DP-attention and CP sizes divide",
                f"TP {self.args.tp_size} over {groups}",
                "SGLang would not start it",
                "Change --tp-size or --attn-dp-size",
            )
        return int(self.args.tp_size // groups)

    @property
    def dp_groups(self) -> int:
        """DP-attention groups inside the TP group; plain data parallelism makes replicas.

        Two spellings, as SGLang resolves them (parallel_hook.py, handle_deprecated_dp_attention);
        a running server answers with the resolved one and the flag.
        """
        return int(self.args.dp_size if self._old_spelling else self.args.attn_dp_size)

    @property
    def replicas(self) -> int:
        """Copies of the model by plain data parallelism."""
        return 1 if self._old_spelling else int(self.args.dp_size)

    @property
    def _old_spelling(self) -> bool:
        return bool(self.args.enable_dp_attention) and self.args.attn_dp_size == 1

    @property
    def page_size(self) -> int | None:
        """Tokens a page; None where SGLang decides from hardware and attention backend."""
        size: int | None = self.args.page_size
        backends = [getattr(self.args, flag) for flag in BACKEND_FLAGS]
        for backend, flags, sizes in _PAGE_SIZES:
            if backend in backends[:flags] and size not in sizes:
                size = 64
        return size

    @property
    def algorithm(self) -> str:
        """As SGLang resolves it: NEXTN is another word for EAGLE."""
        asked = (self.args.speculative_algorithm or "NONE").upper()
        return "EAGLE" if asked == "NEXTN" else asked

    @property
    def has_drafter(self) -> bool:
        return self.algorithm not in ("NONE", "NGRAM")


def _words(line: str) -> tuple[dict[str, str], list[str]]:
    """Environment assignments in front of the command, and the rest of its words."""
    words = shlex.split(line.replace("\\\n", " "))
    environ: dict[str, str] = {}
    while words and (words[0] == "env" or _ASSIGNMENT.match(words[0])):
        name, _, value = words.pop(0).partition("=")
        environ[name] = value
    return environ, words


def _config_words(path: str) -> list[str]:
    """A --config file as flags, which the launch line then overrides, as in SGLang."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        text = "--config: reading it needs PyYAML, which is not installed."
        raise MixKVError("MIXKV-START-04", text) from None
    try:
        values = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise MixKVError("MIXKV-START-04", f"--config: {error}.") from None
    words: list[str] = []
    for name, value in values.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False and value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def from_line(role: str, line: str, running: Mapping[str, Any] | None = None) -> Server:
    """A server from its launch line, or its flags alone. Raises MixKVError.

    `running`: what a running server says at GET /server_info; the line's flags win over it.
    """
    with about(role):
        return _from_line(role, line, running)


def _from_line(role: str, line: str, running: Mapping[str, Any] | None) -> Server:
    try:
        environ, words = _words(line)
    except ValueError as error:
        raise MixKVError("MIXKV-START-04", f"launch line: {error}.") from None
    parser = _parser()
    said = running or {}
    parser.set_defaults(**{name: said[name] for name in _known() if name in said})
    args, _ = parser.parse_known_args(words)
    if args.config:
        args, _ = parser.parse_known_args([*_config_words(args.config), *words])
    args.disaggregation_mode = args.disaggregation_mode or role
    # pd_disaggregation_hook.py, handle_pd_disaggregation: Mooncake over TCP.
    if args.disaggregation_transfer_backend == "mooncake_tcp":
        args.disaggregation_transfer_backend = "mooncake"
    enabled = bool(args.enable_mixkv) or truth(ENABLE_ENV, environ)
    if running is not None and not enabled:
        launched = (running.get("launch_command") or "").split()
        return Server(role, args, True if "--enable-mixkv" in launched else None, environ)
    return Server(role, args, enabled, environ)


def _known() -> Iterable[str]:
    return (*(name for name, *_ in _VALUES), *_SWITCHES)
