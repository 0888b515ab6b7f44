"""The releases of SGLang that are served, and the check that the installed one is as expected.

A release is an entry of RELEASES: its seams (seams.py), and what other releases serve and this one
does not. `preflight` runs before an opted-in server starts.
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
from sglang_mixkv.engine.seams import RESTATED, SEAMS, Seam
from sglang_mixkv.refusals import ARGUMENT_RULES, BACKENDS, Rule, has_dcp, with_drafter


@dataclass(frozen=True)
class Release:
    """One release of SGLang. `unserved`: by transfer backend or feature, the rule that refuses what
    other releases serve and this one does not."""

    version: str
    unserved: Mapping[str, Rule] = field(default_factory=dict)


NOT_ON_0_5_22: dict[str, Rule] = {
    "NIXL": (
        "--disaggregation-transfer-backend nixl with SGLang 0.5.22",
        lambda a: a.disaggregation_transfer_backend == "nixl",
        "it was not tried there; use mooncake, or SGLang 0.5.23 on both sides",
    ),
    "DFLASH, DSPARK": (
        "--speculative-algorithm DFLASH or DSPARK with SGLang 0.5.22",
        lambda a: (a.speculative_algorithm or "").upper() in ("DFLASH", "DSPARK"),
        "they were not tried there; use SGLang 0.5.23 on both sides",
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
        "it was not tried there; use SGLang 0.5.23 on both sides",
    ),
}

RELEASES = (Release("0.5.22", NOT_ON_0_5_22), Release("0.5.23"))
"""The newest last."""

SUPPORTED_SGLANG = tuple(release.version for release in RELEASES)


def here() -> Release:
    """The installed release; an untested one is taken for the newest that is known."""
    version = sglang_version()
    return next((known for known in RELEASES if known.version == version), RELEASES[-1])


def modules() -> tuple[str, ...]:
    """SGLang's modules to read when a release is added: those of all seams, and RESTATED."""
    return tuple(sorted({*RESTATED, *(seam.module for seam in SEAMS)}))


def serves(backend: str) -> bool:
    """Whether this transfer backend of SGLang's is served with the installed release."""
    return backend in BACKENDS and backend.upper() not in here().unserved


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


def seam_problem(seam: Seam) -> str | None:
    """What is wrong with one seam, None when it is as expected."""
    try:
        found = inspect.signature(_resolve(seam.path)).parameters
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"{seam.path}: expected it with parameters {seam.parameters}; found none ({error})"
    if missing := [name for name in seam.parameters if name not in found]:
        return f"{seam.path}: expected parameters {missing}; found {tuple(found)}"
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
    for seam in SEAMS:
        problem = seam_problem(seam)
        if problem and not (replaced_is_fine and _is_replaced(seam.path)):
            yield problem


def preflight(config: Config, *, replaced_is_fine: bool = False) -> None:
    """Stop the process unless every seam is as expected. SystemExit, since SGLang swallows less."""
    found = list(problems(config, replaced_is_fine=replaced_is_fine))
    if found:
        stop(
            "MIXKV-START-01",
            "the installed SGLang does not fit this version of the plugin",
            found,
            "Install the SGLang and sglang-mixkv releases of one row of docs/compatibility.md, "
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
