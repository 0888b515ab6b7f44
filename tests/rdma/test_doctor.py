"""The doctor over verbs, as an operator starts it: its reads import torch, in two processes."""

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
LONGEST = min(STRETCH, 4)  # so that the doctor ends a read and reports it before pytest does
UNLOCKED = "setpriv", "--bounding-set=-ipc_lock", "prlimit", "--memlock=65536"
over = pytest.mark.parametrize("backend", ["mooncake", "nixl"])


def doctor(
    backend: str, *before: str, stretch: float = LONGEST, **env: str
) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the doctor's findings: value and problem."""
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
def test_what_the_doctor_says(backend: str) -> None:
    device, found = devices()[0], doctor(backend)
    assert [one for one in found.values() if one[1]] == []
    value, _ = found["RDMA", device.name]
    assert value.startswith("port 1 ACTIVE (")
    over_it = {"mooncake": "RDMA", "nixl": "NIXL"}[backend]
    assert found["data plane", "transport"] == (f"{over_it} over {device.name}", "")
    assert found["data plane", "read"][0].startswith("1 MiB between two processes here")


def test_too_little_memory_may_be_locked() -> None:
    value, problem = doctor("mooncake", *UNLOCKED)["data plane", "read"]
    print(problem)
    assert value == "failed"
    assert "MIXKV-START-06" in problem


def test_too_little_memory_may_be_locked_for_ucx() -> None:
    """UCX asks for the memory again and again, and never makes its backend. The doctor ends that,
    and shows UCX's message."""
    found = doctor("nixl", *UNLOCKED, stretch=min(STRETCH, 2), UCX_LOG_LEVEL="error")
    value, problem = found["data plane", "read"]
    print(problem)
    assert value == "failed"
    assert "Please set max locked memory" in problem
