"""The RDMA devices of this host, and whether reads go over them.

Mooncake and UCX do not report their transport, and take TCP without a word where they can open no
device. But a process has a file open for each device that it uses. That shows of a server too:
`ls -l /proc/PID/fd | grep uverbs`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sglang_mixkv.config import PLANE_ENV
from sglang_mixkv.tools.doctor_checks import Finding

FLAG = "--disaggregation-ib-device"
DEVICES, VERBS = Path("/sys/class/infiniband"), Path("/sys/class/infiniband_verbs")
FILES = Path("/proc/self/fd")

_EXPECTED = 'expected device names as in mlx5_0,mlx5_1, or JSON as in {"0": "mlx5_0"}'


def names_of(text: str) -> list[str]:
    """The devices of --disaggregation-ib-device, for which SGLang takes names, or a JSON object
    (or its file) with the names of each GPU: here all of them."""
    try:
        given = (Path(text).read_text() if text.endswith(".json") else text).strip()
        groups = json.loads(given) if given.startswith("{") else {"0": given}
        names = [name.strip() for group in groups.values() for name in group.split(",")]
        if not any(names) or not all(gpu.isdecimal() for gpu in groups):
            raise ValueError("no device, or no number of a GPU")
    except (OSError, ValueError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{_EXPECTED}, got {text!r}: {error}") from None
    return list(dict.fromkeys(filter(None, names)))


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


def in_use() -> list[str]:
    """The devices that this process has open."""
    files = (os.readlink(file) for file in FILES.iterdir() if file.is_symlink())
    verbs = {os.path.basename(file) for file in files if "/infiniband/uverbs" in file}
    return sorted(_text(VERBS / name / "ibdev") for name in verbs)


def findings(names: Sequence[str]) -> Iterator[Finding]:
    """The devices, and whether those that the servers are to use are there."""
    here = devices()
    for name, ports in (here or {"devices": "none"}).items():
        yield Finding("RDMA", name, ports)
    if wrong := [name for name in names if " ACTIVE " not in here.get(name, "")]:
        known = ", ".join(here) or "it has none"
        problem = f"expected devices of this host ({known}) with an active port: name others"
        yield Finding("RDMA", FLAG, ",".join(wrong), problem)


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
        otherwise = "MC_FORCE_TCP=1 if TCP is meant" if mooncake else f"{PLANE_ENV}=mooncake"
        problem = (
            "expected RDMA: load the device's driver, bring a port up, give this container "
            f"/dev/infiniband and ibverbs-providers (Debian's name), or set {otherwise}"
        )
    return Finding("data plane", "transport", value, problem)
