"""What the doctor checks on one host; each check yields findings and never raises.

A finding with a `problem` makes the doctor's exit status 1; one without is information.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata

import msgspec

from sglang_mixkv import __version__, config, refusals
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.engine.releases import SUPPORTED_SGLANG
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.tools import simulated

GROUP, ENTRY = "sglang.srt.plugins", "mixkv"
LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1")
MOONCAKE = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
)
SEAMS_LIMIT_S = 300

_SHOWN = re.compile(
    r"(MC_|MOONCAKE_|UCX_|NIXL_|SGLANG_\w*MIX_?KV|SGLANG_DISAGG|SGLANG_MOONCAKE|"
    r"(SGLANG_(PLUGINS|PLATFORM|RUST_SERVER|USE_CPU_ENGINE|HOST_IP|USE_HND_KVCACHE|"
    r"SIMULATE_ACC_LEN|PP_LAYER_PARTITION)|CUDA_VISIBLE_DEVICES|NCCL_SOCKET_IFNAME)$)"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
_USERINFO = re.compile(r"//[^/@\s]*@")

_SEAMS_PROGRAM = (
    "from sglang_mixkv.engine import releases\n"
    "print(*('seam:' + problem for problem in releases.problems()), 'done:', sep='\\n')"
)


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. `problem`: what is wrong and what to do; empty when nothing is."""

    section: str
    name: str
    value: str
    problem: str = ""


def version_of(*names: str) -> str:
    """Version and name of the first of these packages that is installed, `none` without."""
    for name in names:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return f"{found} ({name})" if len(names) > 1 else found
    return "none"


def versions() -> Iterator[Finding]:
    """The plugin, what it needs, and the host."""
    sglang, mooncake, nixl = version_of("sglang"), version_of(*MOONCAKE), version_of("nixl")
    advice = ""
    if sglang not in SUPPORTED_SGLANG:
        advice = f"expected SGLang {' or '.join(SUPPORTED_SGLANG)}"
        advice += f": pip install sglang=={SUPPORTED_SGLANG[-1]}"
    missing = "neither Mooncake nor NIXL is installed: pip install mooncake-transfer-engine"
    yield Finding("versions", "sglang-mixkv", f"{__version__}, protocol {PROTOCOL[1]}")
    yield Finding("versions", "sglang", sglang, advice)
    yield Finding("versions", "mooncake", mooncake, missing if mooncake == nixl == "none" else "")
    for name in ("nixl", "torch", "sglang-router"):
        yield Finding("versions", name, version_of(name))
    system = f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}"
    yield Finding("versions", "python", f"{platform.python_version()} on {system}")


def entry_point(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Whether SGLang will find the plugin, and whether its own variable leaves it out."""
    found = [point.value for point in metadata.entry_points(group=GROUP) if point.name == ENTRY]
    missing = "" if found else "SGLang will not load the plugin: reinstall sglang-mixkv"
    twice = "two installations of sglang-mixkv: uninstall one" if len(set(found)) > 1 else ""
    yield Finding("plugin", "entry point", ", ".join(found) or "not found", missing or twice)
    allowed = {name.strip() for name in environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    if allowed and ENTRY not in allowed:
        remedy = f"SGLANG_PLUGINS leaves out {ENTRY}: add it, or unset the variable"
        yield Finding("plugin", "SGLANG_PLUGINS", ",".join(sorted(allowed)), remedy)


def configuration(
    flags: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Each setting that a flag or the environment decided, then the defaults."""
    try:
        record = config.resolve(flags, environ)
    except ValueError as error:
        yield Finding("configuration", "environment", "unusable", str(error))
        return
    defaults = []
    for setting in config.SETTINGS:
        value, origin = getattr(record, setting.field), ""
        if setting.flag and getattr(flags, setting.attribute, None) is not None:
            origin = f"flag {setting.flag}"
        elif environ.get(setting.environ, "").strip():
            origin = f"environment, {setting.environ}"
        if origin:
            yield Finding("configuration", setting.field, f"{value!r} ({origin})")
        else:
            defaults.append(f"{setting.field}={value}")
    yield Finding("configuration", "defaults", ", ".join(defaults) or "none")


def environment(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Variables that decide how servers of this shell, with a drafter, would transfer KV; no
    secrets."""
    try:
        refused = refusals.broken((), None, environ)
    except ValueError as error:  # text that is not a boolean
        refused = [str(error)]
    for name in sorted(filter(_SHOWN.match, environ)):
        problem = next((text for text in refused if name in text), "")
        problem = problem or _wrong(name, environ)
        value = without_secrets(name, environ[name])
        if name == refusals.STAGING_ENV:  # the doctor does not know the target
            value += " (unset it with an MLA target: SGLang ends such a server)"
        yield Finding("environment", name, value, problem)


def _wrong(name: str, environ: Mapping[str, str]) -> str:
    """What is wrong with a variable that no rule refuses; empty when nothing is."""
    if name == simulated.VARIABLE and simulated.is_set(environ):
        return "servers of this shell make their accept length up: unset it to judge by one"
    try:
        config.variable(name, environ[name])
    except MixKVError as error:
        return f"{error}. Until then the server does not start"
    return ""


def without_secrets(name: str, value: str) -> str:
    """A variable's value as it may be pasted into a public place."""
    return "(set, not shown)" if _SECRET.search(name) else _USERINFO.sub("//***@", value)


def libraries(load: Callable[[str], object] = ctypes.CDLL) -> Iterator[Finding]:
    """The system libraries that Mooncake is linked against."""
    found = []
    for name in LIBRARIES:
        try:
            load(name)
            found.append(name)
        except OSError as error:
            package = name.partition(".")[0] + "1"
            problem = f"{error}. Install it (Debian: apt-get install {package})"
            yield Finding("libraries", name, "missing", problem)
    yield Finding("libraries", "found", ", ".join(found) or "none")


def seams() -> Iterator[Finding]:
    """All functions of SGLang's that the plugin relies on, compared in a child process."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SEAMS_PROGRAM],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SEAMS_LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        yield Finding("seams", "checked", "no", f"no end after {SEAMS_LIMIT_S} s")
        return
    yield from seam_findings(done.stdout, done.stderr, done.returncode)


def seam_findings(out: str, err: str, status: int) -> Iterator[Finding]:
    """Findings from what the child process printed."""
    lines = out.splitlines()
    problems = [line.removeprefix("seam:") for line in lines if line.startswith("seam:")]
    if "done:" not in lines:
        last = (err.strip().splitlines() or ["no message"])[-1]
        yield Finding("seams", "checked", "no", f"the check ended with status {status}: {last}")
        return
    for problem in problems:
        yield Finding("seams", problem.partition(": ")[0], "differs", problem)
    if not problems:
        yield Finding("seams", "checked", "all as expected")
