"""Check this host: versions, plugin, seams in SGLang, configuration, RDMA devices, and reads over
the drafter's data plane, by default between two processes here. To test two hosts, run it with
--listen on prefill's and with --peer on decode's.

Exit status: 0 if nothing is wrong, 1 if something is, 2 for unusable arguments.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from zipfile import BadZipFile

import msgspec

from sglang_mixkv import __version__, config, refusals
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.channel.mooncake import forces_tcp
from sglang_mixkv.engine.releases import SUPPORTED_SGLANG, problems, version_of
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.tools import as_json, bounded, doctor_read, hidden, parser
from sglang_mixkv.tools.against import Wheel, changes

SCHEMA = 2
GROUP, ENTRY = "sglang.srt.plugins", "mixkv"
MOONCAKE = [f"mooncake-transfer-engine{kind}" for kind in ("", "-cuda13", "-non-cuda")]
DEVICES_FLAG, DEVICES = "--disaggregation-ib-device", Path("/sys/class/infiniband")
NVIDIA, PEERMEM = Path("/proc/driver/nvidia/version"), Path("/sys/module/nvidia_peermem")
SEAMS_LIMIT_S = 300
OVER_TCP = "mooncake_tcp"

_SHOWN = re.compile(r"MC_|MOONCAKE_|UCX_|NIXL_|SGLANG_|(CUDA_VISIBLE_DEVICES|NCCL_SOCKET_IFNAME)$")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|BACKEND_PARAMS", re.IGNORECASE)


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. `problem`: what is wrong and what to do; "" if nothing is wrong."""

    section: str
    name: str
    value: str
    problem: str = ""


def findings(args: argparse.Namespace) -> Iterator[Finding]:
    """Run all checks, quick ones first; none raises. Without SGLang, only the first two run."""
    if args.against:
        yield Finding("versions", "wheel", f"sglang {args.against.version}")
        yield from differing(changes(args.against))
        return
    yield from versions()
    yield from entry_point()
    if version_of("sglang") == "none":
        return
    yield from map(partial(as_asked, args), environment())
    yield from rdma(args.devices)
    if not args.no_seams:
        yield from map(partial(as_asked, args), seams())
    if not args.no_transfer:
        yield from data_plane(args)


def as_asked(args: argparse.Namespace, one: Finding) -> Finding:
    """Clear a problem that matters only to the plugin, unless this host's servers opt in."""
    variable = os.environ.get(config.ENABLE_ENV, "").strip().lower()
    if args.enable_mixkv or variable not in ("", *config.OFF) or not one.problem:
        return one
    value = f"{one.value} (would stop a server with --enable-mixkv)"
    return msgspec.structs.replace(one, value=value, problem="")


def versions() -> Iterator[Finding]:
    """Report the versions of the plugin, of its dependencies, and of the host."""
    sglang, newest, advice, missing = version_of("sglang"), SUPPORTED_SGLANG[-1], "", ""
    engines = [f"{version_of(name)} ({name})" for name in MOONCAKE if version_of(name) != "none"]
    if sglang == "none":
        advice = "doctor needs SGLang, and checked nothing else: run it in the servers' image"
    elif sglang not in SUPPORTED_SGLANG:
        advice = f"expected SGLang {' or '.join(SUPPORTED_SGLANG)}: pip install sglang=={newest}"
    elif not engines and version_of("nixl") == "none":
        missing = "neither Mooncake nor NIXL is installed: pip install sglang-mixkv[cuda]"
    yield Finding("versions", "sglang-mixkv", f"{__version__}, protocol {PROTOCOL[1]}")
    yield Finding("versions", "sglang", sglang, advice)
    yield Finding("versions", "mooncake", ", ".join(engines) or "none", missing)
    for name in ("nixl", "torch", "sglang-router"):
        yield Finding("versions", name, version_of(name))
    system = f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}"
    yield Finding("versions", "python", f"{platform.python_version()} on {system}")


def entry_point(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check that SGLang will find the plugin, and that SGLANG_PLUGINS does not leave it out."""
    found = [point.value for point in metadata.entry_points(group=GROUP) if point.name == ENTRY]
    missing = "" if found else "SGLang will not load the plugin: reinstall sglang-mixkv"
    yield Finding("plugin", "entry point", ", ".join(found) or "not found", missing)
    allowed = {name.strip() for name in environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    if environ.get("SGLANG_PLUGINS") and ENTRY not in allowed:
        remedy = f"SGLANG_PLUGINS leaves out {ENTRY}: add it, or unset the variable"
        yield Finding("plugin", "SGLANG_PLUGINS", ",".join(sorted(allowed)), remedy)


def environment(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Report the variables that affect how servers started from this shell transfer KV. Secrets are
    not shown, since operators paste the report into public places."""
    for name in sorted(filter(_SHOWN.match, environ)):
        problem = ""
        try:
            config.variable(name, environ[name])
            problem = "".join(refusals.broken((), None, {name: environ[name]}))
        except MixKVError as error:
            problem = f"{str(error).rstrip('.')}. Until then, the server does not start"
        value = "(set, not shown)" if _SECRET.search(name) else environ[name]
        yield Finding("environment", name, hidden(value), problem)


def seams(compare: Callable[[], list[str]] = problems) -> Iterator[Finding]:
    """Check all of SGLang's functions that the plugin relies on."""
    try:
        yield from differing(doctor_read.apart(SEAMS_LIMIT_S, [compare]))
    except doctor_read.ReadFailed as error:
        yield Finding("seams", "checked", "no", f"the check failed: {error}")


def differing(found: list[str]) -> Iterator[Finding]:
    for problem in found:
        yield Finding("seams", problem.partition(": ")[0], "differs", problem)
    if not found:
        yield Finding("seams", "checked", "all as expected")


def _wheel(path: str) -> Wheel:
    try:
        return Wheel(Path(path))
    except (OSError, BadZipFile, IndexError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None


def devices() -> dict[str, str]:
    """Return the kernel's RDMA devices, each with the state of its ports."""
    text = doctor_read.text_of
    return {
        device.name: ", ".join(
            f"port {port.name} {text(port / 'state')} ({text(port / 'link_layer')})"
            for port in sorted(device.glob("ports/*"))
        )
        for device in (sorted(DEVICES.iterdir()) if DEVICES.is_dir() else ())
    }


def by_gpu(devices: str) -> list[str]:
    """Read the flag as SGLang does (parse_ib_device_config): names for all GPUs, or JSON, given as
    text or a file, with names by GPU. Raises ArgumentTypeError."""
    try:
        text = Path(devices).read_text() if devices.endswith(".json") else devices.strip()
        if not text.lstrip().startswith("{"):
            return [text]
        found = sorted(msgspec.json.decode(text, type=dict[int, str]).items())
        return [names for _, names in found] or [""]
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{devices}: {error}") from None


def rdma(names: list[str]) -> Iterator[Finding]:
    """Report the devices, and check that those in `names`, the servers' devices, are active."""
    here = devices()
    for name, ports in (here or {"devices": "none"}).items():
        yield Finding("RDMA", name, ports)
    if here and NVIDIA.exists():
        has = ["nvidia_peermem"] * PEERMEM.exists() + ["dma-buf"] * (" Open " in NVIDIA.read_text())
        advice = "expected nvidia_peermem or the driver's open kernel modules to be loaded"
        yield Finding("RDMA", "GPU memory", ", ".join(has) or "unreachable", "" if has else advice)
    wanted = dict.fromkeys(re.findall(r"[^\s,]+", ",".join(names)))
    if wrong := [name for name in wanted if " ACTIVE " not in here.get(name, "")]:
        known = ", ".join(here) or "it has none"
        problem = f"expected devices of this host ({known}) with an active port: name others"
        yield Finding("RDMA", DEVICES_FLAG, ",".join(wrong), problem)


def data_plane(args: argparse.Namespace) -> Iterator[Finding]:
    """Read from a peer, let a peer read, or read between two processes here."""
    section = "data plane"
    try:
        wire = doctor_read.Wire(args.backend, args.devices[0], config.resolve(args))
        yield Finding(section, "chosen", f"{wire.plane.name}: {wire.plane.why}")
        found = doctor_read.result(wire, args.listen, args.peer)
    except (doctor_read.ReadFailed, OSError, ValueError) as error:
        yield Finding(section, "read", "failed", str(error))
        return
    yield Finding(section, "memory", found.memory)
    yield transport(wire.plane.name, found.used)
    number = doctor_read.READ
    value = f"{number - len(found.wrong)} of {number} slots right"
    if args.listen is None:
        where = f"from {args.peer[0]}" if args.peer else "between two processes here"
        rate = f"{found.bytes / found.seconds / 1e6:,.0f} MB/s"
        value = f"{found.bytes >> 20} MiB {where} in {1000 * found.seconds:.1f} ms, {rate}"
    problem = f"{', '.join(found.wrong)} arrived wrong" if found.wrong else ""
    yield Finding(section, "read", value, problem)


def transport(plane: str, used: Sequence[str], environ: Mapping[str, str] = os.environ) -> Finding:
    """Report the transport that the plane's reads took. `used`: the devices that the plane had
    open; NIXL may not have used them."""
    here, mooncake = devices(), plane == "mooncake"
    value, problem = "TCP" if mooncake else "no RDMA device", ""
    if used:
        value = f"{'RDMA' if mooncake else 'NIXL'} over {', '.join(used)}"
    elif mooncake and forces_tcp(environ):
        value = "TCP: MC_FORCE_TCP is set"
    elif here or (mooncake and environ.get("MOONCAKE_PROTOCOL") == "rdma"):
        otherwise = "MC_FORCE_TCP=1 if TCP is meant" if mooncake else f"{config.PLANE_ENV}=mooncake"
        problem = "expected RDMA: load the device's driver, bring a port up, give this container "
        problem += f"/dev/infiniband and ibverbs-providers (Debian's name), or set {otherwise}"
    return Finding("data plane", "transport", value, problem)


def report(found: Iterable[Finding]) -> int:
    """Print each finding as it comes, then the verdict. Return the number of marked problems."""
    section, wrong = "", 0
    for one in found:
        title, section = "" if one.section == section else one.section, one.section
        mark = "!!" if one.problem else "  "
        print(f"{mark} {title:<13}  {one.name:<13}  {one.value}".rstrip(), flush=True)
        if one.problem:
            print(f"      {one.problem}")
            wrong += 1
    verdict = f"{wrong} problem{'s' * (wrong > 1)}, marked !!"
    print(f"\n{verdict if wrong else 'nothing is wrong'}")
    return wrong


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        example = "10.0.0.1:18515 or [fd00::1]:18515"
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, as in {example}, got {text!r}")
    return host.strip("[]"), int(port)


def main(argv: list[str]) -> int:
    """Run the checks, print the report, and return the exit status."""
    made = parser("doctor", __doc__)
    add, where = made.add_argument, made.add_mutually_exclusive_group()
    waits = "wait up to 10 minutes for one --peer"
    where.add_argument("--listen", metavar="PORT", type=bounded(1, 65535), help=waits)
    where.add_argument("--peer", metavar="HOST:PORT", type=_address, help="read from a --listen")
    flag, kinds = "--disaggregation-transfer-backend", (*refusals.BACKENDS, OVER_TCP)
    backend = "the servers' backend; it decides the data plane (default: %(default)s)"
    add(flag, choices=kinds, default=kinds[0], dest="backend", help=backend)
    names = "the servers' RDMA devices, in SGLang's format (default: the transport's choice)"
    add(DEVICES_FLAG, metavar="DEVICES", default=[""], dest="devices", type=by_gpu, help=names)
    add("--no-transfer", action="store_true", help="skip the data plane and its reads")
    add("--no-seams", action="store_true", help="do not import SGLang")
    against = "only compare the source in this wheel of SGLang with the newest supported release"
    add("--against", metavar="WHEEL", type=_wheel, help=against)
    add("--json", action="store_true", help="print JSON instead of text")
    config.add_flags(made)
    args = made.parse_args(argv)
    if args.backend == OVER_TCP:  # as in SGLang's pd_disaggregation_hook.py
        args.backend = "mooncake"
        os.environ.setdefault("MC_FORCE_TCP", "1")
    if not args.json:
        return int(report(findings(args)) > 0)
    found = list(findings(args))
    wrong = any(one.problem for one in found)
    print(as_json({"schema": SCHEMA, "ok": not wrong, "findings": found}))
    return int(wrong)
