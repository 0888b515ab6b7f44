"""Which RDMA devices this host has, and whether SGLang's Mooncake would use them.

Mooncake does not say which transport it chose (transfer_engine_impl.cpp, init). MC_FORCE_TCP means
TCP with any value. Otherwise it takes the devices that it can open and that have an active port;
where there is none it takes TCP without a word, whatever MOONCAKE_PROTOCOL says. In a build for
EFA alone that variable decides: any other value than "efa" means TCP.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from sglang_mixkv.tools.doctor_checks import MOONCAKE, Finding, version_of

SECTION = "RDMA"
FOLDER = Path("/sys/class/infiniband")
FLAG = "--disaggregation-ib-device"
ASK_S = 60.0

_WANTED = 'expected device names as in mlx5_0,mlx5_1, or JSON as in {"0": "mlx5_0"}'

_SAYS = "devices:"
_PROGRAM = (
    "import json, sys\nfrom mooncake import engine\n"
    "found = json.loads(engine.TransferEngine().get_local_topology(sys.argv[1]))\n"
    "names = sorted({n for places in found.values() for names in places for n in names})\n"
    "efa = bool(getattr(engine, 'SUPPORT_EFA', False))\n"
    f"print('\\n{_SAYS}' + json.dumps([names, efa]))"
)


class Device(msgspec.Struct, frozen=True):
    """As the kernel has it. `ports`: number and state of each."""

    name: str
    ports: tuple[tuple[str, str], ...]

    @property
    def is_active(self) -> bool:
        return any(state.startswith("ACTIVE") for _, state in self.ports)

    def __str__(self) -> str:
        return ", ".join(f"port {number} {state}" for number, state in self.ports) or "no port"


class Seen(msgspec.Struct, frozen=True):
    """The host's devices, and those that Mooncake would use. `for_efa`: its build is for EFA.
    `unasked`: why it could not be asked; then these are the active ones."""

    devices: tuple[Device, ...]
    usable: tuple[str, ...]
    for_efa: bool = False
    unasked: str = ""

    def way(self, environ: Mapping[str, str] = os.environ) -> str:
        """The transport that a server of this shell would get: tcp, rdma or efa."""
        if "MC_FORCE_TCP" in environ:
            return "tcp"
        if self.for_efa:
            return "efa" if environ.get("MOONCAKE_PROTOCOL") == "efa" else "tcp"
        return "rdma" if self.usable else "tcp"


# ---------------------------------------------------------------- what is looked at


def names_of(text: str) -> list[str]:
    """The devices of --disaggregation-ib-device, for which SGLang takes names, or a JSON object
    (or its file) with the names of each GPU: here all of them. Raises ValueError."""
    given = text.strip()
    try:
        if given.endswith(".json"):
            given = Path(given).read_text().strip()
        groups = json.loads(given) if given.startswith("{") else {"0": given}
        names = [name.strip() for group in groups.values() for name in group.split(",")]
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{_WANTED}, got {text!r}: {error}") from None
    if not any(names) or not all(gpu.isdecimal() for gpu in groups):
        raise ValueError(f"{_WANTED}, got {text!r}")
    return list(dict.fromkeys(filter(None, names)))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def _port(path: Path) -> tuple[str, str]:
    """A state reads `4: ACTIVE`."""
    state = _read(path / "state").rpartition(": ")[2]
    return path.name, f"{state} ({_read(path / 'link_layer')})"


def devices() -> tuple[Device, ...]:
    """The kernel's devices."""
    found = sorted(FOLDER.iterdir()) if FOLDER.is_dir() else []
    return tuple(
        Device(path.name, tuple(_port(port) for port in sorted(path.glob("ports/*"))))
        for path in found
    )


def ask_mooncake(names: Sequence[str]) -> tuple[list[str], bool] | str:
    """The devices that Mooncake finds among these (without names: among all), and whether it is
    built for EFA; or why it cannot be asked."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, ",".join(names)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {ASK_S:.0f} s"
    said = [line for line in done.stdout.splitlines() if line.startswith(_SAYS)]
    if not said:
        last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        return f"its process ended with status {done.returncode}: {last}"
    found, for_efa = json.loads(said[-1].removeprefix(_SAYS))
    return found, for_efa


def look(names: Sequence[str] = ()) -> Seen:
    """What is here. `names`: of the devices that servers may use; without them all."""
    here = devices()
    if not here:
        return Seen((), ())
    said = ask_mooncake(names)
    if isinstance(said, str):
        active = [d.name for d in here if d.is_active and (not names or d.name in names)]
        return Seen(here, tuple(active), unasked=said)
    found, for_efa = said
    return Seen(here, tuple(found), for_efa)


# ---------------------------------------------------------------- what is said of it


def findings(
    seen: Seen, names: Sequence[str] = (), environ: Mapping[str, str] = os.environ, *,
    over_mooncake: bool = True,
) -> Iterator[Finding]:  # fmt: skip
    """Each device with its ports, then what Mooncake would use."""
    for device in seen.devices:
        problem = ""
        if device.name in names and not device.is_active:
            problem = f"{FLAG} names it, and it has no active port: bring one up, or name another"
        yield Finding(SECTION, device.name, str(device), problem)
    known = [device.name for device in seen.devices]
    if not known:
        yield Finding(SECTION, "devices", "none")
    if unknown := [name for name in names if name not in known]:
        text = (
            f"expected devices of this host ({', '.join(known) or 'it has none'}), got "
            f"{', '.join(unknown)}: SGLang does not start over Mooncake. Name others, or none"
        )
        yield Finding(SECTION, FLAG, ",".join(names), text)
    if over_mooncake and version_of(*MOONCAKE) != "none":
        yield _of_mooncake(seen, environ)


def _of_mooncake(seen: Seen, environ: Mapping[str, str]) -> Finding:
    """What its engines would use, and whether that is what was meant."""
    way, problem = seen.way(environ), ""
    value = f"{way.upper()} over {', '.join(seen.usable)}" if way == "rdma" else way.upper()
    if "MC_FORCE_TCP" in environ:
        value = "TCP: MC_FORCE_TCP is set"
    elif seen.unasked:
        problem = f"expected that Mooncake says what it would use; {seen.unasked}. Repair it"
    elif way == "rdma" and environ.get("MOONCAKE_PROTOCOL", "rdma") != "rdma":
        asked = environ["MOONCAKE_PROTOCOL"]
        problem = f"MOONCAKE_PROTOCOL={asked} does not change that: for TCP set MC_FORCE_TCP=1"
    elif way == "tcp" and seen.for_efa:
        problem = "this Mooncake is built for EFA: set MOONCAKE_PROTOCOL=efa, or MC_FORCE_TCP=1"
    elif way == "tcp" and (seen.devices or environ.get("MOONCAKE_PROTOCOL") == "rdma"):
        problem = _none_usable(seen)
    return Finding(SECTION, "Mooncake", value, problem)


def _none_usable(seen: Seen) -> str:
    """There are devices, or RDMA was asked for, and Mooncake uses none."""
    if not seen.devices:
        remedy = "Load the device's driver"
    elif any(device.is_active for device in seen.devices):
        remedy = (
            "Give this container /dev/infiniband and the device's driver (Debian: apt-get install "
            "ibverbs-providers)"
        )
    else:
        remedy = "Bring a port up"
    return (
        "expected that Mooncake can use an RDMA device, and it finds none to use: KV would go over "
        f"TCP, without a word. {remedy}, or set MC_FORCE_TCP=1 if TCP is meant"
    )
