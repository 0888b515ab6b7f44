"""Find this machine's RDMA devices, read their counters, and disturb their links."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

DEVICES = Path("/sys/class/infiniband")
SIOCGIFADDR = 0x8915
IN_GUEST = "MIXKV_RDMA_GUEST" in os.environ
"""Whether this machine is a guest of scripts/rdma.sh. A guest has two devices at the ends of a
wire, and tests may take either end down."""


class Device(NamedTuple):
    """An RDMA device. `address`: the IPv4 address of its network device."""

    name: str
    network: str
    address: str

    @property
    def sent(self) -> int:
        """Return the number of packets sent (soft-RoCE), or of 4-byte words (a NIC)."""
        return self._counted("sent_pkts", "port_xmit_data")

    @property
    def received(self) -> int:
        return self._counted("rcvd_pkts", "port_rcv_data")

    def _counted(self, by_soft_roce: str, by_nic: str) -> int:
        counters = DEVICES / self.name / "ports" / "1"
        files = counters / "hw_counters" / by_soft_roce, counters / "counters" / by_nic
        return int(next(file for file in files if file.exists()).read_text())

    def gid(self, version: int) -> int | None:
        """Return the index of the first GID with an address of this IP version."""
        for file in sorted((DEVICES / self.name / "ports" / "1" / "gids").iterdir()):
            address = ip_address(file.read_text().strip())
            mapped = getattr(address, "ipv4_mapped", None)
            if int(address) and version == (4 if mapped else 6):
                return int(file.name)
        return None


def devices() -> list[Device]:
    """Return the devices that are up and whose network device has an address."""
    found = []
    for folder in sorted(DEVICES.glob("*")):
        port = folder / "ports" / "1"
        try:
            network = (port / "gid_attrs" / "ndevs" / "0").read_text().strip()
            if "ACTIVE" in (port / "state").read_text():
                found.append(Device(folder.name, network, address_of(network)))
        except OSError:
            continue
    return found


def address_of(network: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("256s", network.encode())
        return socket.inet_ntoa(fcntl.ioctl(any_socket, SIOCGIFADDR, asked)[20:24])


def lose(percent: int, network: str = "wire1") -> None:
    """Drop this percentage of the packets that the second device sends over the guest's wire, or
    of those sent on another network device."""
    command = f"tc qdisc replace dev {network} parent 1:1 netem limit 100000 loss {percent}%"
    subprocess.run(command.split(), check=True)


def set_rate(rate: str) -> None:
    """Set the rate of the guest's wire in both directions."""
    for wire in "wire0", "wire1":
        change = f"tc qdisc change dev {wire} root handle 1: tbf rate {rate} burst 100kb"
        subprocess.run([*change.split(), "limit", "100mb"], check=True)


def set_link(state: str) -> None:
    """Set the second device's link up or down."""
    subprocess.run(["ip", "link", "set", "wire1", state], check=True)
