"""SGLANG_MIXKV_PLAN makes SGLang's and Dynamo's launchers write a row for `plan` and exit.

The tests check the row, the exit status, and the report of `plan` on two rows. No server starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mixkv_demo
from sglang_mixkv.engine.releases import SUPPORTED_SGLANG, sglang_version
from sglang_mixkv.tools.plan import main
from sglang_mixkv.tools.plan_launch import rows_in

from .launchers import Call, dynamo, launch_server

ROOT = Path(__file__).parents[2]
MODELS = Path(mixkv_demo.__file__).parent / "models" / "mla"
MODEL = f"--model-path {MODELS}/target --page-size 16"
DRAFT = f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {MODELS}/drafter"
FLAGS = f"{MODEL} {DRAFT}"
SERVER = [sys.executable, "-m", "sglang.launch_server"]
STEPS = "--speculative-num-steps"


def mode(role: str, more: str = "") -> list[str]:
    return f"{FLAGS} --disaggregation-mode {role} {more}".split()


def launched(file: Path, words: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    own = {"SGLANG_MIXKV_PLAN": str(file), "SGLANG_USE_CPU_ENGINE": "0", **environ}
    return subprocess.run(
        words, env={**os.environ, **own}, text=True, capture_output=True, timeout=300
    )


def server_in(file: Path) -> dict[str, Any]:
    row = json.loads(file.read_text())
    assert (row["sglang"], row["error"]) == (sglang_version(), "")
    return row["server"]


def test_two_servers_write_rows_that_plan_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only prefill has opted in. The log contains the same row as the file."""
    prefill, decode = tmp_path / "prefill.json", tmp_path / "decode.json"
    done = launched(prefill, [*SERVER, *mode("prefill", "--tp 2")], SGLANG_ENABLE_MIXKV="1")
    assert (done.returncode, rows_in(done.stdout)) == (0, [json.loads(prefill.read_text())])
    done = launched(decode, [*SERVER, *mode("decode")])
    assert done.returncode == 0, done.stderr
    (tmp_path / "decode.log").write_text(f"pulled\n{done.stdout}\nended\n")
    assert (
        main(["--prefill", str(prefill), "--decode", str(tmp_path / "decode.log"), "--json"]) == 1
    )
    plan = json.loads(capsys.readouterr().out)
    assert plan["findings"] == ["[MIXKV-PAIR-01] --enable-mixkv: only on prefill. Set it on both."]
    sides = [plan[role] for role in ("prefill", "decode")]
    assert [(s["enabled"], s["tp_size"], s["gpu"]) for s in sides] == [
        (True, 2, "hopper"), (False, 1, "hopper"),
    ]  # fmt: skip
    assert plan["transfer"]["heads"] == 2
    swapped = ["--prefill", str(decode), "--decode", FLAGS.replace("--page-size 16", "")]
    assert main(swapped) == 1
    assert "expected --disaggregation-mode prefill; got decode" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("launcher", "more", "environ", "found"),
    [
        (launch_server, "--tp 2 --dp 2 --enable-dp-attention", {}, {"attention_tp": 1}),
        (launch_server, "--smg-grpc-mode --page-size 32", {}, {"page_size": 32}),
        (dynamo, "", {"SGLANG_ENABLE_MIXKV": "1"}, {"enabled": True, "stock": []}),
        (launch_server, f"{STEPS} 3", {}, {"resolved": False}),
        (launch_server, "--enable-mixkv", {"SGLANG_RUST_SERVER": "1"}, {"resolved": True}),
        (launch_server, "--device cpu", {}, {"gpu": ""}),
        (launch_server, "", {"SGLANG_MIXKV_PLAN_GPU": "blackwell"}, {"gpu": "blackwell"}),
    ],
)  # fmt: skip
def test_a_launchs_row_has_its_resolved_settings(
    sglang_with_plugin: Call, tmp_path: Path, launcher: Any, more: str, environ: dict[str, str],
    found: dict[str, Any],
) -> None:  # fmt: skip
    """The row is written after SGLang's last check, even if that check raises."""
    file = tmp_path / "row.json"
    sglang_with_plugin(launcher, mode("decode", more), SGLANG_MIXKV_PLAN=str(file), **environ)
    server = server_in(file)
    assert {name: server[name] for name in found} == found, server
    assert bool(server["stock"]) == (STEPS in more)
    assert bool(server["refused"]) == ("SGLANG_RUST_SERVER" in environ or "grpc" in more)


def test_launches_that_write_no_server(sglang_with_plugin: Call, tmp_path: Path) -> None:
    """Nodes other than the first write no row, an unreadable model yields a row without a server,
    and an unknown GPU is an error."""
    file = tmp_path / "row.json"
    second = mode("decode", "--tp 2 --nnodes 2 --node-rank 1 --dist-init-addr 127.0.0.1:5000")
    sglang_with_plugin(launch_server, second, SGLANG_MIXKV_PLAN=str(file))
    assert not file.exists()
    other = f"--model-path {tmp_path} --disaggregation-mode decode".split()
    sglang_with_plugin(launch_server, other, SGLANG_MIXKV_PLAN=str(file))
    assert json.loads(file.read_text())["server"] is None
    assert main(["--prefill", str(file), "--decode", str(file)]) == 2
    named = {"SGLANG_MIXKV_PLAN": str(file), "SGLANG_MIXKV_PLAN_GPU": "volta"}
    ended = sglang_with_plugin(launch_server, second, **named)
    assert "expected hopper or blackwell; got 'volta'" in ended.said


def test_a_row_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """A FIFO without a reader does not block the launch, and the row is still in the log."""
    os.mkfifo(tmp_path / "fifo")
    done = launched(tmp_path / "fifo", [*SERVER, *mode("decode")])
    assert done.returncode == 1
    assert f"SGLANG_MIXKV_PLAN={tmp_path}/fifo: No such device or address" in done.stderr
    assert len(rows_in(done.stdout)) == 1


def test_no_plan_hook_is_registered_without_the_variable(sglang_with_plugin: Call) -> None:
    """The hooks for `plan` are registered only if SGLANG_MIXKV_PLAN is set."""
    assert sglang_with_plugin(hooked).value == []
    assert sglang_with_plugin(hooked, SGLANG_MIXKV_PLAN="f").value == ["checks", "resolves"]


def hooked() -> list[str]:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    of = "sglang.srt.server_args.ServerArgs."
    names = {f"{of}resolve_once": "resolves", f"{of}check_server_args": "checks"}
    return sorted(names[target] for target in HookRegistry._patched if target in names)


def test_a_script_that_plan_cannot_parse_writes_its_own_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a script that it cannot parse, `plan` prints a command that makes the script write its
    row. The launch scripts write rows in the same way."""
    script = tmp_path / "run.sh"
    script.write_text(
        f"MORE=()\nwhile [ $# -gt 0 ]; do MORE+=($1); shift; done\n"
        f"{' '.join(SERVER)} {FLAGS} --disaggregation-mode prefill ${{MORE[@]}}\n"
    )
    assert main(["--prefill", str(script), "--decode", str(script)]) == 2
    said = capsys.readouterr().err
    command = said[said.index("SGLANG_MIXKV_PLAN=prefill.json") : said.index(" exits before")]
    subprocess.run(["bash", "-c", f"{command} --tp 2"], cwd=tmp_path, check=True, timeout=300)
    assert server_in(tmp_path / "prefill.json")["tp_size"] == 2
    environ = {"MODEL": f"{MODELS}/target", "DRAFT": f"{MODELS}/drafter", "TP": "1",
               "PAGE_SIZE": "16", "LAUNCHER": " ".join(SERVER)}  # fmt: skip
    decode = tmp_path / "decode.json"
    done = launched(decode, ["bash", str(ROOT / "scripts" / "launch" / "decode.sh")], **environ)
    assert (done.returncode, server_in(decode)["enabled"]) == (0, True), done.stderr
    assert main(["--prefill", str(tmp_path / "prefill.json"), "--decode", str(decode)]) == 1
    assert "--enable-mixkv: only on decode" in capsys.readouterr().out


DYNAMO = max((Path(sys.prefix) / "dynamo").glob("*[0-9]"), default=Path())


@pytest.mark.skipif(not DYNAMO.name, reason="NOT TESTED: this environment has no Dynamo")
def test_dynamos_worker_writes_a_row(tmp_path: Path) -> None:
    """With the variables in docs/tools.md, Dynamo's worker needs neither etcd nor NATS."""
    page = (ROOT / "docs" / "tools.md").read_text()
    named = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
    assert " ".join(f"{name}={value}" for name, value in named.items()) in page
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(DYNAMO)]))
    store = {"DYN_FILE_KV": str(tmp_path / "store"), "HOME": str(tmp_path)}
    own = {**named, **store, "PYTHONPATH": path, "SGLANG_ENABLE_MIXKV": "1"}
    words = [sys.executable, "-m", "dynamo.sglang", *mode("prefill", "--tp 2")]
    done = launched(tmp_path / "row.json", words, **own)
    assert done.returncode == 0, done.stderr[-2000:]
    server = server_in(tmp_path / "row.json")
    assert (server["mode"], server["enabled"], server["stock"]) == ("prefill", True, [])


ASKED = """
from argparse import ArgumentParser
from dynamo.common.configuration.groups.router_args import add_worker_router_arguments
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup
from dynamo.sglang.backend_args import DynamoSGLangArgGroup
from sglang_mixkv.tools import plan_server as plan
from sglang_mixkv.tools.plan_shell import Line

own = ArgumentParser(add_help=False)
add_worker_router_arguments(own)
for group in (DynamoRuntimeArgGroup, DynamoSGLangArgGroup):
    group().add_arguments(own)
unlike = {f for f in own._option_string_actions if not plan._DYNAMOS.fullmatch(f)}
both = {f for f in plan._parser()._option_string_actions if plan._DYNAMOS.fullmatch(f)}
flags = "--router-mode kv --gateway-workers 2 --dyn-tool-call-parser kimi_k2 --no-such 1"
words = ["--disable-piecewise-cuda-graph", "--tp", "2", *flags.split(), "--enable-mixkv"]
args, refused, ends = plan.parse(Line({}, words, "dynamo.sglang"))
print(unlike, both, args.tp_size, len(refused), *ends)
"""


@pytest.mark.skipif(not DYNAMO.name, reason="NOT TESTED: this environment has no Dynamo")
def test_plan_uses_dynamos_parser_if_installed() -> None:
    """If Dynamo is installed, `plan` uses its parser. Otherwise it recognizes Dynamo's flags by a
    pattern, which must match all of Dynamo's flags and none of SGLang's."""
    path = os.pathsep.join([str(DYNAMO), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", ASKED], env={**os.environ, "PYTHONPATH": path}, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == (
        "{'--version'} {'--enable-multimodal'} 2 1 neither Dynamo nor SGLang "
        f"{sglang_version()} knows --no-such"
    )


OLDER = SUPPORTED_SGLANG[-2]


def test_a_row_of_another_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The older release writes the row, and the newest release reads it. `plan` compares them."""
    python = ROOT / f".venv-{OLDER}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"NOT TESTED: MIXKV_SGLANG={OLDER} bash scripts/test.sh makes {python}")
    words = [str(python), "-m", "sglang.launch_server", *mode("prefill", "--tp 2 --enable-mixkv")]
    done = launched(tmp_path / "row.json", words)
    assert done.returncode == 0, done.stderr
    for backend, finds in (("mooncake", 0), ("nixl", 1)):
        decode = f"{FLAGS} --enable-mixkv --disaggregation-transfer-backend {backend}"
        text = (tmp_path / "row.json").read_text().replace('"mooncake"', f'"{backend}"')
        (tmp_path / "row.json").write_text(text)
        assert main(["--prefill", str(tmp_path / "row.json"), "--decode", decode]) == finds
        assert (
            f"SGLang's release over nixl: prefill has {OLDER}" in capsys.readouterr().out
        ) == finds
