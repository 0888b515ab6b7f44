"""SGLang's own parsers accept the documented launch commands that need a cluster.

The commands are those in README.md, docs/deploy.md and docs/gpu.md, those that the launch scripts
print for deploy.md's topologies, and those of the demo and tests/gpu.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from docs.pages import ROOT, bash, blocks, readme_flags, words
from gpu import test_engine

from mixkv_cpu import CPU_ENGINE_ENV
from mixkv_demo.launch import DEVICES, Topology, prefill_and_decode
from sglang_mixkv.config import config_of

DEPLOY, GPU = (ROOT / "docs" / name for name in ("deploy.md", "gpu.md"))
READER = {"FLAGS": readme_flags(), "DRAFT": "/models/drafter", "MODEL": "/models/target",
          "PREFILL_HOST": "10.0.0.1", "DECODE_HOST": "10.0.0.2"}  # fmt: skip


def commands_of(page: Path) -> list[str]:
    return [command for block in bash(page) for command in block.commands()]


def written() -> list[str]:
    """Return all documented lines that start a server or a router."""
    commands = commands_of(ROOT / "README.md") + commands_of(GPU)
    shown = [line for block in blocks(DEPLOY) for line in (block.shown or "").splitlines()]
    return [line for line in (*commands, *shown) if ".launch_" in line]


def printed() -> list[str]:
    """Return the lines that the launch scripts print for the commands in deploy.md and gpu.md."""
    found = re.findall(r"`((?:\w+=\S+ )*(?:prefill|decode)\.sh)`", DEPLOY.read_text())
    commands = [re.sub(r"(\w+\.sh)", r"scripts/launch/\1", command) for command in found]
    return [dry_run(c) for c in (*commands, *commands_of(GPU)) if "scripts/launch/" in c]


def dry_run(command: str) -> str:
    env = {"PATH": os.environ["PATH"], "MODEL": "/models/target", "DRAFT": "/models/drafter"}
    done = subprocess.run(
        ["bash", "-c", f"{command} --dry-run"], env=env, cwd=ROOT, text=True, check=True,
        capture_output=True,
    )  # fmt: skip
    return done.stdout


def flags_of(line: str, module: str) -> list[str]:
    found = words(line, READER)
    assert found[:3] == ["python", "-m", module]
    return found[3:]


def lines(module: str) -> list[str]:
    return sorted({line for line in (*written(), *printed()) if module in line})


@pytest.fixture
def accepted() -> Callable[[Sequence[str]], Any]:
    """Return a function that parses flags with SGLang's own parser."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return lambda flags: ServerArgs.from_cli_args(parser.parse_args([*flags]))


@pytest.mark.parametrize("line", lines("sglang.launch_server"))
def test_sglang_accepts_the_line(line: str, accepted: Callable[[Sequence[str]], Any]) -> None:
    flags = flags_of(line, "sglang.launch_server")
    server_args = accepted(flags)
    assert config_of(server_args).enabled is ("--enable-mixkv" in flags)
    is_single = "--disaggregation-mode" not in flags and "--enable-mixkv" not in flags
    assert (server_args.disaggregation_mode == "null") is is_single


def test_sglang_accepts_the_demos_and_gpu_tests_commands(
    accepted: Callable[[Sequence[str]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = ("--enable-mixkv",)
    for device in DEVICES:
        topology = Topology(mixkv_prefill=plugin, mixkv_decode=plugin, device=device)
        *servers, _ = prefill_and_decode("mla", topology)
        for server in servers:
            server_args = accepted(server.argv[3:])
            assert server_args.device == device
            assert server_args.disaggregation_mode == server.name
            assert (CPU_ENGINE_ENV in server.env) is (device == "cpu")
    for cards in ("0", "0,1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cards)
        for case in test_engine.CASES:
            for server in case.servers("cuda")[:2]:
                graphs = accepted(server.argv[3:]).cuda_graph_backend_decode != "disabled"
                assert graphs is (server.name == "decode" and "graphs" in case.name)


@pytest.mark.parametrize("line", lines("sglang_router"))
def test_the_router_accepts_the_line(line: str) -> None:
    from sglang_router.launch_router import parse_router_args

    args = parse_router_args(flags_of(line, "sglang_router.launch_router"))
    assert args.pd_disaggregation
    assert [url for url, _ in args.prefill_urls] == ["http://10.0.0.1:30000"]
