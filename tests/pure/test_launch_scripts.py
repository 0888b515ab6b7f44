"""The launch scripts print the right command for each topology. No test starts a server."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "scripts" / "launch"
MODELS = {"MODEL": "/models/target", "DRAFT": "/models/drafter"}
SPECULATION = (
    "--speculative-algorithm EAGLE3 --speculative-draft-model-path /models/drafter "
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
    "--enable-mixkv"
)
SERVER = "python -m sglang.launch_server --model-path /models/target"
PREFILL = (
    "--disaggregation-mode prefill --disaggregation-transfer-backend mooncake "
    f"--disaggregation-bootstrap-port 8998 {SPECULATION}"
)
DECODE = f"--disaggregation-mode decode --disaggregation-transfer-backend mooncake {SPECULATION}"


def script(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one script with only PATH and these environment variables."""
    env = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(
        ["bash", str(LAUNCH / name), *arguments], env=env, text=True, capture_output=True,
        check=False,
    )  # fmt: skip


def printed(name: str, *arguments: str, **variables: str) -> list[str]:
    done = script(name, "--dry-run", *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


TP16 = {"TP": "16", "NNODES": "2", "NODE_RANK": "1", "DIST_INIT_ADDR": "10.0.0.1:5000"}
PP2 = {"PP": "2", "TP": "4", "PAGE_SIZE": "64", "TRUST_REMOTE_CODE": "1", "PORT": "1234"}
DFLASH = {"SPEC_ALGORITHM": "DFLASH", "SPEC_BLOCK": "8", "DP": "8"}
DSPARK = {"SPEC_ALGORITHM": "DSPARK", "SPEC_BLOCK": "7", "DRAFT": ""}


@pytest.mark.parametrize(
    ("name", "variables", "flags"),
    [
        ("decode", {"DP": "8"}, f"--tp-size 8 --attn-dp-size 8 {DECODE}"),
        ("prefill", TP16, "--host 0.0.0.0 --port 30000 --tp-size 16 --nnodes 2 --node-rank 1 "
         f"--dist-init-addr 10.0.0.1:5000 {PREFILL}"),
        ("prefill", PP2, "--trust-remote-code --host 0.0.0.0 --port 1234 --tp-size 4 --pp-size 2 "
         f"--page-size 64 {PREFILL}"),
        ("decode", DFLASH, "--speculative-algorithm DFLASH --speculative-draft-model-path "
         "/models/drafter --speculative-dflash-block-size 8 --enable-dp-lm-head --enable-mixkv"),
        ("decode", DSPARK, "DSPARK --speculative-dspark-block-size 7 --enable-mixkv"),
    ],
)  # fmt: skip
def test_the_command_of_each_topology(name: str, variables: dict[str, str], flags: str) -> None:
    """The printed command ends with the flags of its topology and drafter."""
    command = " ".join(printed(f"{name}.sh", **{**MODELS, **variables}))
    assert command.startswith(f"{SERVER} --")
    assert command.endswith(f" {flags}")


def test_router_names_every_server() -> None:
    command = printed(
        "router.sh", "--policy", "round_robin",
        PREFILL="http://p0:30000,9000 http://p1:30000", DECODE="http://d0:1 http://d1:2",
    )  # fmt: skip
    assert command == shlex.split(
        "python -m sglang_router.launch_router --pd-disaggregation --host 0.0.0.0 --port 8000 "
        "--prefill http://p0:30000 9000 --prefill http://p1:30000 8998 "
        "--decode http://d0:1 --decode http://d1:2 --policy round_robin"
    )


def test_the_printed_command_is_the_one_that_runs() -> None:
    """The script runs the command that `--dry-run` prints, with further arguments unchanged.

    LAUNCHER is set to a command that prints its arguments, one per line.
    """
    more = ["--log-level", "two words", "--chat-template", "a'b\"c$HOME"]
    variables = {**MODELS, "LAUNCHER": "printf %s\\n", "MIXKV": "0", "SPEC_ALGORITHM": ""}
    dry = printed("prefill.sh", *more, **variables)
    assert dry[-4:] == more
    assert not [word for word in dry if "mixkv" in word or "speculative" in word]
    assert script("prefill.sh", *more, **variables).stdout.splitlines() == dry[2:]


def refused(name: str, words: str, **variables: str) -> None:
    done = script(name, "--dry-run", **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_a_missing_variable_is_named() -> None:
    variables: dict[str, str] = {}
    needed = {"MODEL": "/m", "NODE_RANK": "0", "DIST_INIT_ADDR": "a:1", "DRAFT": "/d"}
    for missing, value in needed.items():
        refused("prefill.sh", f"{missing} is not set", NNODES="2", **variables)
        variables[missing] = value
    assert printed("prefill.sh", NNODES="2", **variables)


def test_a_script_rejects_wrong_values() -> None:
    """A script rejects values with which it would start a different server than requested.

    In bash, DP=eight only makes a comparison fail. SGLANG_PLUGINS without mixkv would start stock
    SGLang, since a plugin that is not loaded raises no error.
    """
    for name, text in {"DP": "eight", "TP": "8 ", "NNODES": "-1"}.items():
        words = f"{name}: expected a whole number, got '{text}'"
        refused("decode.sh", words, **MODELS, **{name: text})
    words = "SGLANG_PLUGINS=other,mixkvs leaves out mixkv"
    variable = {"MIXKV": "0", "SGLANG_ENABLE_MIXKV": "yes"}
    for variables in ({}, variable):
        refused("decode.sh", words, **MODELS, **variables, SGLANG_PLUGINS="other,mixkvs")
        assert printed("decode.sh", **MODELS, **variables, SGLANG_PLUGINS="other, mixkv")
    for word in ("", "Off", "n", "N", "false", "no", "0"):
        stock = {"SGLANG_ENABLE_MIXKV": word}
        assert printed("prefill.sh", **MODELS, **stock, MIXKV="0", SGLANG_PLUGINS="other")


def test_compose_uses_the_scripts_and_their_variables() -> None:
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    listed = (LAUNCH / "common.sh").read_text().split("\nfail()")[0]
    services = compose["services"]
    assert sorted(services) == ["decode", "prefill", "router"]
    for name, service in services.items():
        assert service["command"][0] == f"{name}.sh"
        assert (LAUNCH / f"{name}.sh").is_file()
        assert {key for key in service["environment"] if key not in listed} == set()
    bootstrap = services["prefill"]["environment"]["BOOTSTRAP_PORT"]
    assert services["router"]["environment"]["PREFILL"].endswith(f",{bootstrap}")
    assert (
        services["decode"]["environment"]["PORT"] in services["decode"]["healthcheck"]["test"][-1]
    )
