"""Launch lines in the documents that need a cluster: SGLang's own parsers take them.

The lines of README.md, those that docs/deploy.md shows as printed, one for each row of its table
of topologies, made by the launch scripts, and those of the demo.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess

import pytest
from docs.pages import ROOT, bash, blocks, words

from mixkv_cpu import CPU_ENGINE_ENV
from mixkv_demo.launch import DEVICES, Topology, prefill_and_decode

DEPLOY = ROOT / "docs" / "deploy.md"
READER = {"TARGET": "/models/target", "DRAFT": "/models/drafter",
          "PREFILL_HOST": "10.0.0.1", "DECODE_HOST": "10.0.0.2"}  # fmt: skip


def written() -> list[str]:
    """All lines that start a server or a router."""
    commands = [c for block in bash(ROOT / "README.md") for c in block.commands()]
    shown = [line for block in blocks(DEPLOY) for line in (block.shown or "").splitlines()]
    return [line for line in (*commands, *shown) if ".launch_" in line]


def made() -> list[str]:
    """The lines of the table of topologies, printed by the scripts themselves."""
    table = re.findall(r"`((?:\w+=\S+ )*)(prefill|decode)\.sh`", DEPLOY.read_text())
    environ = {"PATH": os.environ["PATH"], "MODEL": "/models/target", "DRAFT": "/models/drafter"}
    printed = []
    for variables, role in table:
        command = ["bash", ROOT / "scripts" / "launch" / f"{role}.sh", "--dry-run"]
        env = environ | dict(word.split("=", 1) for word in variables.split())
        done = subprocess.run(command, env=env, text=True, check=True, capture_output=True)
        printed.append(done.stdout)
    return printed


def flags_of(line: str, module: str) -> list[str]:
    found = words(line, READER)
    assert found[:3] == ["python", "-m", module]
    return found[3:]


def lines(module: str) -> list[str]:
    return [line for line in (*written(), *made()) if module in line]


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
    assert server_args.disaggregation_mode in ("prefill", "decode")


@pytest.mark.parametrize("device", DEVICES)
def test_sglang_accepts_what_the_demo_starts(device: str) -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    plugin = ("--enable-mixkv",)
    topology = Topology(mixkv_prefill=plugin, mixkv_decode=plugin, device=device)
    *servers, _ = prefill_and_decode("mla", topology, "")
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
