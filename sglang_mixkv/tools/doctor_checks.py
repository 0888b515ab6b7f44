"""What the doctor looks at on one host; each check answers with findings and never raises.

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
from pathlib import Path

import msgspec

from sglang_mixkv import __version__, config, cpu
from sglang_mixkv import refusals as startup
from sglang_mixkv.engine.releases import SUPPORTED_SGLANG
from sglang_mixkv.protocol.extension import PROTOCOL
from sglang_mixkv.tools import simulated
from sglang_mixkv.tools.plan_flags import from_line

GROUP, ENTRY = "sglang.srt.plugins", "mixkv"
LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1")
MOONCAKE = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
)
SEAMS_LIMIT_S = 300

_SHOWN = re.compile(
    r"^(MC_|MOONCAKE_|SGLANG_\w*MIXKV|SGLANG_PLUGINS$|SGLANG_PLATFORM$|SGLANG_DISAGG|"
    r"SGLANG_MOONCAKE|SGLANG_RUST_SERVER$|SGLANG_USE_CPU_ENGINE$|SGLANG_HOST_IP$|"
    r"SGLANG_USE_HND_KVCACHE$|SGLANG_SIMULATE_ACC_LEN$|SGLANG_PP_LAYER_PARTITION$|UCX_|NIXL_|CUDA_VISIBLE_DEVICES$|NCCL_SOCKET_IFNAME$)"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
_USERINFO = re.compile(r"//[^/@\s]*@")

_SEAMS_PROGRAM = (
    "from sglang_mixkv import config\nfrom sglang_mixkv.engine import releases\n"
    "print(*('seam:' + p for p in releases.problems(config.resolve(None))), 'done:', sep='\\n')"
)


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. `problem`: what is wrong and what to do; empty when nothing is."""

    section: str
    name: str
    value: str
    problem: str = ""


def version_of(*names: str) -> str:
    """Name and version of the first of these packages that is installed, `none` without."""
    for name in names:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return f"{found} ({name})" if len(names) > 1 else found
    return "none"


def versions() -> Iterator[Finding]:
    """The plugin, what it needs, and the host."""
    sglang = version_of("sglang")
    known = sglang in SUPPORTED_SGLANG
    advice = (
        f"expected SGLang {' or '.join(SUPPORTED_SGLANG)}: pip install sglang=="
        + (SUPPORTED_SGLANG[-1])
    )
    section = "versions"
    yield Finding(section, "sglang-mixkv", f"{__version__}, protocol {PROTOCOL}")
    yield Finding(section, "sglang", sglang, "" if known else advice)
    mooncake = version_of(*MOONCAKE)
    nixl = version_of("nixl")
    missing = "neither Mooncake nor NIXL is installed: pip install mooncake-transfer-engine"
    yield Finding(section, "mooncake", mooncake, missing if mooncake == nixl == "none" else "")
    for name in ("nixl", "torch", "sglang-router"):
        yield Finding(section, name, version_of(name))
    system = f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}"
    yield Finding(section, "python", f"{platform.python_version()} on {system}")


def entry_point(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Whether SGLang will find the plugin, and whether it is told to pass it over."""
    found = [point.value for point in metadata.entry_points(group=GROUP) if point.name == ENTRY]
    missing = "" if found else "SGLang will not load the plugin: reinstall sglang-mixkv"
    twice = "two installations of sglang-mixkv: uninstall one" if len(set(found)) > 1 else ""
    yield Finding("plugin", "entry point", ", ".join(found) or "not found", missing or twice)
    allowed = {name.strip() for name in environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    if allowed and ENTRY not in allowed:
        remedy = f"SGLANG_PLUGINS leaves out {ENTRY}: add it, or unset the variable"
        yield Finding("plugin", "SGLANG_PLUGINS", ",".join(sorted(allowed)), remedy)


def has_accelerator() -> bool:
    """Whether a GPU's driver is here."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))


def seams(folder: str = "") -> Iterator[Finding]:
    """Everything inside SGLang that the plugin relies on, looked at in a child process. `folder`:
    of another SGLang than the installed one."""
    on_cpu = not has_accelerator()
    if on_cpu:
        text = "none: SGLang is imported with the plugin's CPU kernels"
        yield Finding("seams", "GPU", text)
    env = {**os.environ, **(cpu.launch_env() if on_cpu else {})}
    if folder:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), folder]))
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SEAMS_PROGRAM], env=env,
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


def configuration(
    flags: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Each setting, its value, and whether a flag, the environment or the default decided."""
    try:
        record = config.resolve(flags, environ)
    except ValueError as error:
        yield Finding("configuration", "environment", "unusable", str(error))
        return
    for name, (attribute, variable) in _sources().items():
        value = getattr(record, name)
        origin = "default"
        if environ.get(variable, "").strip():
            origin = f"environment, {variable}"
        if attribute and getattr(flags, attribute, None) is not None:
            origin = f"flag --{attribute.replace('_', '-')}"
        yield Finding("configuration", name, f"{value!r} ({origin})")


def _sources() -> dict[str, tuple[str, str]]:
    """Field of the record -> attribute of the parsed flags (may be empty), variable."""
    return {
        "enabled": ("enable_mixkv", config.ENABLE_ENV),
        **{option.field: (option.attribute, option.environ) for option in config.OPTIONS},
        "allow_untested_sglang": ("", config.ALLOW_UNTESTED_ENV),
        "stats_dir": ("", config.STATS_DIR_ENV),
    }


def environment(
    environ: Mapping[str, str] = os.environ, flags: argparse.Namespace | None = None
) -> Iterator[Finding]:
    """Variables that decide how servers of this shell, with a drafter and these flags, would
    transfer KV; no secrets."""
    try:
        line = "--speculative-algorithm EAGLE3"
        record = config.resolve(flags, environ)
        refused = startup.refusals(from_line("prefill", line).args, environ, record)
    except ValueError as error:  # text that is not a boolean
        refused = [str(error)]
    for name in sorted(filter(_SHOWN.match, environ)):
        problem = next((text for text in refused if name in text.split("=")[0]), "")
        if name == simulated.VARIABLE and simulated.is_set(environ):
            problem = "servers of this shell make their accept length up: unset it to judge by one"
        yield Finding("environment", name, without_secrets(name, environ[name]), problem)


def without_secrets(name: str, value: str) -> str:
    """A variable's value as it may be pasted into a public place."""
    return "(set, not shown)" if _SECRET.search(name) else _USERINFO.sub("//***@", value)


def libraries(load: Callable[[str], object] = ctypes.CDLL) -> Iterator[Finding]:
    """The system libraries that Mooncake is linked against."""
    for name in LIBRARIES:
        package = name.partition(".")[0] + "1"
        try:
            load(name)
        except OSError as error:
            problem = f"{error}. Install it (Debian: apt-get install {package})"
            yield Finding("libraries", name, "missing", problem)
        else:
            yield Finding("libraries", name, "found")
