"""What the doctor checks on one host; each check yields findings and never raises.

A finding with a `problem` makes the doctor's exit status 1; one without is information.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from sglang_mixkv import __version__, config, refusals
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.engine.releases import SUPPORTED_SGLANG
from sglang_mixkv.errors import MixKVError

GROUP, ENTRY = "sglang.srt.plugins", "mixkv"
MOONCAKE = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
)
DEVICES_FLAG = "--disaggregation-ib-device"
DEVICES, VERBS = Path("/sys/class/infiniband"), Path("/sys/class/infiniband_verbs")
FILES = Path("/proc/self/fd")
SEAMS_LIMIT_S = 300

_SHOWN = re.compile(r"MC_|MOONCAKE_|UCX_|NIXL_|SGLANG_|(CUDA_VISIBLE_DEVICES|NCCL_SOCKET_IFNAME)$")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
_USERINFO = re.compile(r"//[^/@\s]*@")

_SEAMS_PROGRAM = (
    "from sglang_mixkv.engine import releases\n"
    "print(*('seam:' + problem for problem in releases.problems()), sep='\\n')"
)


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. `problem`: what is wrong and what to do; empty when nothing is."""

    section: str
    name: str
    value: str
    problem: str = ""


def version_of(name: str) -> str:
    """Of an installed package; `none` without it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def versions() -> Iterator[Finding]:
    """The plugin, what it needs, and the host."""
    sglang, newest, advice, missing = version_of("sglang"), SUPPORTED_SGLANG[-1], "", ""
    engines = [f"{version_of(name)} ({name})" for name in MOONCAKE if version_of(name) != "none"]
    if sglang == "none":
        advice = (
            "SGLang is not installed, and nothing else was checked: run the doctor in the "
            f"servers' image, or pip install sglang=={newest}"
        )
    elif sglang not in SUPPORTED_SGLANG:
        advice = f"expected SGLang {' or '.join(SUPPORTED_SGLANG)}: pip install sglang=={newest}"
    elif not engines and version_of("nixl") == "none":
        missing = "neither Mooncake nor NIXL is installed: pip install mooncake-transfer-engine"
    yield Finding("versions", "sglang-mixkv", f"{__version__}, protocol {PROTOCOL[1]}")
    yield Finding("versions", "sglang", sglang, advice)
    yield Finding("versions", "mooncake", ", ".join(engines) or "none", missing)
    for name in ("nixl", "torch", "sglang-router"):
        yield Finding("versions", name, version_of(name))
    system = f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}"
    yield Finding("versions", "python", f"{platform.python_version()} on {system}")


def entry_point(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Whether SGLang will find the plugin, and whether its own variable leaves it out."""
    found = [point.value for point in metadata.entry_points(group=GROUP) if point.name == ENTRY]
    missing = "" if found else "SGLang will not load the plugin: reinstall sglang-mixkv"
    yield Finding("plugin", "entry point", ", ".join(found) or "not found", missing)
    allowed = {name.strip() for name in environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    if allowed and ENTRY not in allowed:
        remedy = f"SGLANG_PLUGINS leaves out {ENTRY}: add it, or unset the variable"
        yield Finding("plugin", "SGLANG_PLUGINS", ",".join(sorted(allowed)), remedy)


def environment(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Variables that decide how servers of this shell, with a drafter, would transfer KV; no
    secrets, since the report is pasted into public places."""
    try:
        refused = refusals.broken((), None, environ)
    except ValueError as error:  # text that is not a boolean
        refused = [str(error)]
    for name in sorted(filter(_SHOWN.match, environ)):
        problem = next((text for text in refused if name in text), "")
        try:
            config.variable(name, environ[name])
        except MixKVError as error:
            problem = f"{error}. Until then the server does not start"
        value = "(set, not shown)" if _SECRET.search(name) else environ[name]
        yield Finding("environment", name, _USERINFO.sub("//***@", value), problem)


def seams(program: str = _SEAMS_PROGRAM) -> Iterator[Finding]:
    """All functions of SGLang's that the plugin relies on, compared in a child process, which an
    import of SGLang may end."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=SEAMS_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        yield Finding("seams", "checked", "no", f"no end after {SEAMS_LIMIT_S} s")
        return
    problems = [line[5:] for line in done.stdout.splitlines() if line.startswith("seam:")]
    for problem in problems:
        yield Finding("seams", problem.partition(": ")[0], "differs", problem)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        problem = f"the check ended with status {done.returncode}: {last}"
        yield Finding("seams", "checked", "no", problem)
    elif not problems:
        yield Finding("seams", "checked", "all as expected")


# ---------------------------------------------------------------- RDMA devices
# Mooncake and UCX do not report their transport, and take TCP without a word where they can open no
# device. But a process has a file open for each device that it uses.


def _text(path: Path) -> str:
    """Of a state, which reads `4: ACTIVE`, the word."""
    try:
        return path.read_text().strip().rpartition(": ")[2]
    except OSError:
        return "unknown"


def devices() -> dict[str, str]:
    """The kernel's devices, and the state of their ports."""
    return {
        device.name: ", ".join(
            f"port {port.name} {_text(port / 'state')} ({_text(port / 'link_layer')})"
            for port in sorted(device.glob("ports/*"))
        )
        for device in (sorted(DEVICES.iterdir()) if DEVICES.is_dir() else ())
    }


def devices_in_use() -> list[str]:
    """The devices that this process has open."""
    files = (os.readlink(file) for file in FILES.iterdir() if file.is_symlink())
    verbs = {os.path.basename(file) for file in files if "/infiniband/uverbs" in file}
    return sorted(_text(VERBS / name / "ibdev") for name in verbs)


def rdma(names: str) -> Iterator[Finding]:
    """The devices, and whether those that the servers are to use are there."""
    here = devices()
    for name, ports in (here or {"devices": "none"}).items():
        yield Finding("RDMA", name, ports)
    wanted = filter(None, names.replace(" ", "").split(","))
    if wrong := [name for name in wanted if " ACTIVE " not in here.get(name, "")]:
        known = ", ".join(here) or "it has none"
        problem = f"expected devices of this host ({known}) with an active port: name others"
        yield Finding("RDMA", DEVICES_FLAG, ",".join(wrong), problem)


def transport(plane: str, used: Sequence[str], environ: Mapping[str, str] = os.environ) -> Finding:
    """What the reads of this plane went over. `used`: the devices that it had open, of which NIXL
    may have used none."""
    here, mooncake = devices(), plane == "mooncake"
    value, problem = "TCP" if mooncake else "no RDMA device", ""
    if used:
        value = f"{'RDMA' if mooncake else 'NIXL'} over {', '.join(used)}"
    elif mooncake and "MC_FORCE_TCP" in environ:
        value = "TCP: MC_FORCE_TCP is set"
    elif here or (mooncake and environ.get("MOONCAKE_PROTOCOL") == "rdma"):
        otherwise = "MC_FORCE_TCP=1 if TCP is meant" if mooncake else f"{config.PLANE_ENV}=mooncake"
        problem = (
            "expected RDMA: load the device's driver, bring a port up, give this container "
            f"/dev/infiniband and ibverbs-providers (Debian's name), or set {otherwise}"
        )
    return Finding("data plane", "transport", value, problem)
