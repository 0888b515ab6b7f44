"""Test `doctor` over verbs, as an operator runs it. Its two reading processes import torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from rdma.conftest import RDMA
from rdma.verbs import devices
from rig.channel.planes import ENV
from rig.process.forks import LIMIT_S, STRETCH

RUN = """
import sys
from sglang_mixkv.tools import doctor, doctor_read
doctor_read.LIMIT_S = round(doctor_read.LIMIT_S * float(sys.argv[1]))
sys.exit(doctor.main(sys.argv[2:]))
"""
LONGEST = min(STRETCH, 4)  # so that doctor times out before pytest does
UNLOCKED = "setpriv", "--bounding-set=-ipc_lock", "prlimit", "--memlock=65536"
over = pytest.mark.parametrize("backend", ["mooncake", "nixl"])


def doctor(
    backend: str, *before: str, stretch: float = LONGEST, **env: str
) -> dict[tuple[str, str], tuple[str, str]]:
    """Run `doctor`, and return the value and the problem of each finding."""
    flags = ("--json", "--no-seams", "--mixkv-staging-mb", "8")
    where = ("--disaggregation-transfer-backend", backend)
    where += ("--disaggregation-ib-device", devices()[0].name)
    ran = subprocess.run(
        [*before, sys.executable, "-c", RUN, str(stretch), *flags, *where],
        env=os.environ | ENV | RDMA | env, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    print(ran.stderr)
    found = json.loads(ran.stdout)["findings"]
    return {(one["section"], one["name"]): (one["value"], one["problem"]) for one in found}


@over
def test_doctor_reports_the_device_and_a_read(backend: str) -> None:
    device, found = devices()[0], doctor(backend)
    assert [one for one in found.values() if one[1]] == []
    value, _ = found["RDMA", device.name]
    assert value.startswith("port 1 ACTIVE (")
    over_it = {"mooncake": "RDMA", "nixl": "NIXL"}[backend]
    assert found["data plane", "transport"] == (f"{over_it} over {device.name}", "")
    assert found["data plane", "read"][0].startswith("1 MiB between two processes here")


def test_doctor_reports_a_low_limit_on_locked_memory() -> None:
    value, problem = doctor("mooncake", *UNLOCKED)["data plane", "read"]
    print(problem)
    assert value == "failed"
    assert "MIXKV-START-06" in problem


def test_doctor_reports_a_low_limit_on_locked_memory_with_ucx() -> None:
    """UCX retries the registration forever. `doctor` times out, and prints UCX's message."""
    found = doctor("nixl", *UNLOCKED, stretch=min(STRETCH, 2), UCX_LOG_LEVEL="error")
    value, problem = found["data plane", "read"]
    print(problem)
    assert value == "failed"
    assert "Please set max locked memory" in problem
