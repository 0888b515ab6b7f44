"""The launch scripts start the small pair. Only the sizes differ from production.

Prefill opts in by a flag of `sglang serve`, decode by YAML for `python -m sglang.launch_server`.
Since the TP sizes differ, and opting in on one side only is refused, a correct accept length shows
that the plugin is active on both sides. tests/protocol/test_launchers.py has the other ways to opt
in.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mixkv_cpu as cpu
from mixkv_demo import launch
from mixkv_demo.pair import model_flags, prompts
from mixkv_demo.ports import free_port
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import Deployment, bring_up, silent
from sglang_mixkv.config import PATIENCE_ENV

from .conftest import START_TIMEOUT, Reference, all_arrived, answered, same

SCRIPTS = Path(__file__).parents[2] / "scripts"
README = SCRIPTS.parent / "README.md"


def script(name: str, *arguments: str, **variables: str) -> launch.Launch:
    """Return the launch of a server by one of the launch scripts."""
    path, port = f"{Path(sys.executable).parent}:{os.environ['PATH']}", free_port()
    own = {cpu.SPAWN_ENV: "1", "PATH": path, "HOST": launch.HOST, "PORT": str(port)}
    env = {**launch.local_env(), **own, **variables}
    return launch.Launch(name, ("bash", str(SCRIPTS / f"launch/{name}.sh"), *arguments), env, port)


def server(name: str, *arguments: str, **variables: str) -> launch.Launch:
    """Return the launch of a prefill or decode server on CPU, with sizes set by variables."""
    models = dict(zip(*[iter(model_flags("mla"))] * 2, strict=True))
    names = {"MODEL": models["--model-path"], "DRAFT": models["--speculative-draft-model-path"]}
    flags = (*cpu.LAUNCH_FLAGS, "--sleep-on-idle", "--enable-metrics", *arguments)
    env = {**cpu.launch_env(int(variables["TP"])), PATIENCE_ENV: launch.PATIENCE}
    return script(name, *flags, **{**env, **names, **variables})


@START_TIMEOUT
@pytest.mark.full
def test_the_launch_scripts_start_a_working_pair(reference: Reference, tmp_path: Path) -> None:
    """Output and accept length equal the single server's, the README's request shows the accept
    length, and the documented command of SGLang's benchmark works, with smaller numbers."""
    expected, yaml, port = reference("mla", ()).fixed, tmp_path / "mixkv.yaml", str(free_port())
    yaml.write_text("enable-mixkv: true\nmixkv-staging-mb: 32\n")
    servers = (
        server("prefill", TP="2", LAUNCHER="sglang serve", BOOTSTRAP_PORT=port),
        server("decode", "--config", str(yaml), TP="1", MIXKV="0"),
    )
    prefill, decode = servers
    further = "--prometheus-port", str(free_port())
    router = script("router", *further, PREFILL=f"{prefill.url},{port}", DECODE=decode.url)
    command = [
        *(sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang"),
        *("--base-url", router.url),
        *("--num-prompts", "3", "--max-concurrency", "2", "--dataset-name", "random-ids"),
        *("--random-input-len", "40", "--random-output-len", "20"),
        *("--output-file", str(tmp_path / "out.jsonl")),
    ]
    (curl,) = re.findall(
        r"curl http://\$ROUTER_HOST:8000(/generate (?:.*\\\n)*.*)", README.read_text()
    )
    with Fleet() as fleet:
        bring_up(fleet, [*servers, router], silent)
        deployment = Deployment(fleet, router.url, servers, (router,))
        said = subprocess.check_output(["bash", "-c", f"curl -s {router.url}{curl}"], text=True)
        answers, counted = answered(deployment, expected, prompts())
        done = subprocess.run(
            command, env={**os.environ, **launch.local_env(), **cpu.launch_env()},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    same(answers, expected)
    all_arrived(counted)
    assert json.loads(said)["meta_info"]["spec_accept_length"] >= 1
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out.jsonl").read_text())["completed"] == 3
