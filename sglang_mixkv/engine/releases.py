"""The supported releases of SGLang, and the check that the installed one is as expected.

A release that is not in the table is refused, unless SGLANG_MIXKV_ALLOW_UNTESTED_SGLANG is set;
then it is treated like the newest. In each process that uses the plugin's classes, `check` verifies
the release, SGLang's functions, and the resolved arguments. In SGLang's launcher (`plugin.py`) it
skips the functions, whose check imports prometheus_client before PROMETHEUS_MULTIPROC_DIR is set.
"""

from __future__ import annotations

import dis
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import metadata
from types import CodeType
from typing import Any

from sglang_mixkv import __version__
from sglang_mixkv.config import ALLOW_UNTESTED_ENV, config_of
from sglang_mixkv.engine.seams import ATTRIBUTES, HOOKS, LATER, SEAMS
from sglang_mixkv.refusals import ARGUMENT_RULES, Rule, broken, has_drafter

logger = logging.getLogger(f"sglang.{__name__}")


def _host_receive(off: float) -> Rule:
    return Rule(
        f"--disaggregation-decode-host-receive-threshold other than {off}",
        lambda a: getattr(a, "disaggregation_decode_host_receive_threshold", off) != off,
        f"leave it at {off}",
    )


RADIX_CACHE = Rule(
    "--disaggregation-decode-enable-radix-cache and a drafter with SGLang before 0.5.23",
    lambda a: getattr(a, "disaggregation_decode_enable_radix_cache", False) and has_drafter(a),
    "SGLang itself supports it there only with DSPARK; use SGLang 0.5.23, or drop the flag",
)
DCP = Rule(
    "--dcp-size above 1 and a drafter with SGLang before 0.5.23",
    lambda a: (getattr(a, "dcp_size", 1) or 1) > 1 and has_drafter(a),
    "it has not been shown to be correct there; use SGLang 0.5.23 on both sides",
)

UNSERVED: dict[str, tuple[Rule, ...]] = {
    "0.5.21": (_host_receive(0), RADIX_CACHE, DCP),
    "0.5.22": (_host_receive(1), RADIX_CACHE, DCP),
    "0.5.23": (_host_receive(1),),
}
"""Maps each release, the newest last, to its rules in addition to ARGUMENT_RULES."""

SUPPORTED_SGLANG = tuple(UNSERVED)


@cache
def version_of(package: str) -> str:
    """Return a package's installed version, or `none`. Cached: reading it takes a millisecond."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def sglang_version() -> str:
    return version_of("sglang")


def rules() -> tuple[Rule, ...]:
    return ARGUMENT_RULES + UNSERVED.get(sglang_version(), UNSERVED[SUPPORTED_SGLANG[-1]])


def _found(path: str, names: Iterable[str]) -> Iterable[str]:
    """Return the parameters of a function, or the attributes among `names` that a class has."""
    found = pkgutil.resolve_name(path)
    if inspect.isclass(found):
        return [name for name in names if has_attribute(found, name)]
    return inspect.signature(found).parameters


def lacking(
    version: str, find: Callable[[str, Iterable[str]], Iterable[str]] = _found
) -> list[str]:
    """List the entries of seams.py that SGLang should have in this release but lacks. `find`:
    returns the names that a function or class has; raises if there is no such function or class."""
    lines = []
    for path, names in (SEAMS | ATTRIBUTES).items():
        what = "parameters" if path in SEAMS else "attributes"
        due = [name for name in names if name not in LATER.get(version, ())]
        try:
            has = tuple(find(path, due))
        except (LookupError, ImportError, AttributeError, TypeError, ValueError) as error:
            lines.append(f"{path}: expected it with {what} {due}; found none ({error})")
            continue
        if missing := [name for name in due if name not in has]:
            lines.append(f"{path}: expected {what} {missing}; found {has}")
    return lines


def has_attribute(owner: type, name: str) -> bool:
    """Return whether a class or a base declares the attribute, or assigns it in a method."""
    if any(name in {*vars(one), *inspect.get_annotations(one)} for one in owner.__mro__):
        return True
    methods = (value for one in owner.__mro__ for value in vars(one).values())
    codes = (method.__code__ for method in methods if inspect.isfunction(method))
    return any(name in _assigned(code) for code in codes if name in code.co_names)


def _assigned(code: CodeType) -> Iterator[str]:
    """Yield the names of the attributes that the code assigns; dis would take ten times as long."""
    extended = 0
    for step, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = extended << 8 | low
        if step == dis.opmap["STORE_ATTR"]:
            yield code.co_names[argument]
        extended = argument if step == dis.EXTENDED_ARG else 0


def problems(*, functions: bool = True) -> list[str]:
    """List the differences of the installed SGLang: its version, functions and attributes."""
    version, found = sglang_version(), []
    if version not in UNSERVED:
        found.append(f"SGLang version: expected one of {SUPPORTED_SGLANG}, found {version}")
    if functions:
        found += lacking(version)
    return found


def stop(code: str, headline: str, details: list[str], remedy: str) -> None:
    """End the process with one message, by SystemExit (1), since SGLang swallows the others."""
    lines = "\n".join(f"  - {detail}" for detail in details)
    raise SystemExit(
        f"[{code}] sglang-mixkv (pid {os.getpid()}): --enable-mixkv is set, but {headline}; the "
        "server does not start, since it would silently corrupt the drafter's KV.\n"
        f"{lines}\n{remedy}."
    )


def stop_if(unsupported: list[str]) -> None:
    if unsupported:
        headline, remedy = "this combination is not supported", "Change it, or drop --enable-mixkv"
        stop("MIXKV-START-03", headline, unsupported, remedy)


def check(server_args: Any, *, functions: bool = True) -> None:
    """Stop the process unless SGLang is as expected and has applied the hooks, and the plugin
    supports these arguments."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.plugins.hook_registry import HookRegistry

    found, version = problems(functions=functions), sglang_version()
    tested = version in UNSERVED
    if found and (tested or not config_of(server_args).allow_untested_sglang):
        at_own_risk = f", set {ALLOW_UNTESTED_ENV}=1 to try this one at your own risk,"
        headline = f"the installed SGLang {version} does not fit this version of the plugin"
        remedy = "Install the SGLang and sglang-mixkv releases of one row of docs/compatibility.md"
        remedy += f"{'' if tested else at_own_risk} or start without --enable-mixkv"
        stop("MIXKV-START-01", headline, found, remedy)
    for problem in found:
        logger.warning(
            "[MIXKV-START-01] sglang-mixkv %s treats this SGLang as %s (%s=1 is set): %s. "
            "Compare its accept length with a single server's (python -m sglang_mixkv accept) "
            "before it serves", __version__, SUPPORTED_SGLANG[-1], ALLOW_UNTESTED_ENV, problem,
        )  # fmt: skip
    if dead := [target for target in HOOKS if target not in HookRegistry._patched]:
        remedy = "Look above for SGLang's reason, or for a plugin that hooks the same functions"
        stop("MIXKV-START-02", "SGLang did not apply these hooks", dead, remedy)
    stop_if(broken(rules(), resolved_view(server_args), os.environ, server_args))


_checked: Any = None  # the ServerArgs that this process was last checked for


def check_once(server_args: Any) -> None:
    global _checked
    if server_args is not _checked:
        check(server_args)
        _checked = server_args
