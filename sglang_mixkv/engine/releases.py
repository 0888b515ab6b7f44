"""The releases of SGLang that are served, and the check that the installed one is as expected.

A release is an entry of RELEASES: its seams (seams.py), and what other releases serve and this one
does not. `preflight` runs before an opted-in server starts. Any other release is refused, unless
SGLANG_MIXKV_ALLOW_UNTESTED_SGLANG is set; then it is taken for the newest of RELEASES.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sglang_mixkv import __version__
from sglang_mixkv.config import ALLOW_UNTESTED_ENV, Config
from sglang_mixkv.engine.seams import SEAMS, Seam
from sglang_mixkv.refusals import ARGUMENT_RULES, Rule, has_drafter, with_drafter

logger = logging.getLogger(f"sglang.{__name__}")

RADIX_CACHE: Rule = (
    "--disaggregation-decode-enable-radix-cache and a drafter other than DSPARK",
    lambda a: (
        with_drafter("disaggregation_decode_enable_radix_cache")(a)
        and a.speculative_algorithm.upper() != "DSPARK"
    ),
    "SGLang itself refuses it before 0.5.23; drop the flag",
)
# Up to 0.5.21 a prefix that the host cannot bring back ends a request whose room is still open
# (DecodeTransferQueue.pop_transferred releases the pages without failure_exception).
HOST_CACHE_ON_DECODE: Rule = (
    "--enable-hierarchical-cache on decode and a drafter with SGLang 0.5.21",
    lambda a: (
        with_drafter("enable_hierarchical_cache")(a)
        and bool(getattr(a, "disaggregation_decode_enable_radix_cache", False))
    ),
    "a request that fails there gives its pages back while draft KV may still come; drop the flag "
    "on decode, or use SGLang 0.5.22 or newer",
)
DCP: Rule = (
    "--dcp-size above 1 and a drafter with SGLang before 0.5.23",
    lambda a: (getattr(a, "dcp_size", 1) or 1) > 1 and has_drafter(a),
    "it was not shown to be right there; use SGLang 0.5.23 on both sides",
)


@dataclass(frozen=True)
class Release:
    """One release of SGLang. `unserved`: by feature, the rule that refuses what other
    releases serve and this one does not. `no_host_receive`: the value of
    --disaggregation-decode-host-receive-threshold that switches it off."""

    version: str
    unserved: Mapping[str, Rule] = field(default_factory=dict)
    no_host_receive: float = 1

    @property
    def rules(self) -> tuple[Rule, ...]:
        """What is refused with it."""
        off = self.no_host_receive
        host_receive: Rule = (
            f"--disaggregation-decode-host-receive-threshold other than {off}",
            lambda a: getattr(a, "disaggregation_decode_host_receive_threshold", off) != off,
            f"leave it at {off}",
        )
        return (*ARGUMENT_RULES, host_receive, *self.unserved.values())


_BEFORE_0_5_23 = {
    "Decode's radix cache with a drafter": RADIX_CACHE,
    "`--dcp-size` above 1 with a drafter": DCP,
}
RELEASES = (
    Release(
        "0.5.21",
        {
            **_BEFORE_0_5_23,
            "Hierarchical cache on decode with a drafter": HOST_CACHE_ON_DECODE,
        },
        no_host_receive=0,
    ),
    Release("0.5.22", _BEFORE_0_5_23),
    Release("0.5.23"),
)
"""The newest last."""

SUPPORTED_SGLANG = tuple(release.version for release in RELEASES)


def here() -> Release:
    """The installed release; an untested one is taken for the newest that is known."""
    version = sglang_version()
    return next((known for known in RELEASES if known.version == version), RELEASES[-1])


def rules() -> tuple[Rule, ...]:
    """What is refused with the installed release."""
    return here().rules


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


def problems(*, replaced_is_fine: bool = False) -> Iterator[str]:
    """Why the installed SGLang may not carry the plugin: its version, and each function that is not
    as expected. `replaced_is_fine`: a function that a test or tool has put in the place of SGLang's
    is not compared."""
    if not _is_tested():
        yield f"SGLang version: expected one of {SUPPORTED_SGLANG}, found {sglang_version()}"
    for seam in SEAMS:
        problem = seam_problem(seam)
        if problem and not (replaced_is_fine and _is_replaced(seam.path)):
            yield problem


def _is_tested() -> bool:
    return sglang_version() in SUPPORTED_SGLANG


def preflight(config: Config, *, replaced_is_fine: bool = False, warns: bool = True) -> None:
    """Stop the process unless SGLang is as expected. SystemExit, since SGLang swallows less.

    An untested release goes on with warnings where the variable allows it. `warns`: not in a
    process whose launcher has warned.
    """
    found, tested = list(problems(replaced_is_fine=replaced_is_fine)), _is_tested()
    if found and (tested or not config.allow_untested_sglang):
        at_own_risk = f", set {ALLOW_UNTESTED_ENV}=1 to try this one at your own risk,"
        stop(
            "MIXKV-START-01",
            f"the installed SGLang {sglang_version()} does not fit this version of the plugin",
            found,
            "Install the SGLang and sglang-mixkv releases of one row of docs/compatibility.md"
            f"{'' if tested else at_own_risk} or start without --enable-mixkv",
        )
    if warns and not tested:
        _warn(found)


def _warn(found: list[str]) -> None:
    """Say what was and was not compared in an untested release, and each difference."""
    logger.warning(
        "[MIXKV-START-01] sglang-mixkv %s was not tested with SGLang %s, and takes it for %s, "
        "since %s=1 is set. It compared the parameters of %d functions of SGLang, and nothing of "
        "what they do. Compare its accept length with a single server's (python -m sglang_mixkv "
        "accept) before it serves",
        __version__,
        sglang_version(),
        SUPPORTED_SGLANG[-1],
        ALLOW_UNTESTED_ENV,
        len(SEAMS),
    )
    for problem in found:
        logger.warning("[MIXKV-START-01] started with: %s", problem)


def stop(code: str, headline: str, details: list[str], remedy: str) -> None:
    """End the process with one message. Raises SystemExit (exit status 1)."""
    lines = "\n".join(f"  - {detail}" for detail in details)
    raise SystemExit(
        f"[{code}] sglang-mixkv (pid {os.getpid()}): --enable-mixkv is set, but {headline}; the "
        "server does not start, since it would silently transfer the drafter's KV wrongly.\n"
        f"{lines}\n{remedy}."
    )
