"""Everything inside SGLang that the plugin touches, per release, and the check that it is so.

A release is an entry of RELEASES: its seams (seams.py), per transfer backend where its control
messages have what, the shims that it needs (shims.py), and what is not served there. `preflight`
runs before an opted-in server starts.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sglang_mixkv.config import ALLOW_UNTESTED_ENV, Config
from sglang_mixkv.engine.seams import RESTATED, SEAMS_0_5_22, SEAMS_0_5_23, Seams
from sglang_mixkv.protocol import frames
from sglang_mixkv.protocol.facts import BLOCK_ALGORITHMS
from sglang_mixkv.protocol.framing import Framing
from sglang_mixkv.protocol.messages import MetadataPositions
from sglang_mixkv.protocol.registration import Positions
from sglang_mixkv.refusals import ARGUMENT_RULES, Rule, has_dcp, with_drafter


@dataclass(frozen=True)
class Release:
    """One release of SGLang. `seams`: see seams.py; `framings`: by transfer backend that is served,
    where its control messages have what; `shims`: names of classes in shims.py; `unserved`: what
    other releases serve and this one does not, and the rule that refuses it."""

    version: str
    seams: Seams
    framings: Mapping[str, Framing]
    shims: tuple[str, ...] = ()
    unserved: Mapping[str, Rule] = field(default_factory=dict)


# nixl/conn.py KVArgsRegisterInfo.from_zmq, TransferInfo.from_zmq, GUARD, kv_status_msg_tag.
NIXL = Framing(
    Positions(
        count=24, endpoint=1, port=2, session=3, kv_ptrs=5, aux_ptrs=6, state_ptrs=7,
        device=8, attn_tp_size=9, attn_tp_rank=10, kv_item_len=11, state_item_lens=12,
        state_dims=13, staging_ptr=14, staging_size=15, slots=16, memory_kinds=17,
        kv_item_lens=18, state_layer_ids=19, kv_layer_ids=20, dcp_size=21, dcp_rank=22,
        state_lens=23, staging_layer_ids=None, agent_metadata=4, read_session=frames.agent,
    ),
    MetadataPositions(
        count=10, required=6, states=7, prefix=8, is_dummy=9, device_pages=None,
        read_session=frames.agent,
    ),
    guard=b"NixlMsgGuard",
    status_tag=b"KV_STATUS",
    has_aux_messages=False,
)  # fmt: skip

NOT_ON_0_5_22: dict[str, Rule] = {
    "NIXL": (
        "--disaggregation-transfer-backend nixl with SGLang 0.5.22",
        lambda a: a.disaggregation_transfer_backend == "nixl",
        "NIXL's own notifications say there what has arrived, and the plugin sends none; use "
        "mooncake, or SGLang 0.5.23 on both sides",
    ),
    "DFLASH, DSPARK": (
        "--speculative-algorithm DFLASH or DSPARK with SGLang 0.5.22",
        lambda a: (a.speculative_algorithm or "").upper() in BLOCK_ALGORITHMS,
        "how far their windows reach is known of SGLang 0.5.23 alone; use that on both sides",
    ),
    "Hierarchical cache with a drafter": (
        "--enable-hierarchical-cache and a drafter with SGLang 0.5.22",
        with_drafter("enable_hierarchical_cache"),
        "that draft KV comes back with a prefix was shown for SGLang 0.5.23 alone; drop the flag, "
        "or use that on both sides",
    ),
    "`--dcp-size` above 1 with a drafter": (
        "--dcp-size above 1 with a drafter with SGLang 0.5.22",
        has_dcp,
        "how it deals out tokens is known of SGLang 0.5.23 alone; use that on both sides",
    ),
    "Decode's radix cache with a drafter": (
        "--disaggregation-decode-enable-radix-cache and a drafter with SGLang 0.5.22",
        with_drafter("disaggregation_decode_enable_radix_cache"),
        "SGLang 0.5.22 itself refuses it; drop the flag, or use 0.5.23 on both sides",
    ),
    "SGLang's checksums": (
        "--disaggregation-enable-kv-checksum with SGLang 0.5.22",
        lambda a: bool(getattr(a, "disaggregation_enable_kv_checksum", False)),
        "it fails every request between servers of unequal layout, and was not tried with equal "
        "ones; use --mixkv-verify checksum on decode, or SGLang 0.5.23 on both sides",
    ),
}

RELEASES = (
    Release(
        "0.5.22",
        SEAMS_0_5_22,
        {"mooncake": Framing()},
        shims=("OneWayOut", "OwnAnswers"),
        unserved=NOT_ON_0_5_22,
    ),
    Release("0.5.23", SEAMS_0_5_23, {"mooncake": Framing(), "nixl": NIXL}),
)
"""The newest last."""

SUPPORTED_SGLANG = tuple(release.version for release in RELEASES)


def here() -> Release:
    """The installed release; an untested one is taken for the newest that is known."""
    version = sglang_version()
    return next((known for known in RELEASES if known.version == version), RELEASES[-1])


def modules() -> tuple[str, ...]:
    """SGLang's modules to read when a release is added: those of all seams, and RESTATED."""
    seams = (path.partition(":")[0] for release in RELEASES for path in release.seams)
    return tuple(sorted({*RESTATED, *seams}))


def rules() -> tuple[Rule, ...]:
    """What is refused with the installed release."""
    return (*ARGUMENT_RULES, *here().unserved.values())


@cache
def sglang_version() -> str:
    """Version of the installed SGLang, `none` without one. Read once: `get_kv_class` is called
    for every request, and the package's metadata take a millisecond."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sglang")
    except PackageNotFoundError:
        return "none"


def _resolve(path: str) -> Any:
    module, _, attributes = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in attributes.split("."):
        found = inspect.getattr_static(found, name)
    return getattr(found, "__func__", found)


def _parameters(function: Any) -> tuple[str, ...]:
    names = tuple(inspect.signature(function).parameters)
    return names[1:] if names[:1] == ("cls",) else names


def seam_problem(path: str, expected: tuple[str, ...]) -> str | None:
    """What is wrong with one seam, None when it is as expected."""
    try:
        found = _parameters(_resolve(path))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"{path}: expected it with parameters {expected}; found none ({error})"
    if found != expected:
        return f"{path}: expected parameters {expected}; found {found}"
    return None


def _is_replaced(path: str) -> bool:
    """Whether a function that is not SGLang's stands there in this process."""
    try:
        owner = getattr(_resolve(path), "__module__", None) or ""
    except (ImportError, AttributeError):
        return False
    return not owner.startswith("sglang.")


def problems(config: Config, *, replaced_is_fine: bool = False) -> Iterator[str]:
    """Why the installed engine cannot carry the plugin; nothing when it can.

    `replaced_is_fine`: a function that a test or tool has put in the place of SGLang's is not
    compared.
    """
    version = sglang_version()
    if version not in SUPPORTED_SGLANG and not config.allow_untested_sglang:
        yield (
            f"SGLang version: expected one of {SUPPORTED_SGLANG}, found {version}. Install a "
            f"supported SGLang, or set {ALLOW_UNTESTED_ENV}=1 to try this one at your own risk"
        )
    for path, expected in here().seams.items():
        problem = seam_problem(path, expected)
        if problem and not (replaced_is_fine and _is_replaced(path)):
            yield problem


def preflight(config: Config, *, replaced_is_fine: bool = False) -> None:
    """Stop the process unless every seam is as expected. SystemExit, since SGLang swallows less."""
    found = list(problems(config, replaced_is_fine=replaced_is_fine))
    if found:
        stop(
            "MIXKV-START-01",
            "the installed SGLang does not fit this version of the plugin",
            found,
            "Install the SGLang and sglang-mixkv releases of one row of docs/operate.md, "
            "or start without --enable-mixkv",
        )


def stop(code: str, headline: str, details: list[str], remedy: str) -> None:
    """End the process with one message. Raises SystemExit (exit status 1)."""
    lines = "\n".join(f"  - {detail}" for detail in details)
    raise SystemExit(
        f"[{code}] sglang-mixkv (pid {os.getpid()}): --enable-mixkv is set, but {headline}; the "
        "server does not start, since it would silently transfer the drafter's KV wrongly.\n"
        f"{lines}\n{remedy}."
    )
