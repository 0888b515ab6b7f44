"""Launch lines in the documents that need a cluster: SGLang's own parsers take them.

The lines of README.md, those that docs/deploy.md shows as printed, one for each of its topologies,
made by the launch scripts, those of docs/gpu.md, and those of the demo.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from docs.pages import ROOT, bash, blocks, words

from mixkv_cpu import CPU_ENGINE_ENV
from mixkv_demo.launch import DEVICES, Topology, prefill_and_decode

DEPLOY, GPU = (ROOT / "docs" / name for name in ("deploy.md", "gpu.md"))
READER = {"TARGET": "/models/target", "DRAFT": "/models/drafter", "MODEL": "/models/target",
          "PREFILL_HOST": "10.0.0.1", "DECODE_HOST": "10.0.0.2"}  # fmt: skip


def commands_of(page: Path) -> list[str]:
    return [command for block in bash(page) for command in block.commands()]


def written() -> list[str]:
    """All lines that start a server or a router."""
    commands = commands_of(ROOT / "README.md") + commands_of(GPU)
    shown = [line for block in blocks(DEPLOY) for line in (block.shown or "").splitlines()]
    return [line for line in (*commands, *shown) if ".launch_" in line]


def made() -> list[str]:
    """The lines of the topologies, printed by the scripts themselves."""
    found = re.findall(r"`((?:\w+=\S+ )*(?:prefill|decode)\.sh)`", DEPLOY.read_text())
    return [dry_run(re.sub(r"(\w+\.sh)", r"scripts/launch/\1", command)) for command in found]


def recipe() -> list[str]:
    """The lines of the servers and the router whose accept lengths docs/gpu.md compares."""
    return [dry_run(command) for command in commands_of(GPU) if "scripts/launch/" in command]


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
    return [line for line in (*written(), *made(), *recipe()) if module in line]


def test_there_are_lines_of_every_kind() -> None:
    assert len(lines("sglang.launch_server")) >= 4
    assert len(lines("sglang_router")) >= 2
    assert len(made()) >= 6


@pytest.mark.parametrize("line", sorted(set(lines("sglang.launch_server"))))
def test_sglang_accepts_the_line(line: str) -> None:
    from sglang.srt.server_args import ServerArgs

    from sglang_mixkv.config import config_of

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    server_args = ServerArgs.from_cli_args(
        parser.parse_args(flags_of(line, "sglang.launch_server"))
    )
    assert config_of(server_args).enabled is ("--enable-mixkv" in line)
    is_single = "--disaggregation" not in line and "--enable-mixkv" not in line
    assert (server_args.disaggregation_mode == "null") is is_single


def test_the_recipe_compares_servers_of_one_drafter() -> None:
    """The single server of docs/gpu.md, and those of the pairs beside it."""

    def drafter(line: str) -> list[str]:
        return re.findall(r"--speculative-\S+ \S+", " ".join(words(line, READER)))

    (single,) = (line for line in commands_of(GPU) if "launch_server" in line)
    servers = [line for line in recipe() if "launch_server" in line]
    assert [("--attn-dp-size 8" in line, "--enable-mixkv" in line) for line in servers] == [
        (False, True), (True, True), (False, False), (True, False), (False, False),
    ]  # fmt: skip
    assert len(drafter(single)) == 5
    assert all(drafter(line) == drafter(single) for line in servers)


@pytest.mark.parametrize("device", DEVICES)
def test_sglang_accepts_what_the_demo_starts(device: str) -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    plugin = ("--enable-mixkv",)
    topology = Topology(mixkv_prefill=plugin, mixkv_decode=plugin, device=device)
    *servers, _ = prefill_and_decode("mla", topology)
    for server in servers:
        server_args = ServerArgs.from_cli_args(parser.parse_args(list(server.argv[3:])))
        assert server_args.device == device
        assert server_args.disaggregation_mode == server.name
        assert (CPU_ENGINE_ENV in server.env) is (device == "cpu")


def test_sglang_refuses_a_wrong_flag() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(
            shlex.split("--model-path m --enable-mixkv --disaggregation-mood prefill")
        )


@pytest.mark.parametrize("line", sorted(set(lines("sglang_router"))))
def test_the_router_accepts_the_line(line: str) -> None:
    from sglang_router.launch_router import parse_router_args

    args = parse_router_args(flags_of(line, "sglang_router.launch_router"))
    assert args.pd_disaggregation
    assert [url for url, _ in args.prefill_urls] == ["http://10.0.0.1:30000"]
