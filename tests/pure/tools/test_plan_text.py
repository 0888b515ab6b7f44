"""Launch lines in commands, scripts, manifests and compose files, with or without a pointer.

The texts are modeled on public ones: SGLang's documentation and issues, Dynamo's recipes,
LeaderWorkerSets, RoleBasedGroups, StormServices and benchmark scripts. If `plan` cannot read a part
of a text, it either adds a note, or stops with an error that shows which command to run instead.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sglang_mixkv.tools.plan_text import LIMIT, Given, load, split

RUN = "python3 -m sglang.launch_server --model-path m"
ON, A, PREFILL = "SGLANG_ENABLE_MIXKV", {"A": "1"}, "--disaggregation-mode prefill"
POD = """\
apiVersion: apps/v1
kind: Deployment
metadata: {{name: decode, labels: {{app: a}}}}
spec:
  template:
    spec:
      initContainers:
        - {{name: doctor, command: [python3, -m, sglang_mixkv, doctor, --no-seams]}}
      containers:
        - name: server
          {command}
          env:
            - {{name: SGLANG_ENABLE_MIXKV, value: "1"}}
            - {{name: MODEL, value: m}}
            - {{name: POD_IP, valueFrom: {{fieldRef: {{fieldPath: status.podIP}}}}}}
          livenessProbe: {{exec: {{command: [curl, --fail, localhost]}}}}
"""
IN_POD, OF_POD = {ON: "1", "MODEL": "m"}, ("POD_IP: set outside the file",)
LWS = """\
kind: LeaderWorkerSet
spec:
  leaderWorkerTemplate:
    leaderTemplate: &node
      spec:
        containers:
          - command: [python3, -m, sglang.launch_server]
            args: [--model-path, m, --nnodes, $(LWS_GROUP_SIZE), --node-rank,
              $(LWS_WORKER_INDEX), --host, 0.0.0.0]
    workerTemplate: {spec: {containers: [{command: [sh, -c, "python3 -m sglang.launch_server
      --model-path m --nnodes $LWS_GROUP_SIZE --node-rank $LWS_WORKER_INDEX > log 2>&1"]}]}}
---
kind: Service
spec: {ports: [{port: 30000}]}
"""
COMPOSE = """\
x-server: &server {image: sglang, ipc: host}
services:
  prefill:
    <<: *server
    entrypoint: python3 -m sglang.launch_server
    command: >-
      --model-path m --disaggregation-mode prefill --tp 2
    environment: [SGLANG_ENABLE_MIXKV=1, OTHER]
  decode:
    <<: *server
    command: sglang serve m --disaggregation-mode decode --tp $$TP ${MORE}
    environment: {SGLANG_ENABLE_MIXKV: 1, NCCL_DEBUG: }
  router: {command: [python3, -m, sglang_router.launch_router, --pd-disaggregation]}
"""
SCRIPT = f"""\
#!/usr/bin/env bash\r
set -euo pipefail  # don't go on\r
export SGLANG_ENABLE_MIXKV=1 MODEL="${{MODEL:-m}}"\r
LOCAL=1\r
curl --fail http://registry/health; mkdir --parents /log\r
CUDA_VISIBLE_DEVICES=$rank python3 -m sglang.launch_server --model-path $MODEL \\\r
    {PREFILL} --tp 2 --port 3000$rank \\\r
    --host "$(hostname -i | head --lines 1)" 2>&1 | tee --append /log/prefill &\r
python3 -m sglang_router.launch_router --pd-disaggregation --prefill http://127.0.0.1:30000\r
"""
TWO = f"{RUN} {PREFILL} --tp 2\n{RUN} --disaggregation-mode=decode --tp 4"
HOST = "--host $(hostname -i | head --lines 1)"

READ = {  # text: variables, flags, and a part of each note, in order
    # commands
    f"{RUN} --tp 8 > log 2>&1 &": ({}, "--model-path m --tp 8"),
    "--model-path m --tp 8  # one rank per GPU": ({}, "--model-path m --tp 8"),
    f"A=1 nohup env {ON}=1 sglang serve m --x '# no; comment'":
        ({"A": "1", ON: "1"}, "--model-path m --x # no; comment"),
    f"docker run --gpus '\"device=0\"' -e A=1 --env={ON}=1 image bash -c \"{RUN} --tp 8\"":
        ({"A": "1", ON: "1"}, "--model-path m --tp 8"),
    f"export {ON}=1\ndocker run -e {ON} --env-file a.env image {RUN}":
        ({}, "--model-path m", f"{ON} comes from outside", "--env-file comes from"),
    f"srun --export=ALL,{ON}=1 numactl --membind=0 {RUN} --node-rank $SLURM_PROCID":
        ({ON: "1"}, "--model-path m", "--node-rank: SLURM_PROCID is not set in it"),
    f"pylet submit '{RUN} --port $PORT' --name a\npylet submit '{RUN} --port $PORT' --name b":
        ({}, "--model-path m", "--port: PORT is not set"),
    "python /opt/sglang/launch_server.py --model-path m": ({}, "--model-path m"),
    f"ssh host '{RUN} --tp 8'": ({}, "--model-path m --tp 8"),
    f"kubectl exec -it pod -- {RUN} --tp 8": ({}, "--model-path m --tp 8"),
    f"torchrun --nproc-per-node 8 -m {RUN.partition('-m ')[2]}": ({}, "--model-path m"),
    f"nsys profile --trace cuda -o x {RUN}": ({}, "--model-path m"),
    f"bash -c '\n  {RUN} \\\n   --tp 8\n'": ({}, "--model-path m --tp 8"),
    "sglang serve --tp 8 m": ({}, "--tp 8 m"),  # SGLang rejects this line
    f"{RUN} --api-key 'pa$$word'": ({}, "--model-path m --api-key pa$$word"),
    f"A='x \"y\" $z'\n{RUN} --a $A --b \"$A\" --c 'it'\"'s\"": (
        {}, """--model-path m --a x "y" $z --b x "y" $z --c it's"""),
    f"{RUN} --a \"\\$z\" --b a\\ b 2>'a b' --tp 8 | tee x":
        ({}, "--model-path m --a $z --b a b --tp 8"),
    f"{RUN} --port ${{PORT:?set it}} --host \"`hostname -i | head`\" --tp 8":
        ({}, "--model-path m --host `hostname -i | head` --tp 8", "--port: only", "--host: only"),
    f"{RUN} --host $(cat \"a file\" --tp 4) --tp 8":
        ({}, "--model-path m --host $(cat \"a file\" --tp 4) --tp 8", "--host: only a shell"),
    f"{RUN} --api-key $KEY --tp 8":
        ({}, "--model-path m --tp 8", "--api-key: KEY is not set in it, and plan does not need"),
    f"{RUN} --api-key ${{API_KEY:-sk}}":
        ({}, "--model-path m --api-key sk", "API_KEY is taken as its default"),
    # scripts
    SCRIPT: ({ON: "1", "MODEL": "m"},
             f"--model-path m {PREFILL} --tp 2 {HOST}", "MODEL is taken as its default",
             "--port: rank is not set in it", "--host: only a shell computes it"),
    f"export A=1\n{RUN} ${{X:-}}": (A, "--model-path m", "X is taken as its default"),
    f"# {RUN} --tp 4\n{RUN} --tp 8": ({}, "--model-path m --tp 8"),
    f"PID=$({RUN} --tp 4)\n{RUN} --a ';' --tp 8": ({}, "--model-path m --a ; --tp 8"),
    f"start() {{\n {RUN} --tp 8\n}}\nstart": ({}, "--model-path m --tp 8"),
    f"TP=8\n(cd /opt && make)\npkill -f '{RUN} --tp 4'\n{RUN} --tp $TP":
        ({}, "--model-path m --tp 8"),
    f"S='{RUN} --tp 8'\n$S --dp 2": ({}, "--model-path m --tp 8 --dp 2"),
    f"TP=8\necho \"TP=$TP, {RUN} --tp 4\"\nprintf a\n{RUN} --tp $TP": ({}, "--model-path m --tp 8"),
    f"E=\n{RUN} ${{E-8}} --tp ${{E:-2}} > >(tee -a log) 2>&1":
        ({}, "--model-path m --tp 2", "E is taken as its default"),
    f"#!/bin/bash\n{RUN} --x '{{\"a\": 1}}'\n": ({}, '--model-path m --x {"a": 1}'),
    f"srun --export ALL,{ON}=1 {RUN}": ({ON: "1"}, "--model-path m"),
    f"env -u {ON} {RUN}": ({}, "--model-path m"),
    f"tmux new '{RUN} --disaggregation-mode decode' \\; split '{RUN} {PREFILL}'":
        ({}, f"--model-path m {PREFILL}"),
    f"docker run $OPTS image {RUN}": ({}, "--model-path m", "a word before the launcher is unk"),
    f"./serve.sh --model-path m {PREFILL}":
        ({}, f"--model-path m {PREFILL}", "the flags follow no launcher"),
    f"for i in 0 1; do\n{RUN} --port 3000$i &\ndone":
        ({}, "--model-path m", "--port: i is not set in it"),
    f"docker rm -f a || true\n{RUN}": ({}, "--model-path m"),
    TWO: ({}, f"--model-path m {PREFILL} --tp 2"),
    # manifests
    LWS: ({}, "--model-path m --host 0.0.0.0", "--nnodes: LWS_GROUP_SIZE is filled in",
          "--node-rank: LWS_WORKER_INDEX is filled in"),
    COMPOSE: ({ON: "1"}, f"--model-path m {PREFILL} --tp 2", "OTHER: set outside the file"),
    'args: ["--model-path", "m", "--tp", "8"]': ({}, "--model-path m --tp 8"),
    "- --model-path\n- m\n- --tp\n- 8\n": ({}, "--model-path m --tp 8"),
    f"data:\n  run.sh: |\n    export A=1\n    {RUN} \\\n      --tp 8\n":
        (A, "--model-path m --tp 8"),
    f"spec: {{envs: [{{name: A, value: '1'}}], services: {{a: {{envs: [{{name: {ON}, value: m}}], "
    f"pod: {{command: [sh, -c, 'dynamo.sglang --model-path ${ON} --tp $(A)']}}}}}}}}":
        ({"A": "1", ON: "m"}, "--model-path m --tp 1"),
    f"envs: {{A: 1}}\nrun: |\n  set -e\n  {RUN} --tp 8\n": (A, "--model-path m --tp 8"),
    "a: {command: [sglang, serve, m], extraArgs: [--dp, 2], extraEnv: {A: 1}}": (
        {}, "--model-path m", "extraArgs: its Args were not read", "extraEnv: its variables were"),
    f"kind: ConfigMap\nmetadata: {{name: c}}\ndata: {{{ON}: '1'}}\n---\nkind: Pod\ncontainers: "
    "[{envFrom: [{configMapRef: {name: c}}], env: [{name: A, valueFrom: {configMapKeyRef: {name: "
    f"c, key: {ON}}}}}}}], command: [sglang, serve, m]}}]": ({ON: "1", "A": "1"}, "--model-path m"),
    f"kind: ConfigMap\ndata:\n  run.sh: |\n    set -e\n    exec {RUN}\n---\nkind: Pod\ncontainers: "
    f"[{{command: [bash, /s/run.sh], env: [{{name: {ON}, value: '1'}}]}}]":
        ({}, "--model-path m", "the variables of the container that runs it were not read"),
    "model-path: m\ntp-size: 8\n": ({}, ""),  # the file of --config itself
    "services: {a: {image: x, env_file: [a.env], command: python3 -m sglang.launch_server "
    "--model-path m}}": ({}, "--model-path m", "env_file: its variables were not read"),
    "services: {a: {command: sh -c 'sglang serve m --tp $$TP', environment: {TP: 8}}}":
        ({"TP": "8"}, "--model-path m --tp 8"),
    f"containers: [{{env: [{{name: {ON}, valueFrom: {{}}}}], command: [sglang, serve, m]}}]":
        ({}, "--model-path m", f"{ON}: set outside the file"),
    **{POD.format(command=command): (IN_POD, "--model-path m --tp 8", *OF_POD) for command in (
        'command: [python3, -m, sglang.launch_server, --model-path, $(MODEL), --tp, "8"]',
        "command: [sglang, serve, $(MODEL)]\n          args: [--tp, 8]",
        "command: [/bin/sh, -c]\n          args:\n            - |\n              set -e\n"
        "              exec python3 -m sglang.launch_server \\\n"
        '                --model-path "$MODEL" --tp 8 > log\n',
        "args:\n          - --model-path\n          - $(MODEL)\n          - --tp\n"
        '          - "8"',
    )},
    POD.format(command="envFrom: [{configMapRef: {name: a}}]\n          command: [sglang, serve, "
               "m, --x, $$(MODEL)]"):
        (IN_POD, "--model-path m --x $(MODEL)", *OF_POD, "envFrom: its variables were not read"),
}  # fmt: skip


@pytest.mark.parametrize("text", READ)
def test_a_line_is_read(text: str) -> None:
    """The line of the given role is read. Variables are replaced as Kubernetes or compose would."""
    environ, flags, *notes = READ[text]
    found = split(text, "prefill")
    assert (found.environ, " ".join(found.flags), found.stop) == (environ, flags, "")
    assert len(found.notes) == len(notes), found.notes
    assert [bool(re.search(re.escape(a), b)) for a, b in zip(notes, found.notes, strict=True)] == [
        True
    ] * len(notes), found.notes


STOPPED = {  # text that only a shell can resolve: a part of the error
    f"{RUN} $EXTRA --tp 8": "line 1: EXTRA is not set in it",
    f'{RUN} --tp "$1" "$@"': "line 1: 1 is an argument of the script",
    f'{RUN} --tp 8 "$@"': "line 1: only a shell computes it",
    f"docker run image sh -c 'exec {RUN} --tp $TP'": "line 1: TP is not set in it",
    f"TP=8\nread TP\nbash -c '{RUN} --tp ${{TP:-4}}'": "TP may be changed in line 2 (read)",
    f'{RUN} --x "$(a "b c" d)"': "line 1: only a shell computes it",
    f'A=8\nread A\n{RUN} --x "\\\\$A"': "line 3: A may be changed in line 2 (read)",
    f"TOKEN=sk cat <<EOF\na\nEOF\n{RUN}": "line 1 (<<) can set anything",
    f"ARGS=$(flags)\n{RUN} $ARGS": "ARGS is computed in line 1",
    f"ARGS=(--tp 2)\n{RUN} ${{ARGS[@]}}": "line 2: ARGS is computed in line 1",
    f"ARGS=(\n  {PREFILL}  # don't\n)\nARGS+=(--dp 2)\n{RUN} \"${{ARGS[@]}}\"":
        "line 5: ARGS is set again in line 4",
    f"CMD=({RUN})\nCMD+=(--dp 2)\nexec \"${{CMD[@]}}\"": "CMD is set again in line 2",
    f"CMD='{RUN}'\nCMD+=' --dp 2'\nexec $CMD": "CMD is set again in line 2",
    f"if true; then\n  CMD='{RUN}'\nfi\n$CMD --dp 2": "CMD is computed in line 2",
    f"TP=4\n((TP*=2))\n{RUN} --tp $TP": "TP may be changed in line 2 (((",
    f"(TP=4)\n{RUN} --tp ${{TP:-8}}": "TP is computed in line 1",
    f"(\nTP=4\n)\n{RUN} --tp ${{TP:-8}}": "TP may be changed in line 1 (()",
    f"run() {{ {RUN} --tp ${{TP:-8}}; }}\nTP=4\nrun": "TP may be changed in line 1 (run())",
    f"for TP in 4 8; do {RUN} --tp ${{TP:-2}}; done": "TP may be changed in line 1 (for)",
    f"TP=8\n[ -n \"$X\" ] && TP=4; {RUN} --tp $TP": "TP is set again in line 2",
    f"run() {{\n  {RUN}\n}}\nexport {ON}=1\nrun": f"{ON} is set after a launch in a function",
    f"export $(grep -v '^#' .env | xargs)\n{RUN}": "line 1 (export) can set anything",
    f"while read -r l; do export \"$l\"; done < .env\n{RUN}": "line 1 (export) can set anything",
    f"load() {{ . ./mixkv.env; }}\nload\n{RUN}": "line 1 (.) can set anything",
    f"if source a.env; then true; fi\n{RUN}": "line 1 (source) can set anything",
    f"[program:prefill]\ncommand={RUN}\nenvironment={ON}=1": "([program:prefill]) can set",
    f"command={RUN} --host %(ENV_HOST)s --tp 8": "a shell accepts no ( after a launch line",
    f"export {ON}=1\nsudo {RUN}": "sudo drops variables",
    f"export {ON}=1\nsrun --export=A=1 {RUN}": "--export drops variables",
    f"export {ON}=1\n/usr/bin/env - A=1 {RUN}": "env - drops variables",
    f"export {ON}=1\ntmux send-keys -t a '{RUN}' C-m": "tmux drops variables",
    f"{RUN} --speculative-num-draft-tokens $N": "line 1: N is not set in it",
    "sglang serve ~/m": "line 1: only a shell computes it",
    f"{RUN} --x {{a,b}}": "line 1: only a shell computes it",
    f'F="--tp 8"\nF+=" {ON}"\n{RUN} $F': "F is set again in line 2",
    f'F="--tp 8"\n[ "$ON" = 1 ] && F+=" {ON}"\n{RUN} $F': "F is set again in line 2",
    f'if [ "$R" = prefill ]; then TP=8; else TP=1; fi\n{RUN} --tp $TP': "line 1",
    f'if [ "$R" = prefill ]; then\n  TP=8\nelse\n  TP=1\nfi\n{RUN} --tp $TP': "in line 4",
    f'case "$1" in\n  prefill) TP=8 ;;\nesac\n{RUN} --tp $TP': "TP is computed in line 2",
    f"set_tp() {{ TP=8; }}\nset_tp\n{RUN} --tp $TP": "TP is computed in line 1",
    f"set_on() {{ export {ON}=1; }}\nset_on\n{RUN}": f"{ON} may be changed in line 1",
    f"TP=4\nTP=8\n{RUN} --tp $TP": "TP is set again in line 2",
    f"read TP\n{RUN} --tp ${{TP:-8}}": "TP may be changed in line 1 (read)",
    f"export {ON}=1\nfor i in 0 1; do\n{RUN}\ndone": f"{ON} may be changed in line 2 (for)",
    f"source /etc/mixkv.env\n{RUN} --tp 8": "line 1 (source) can set anything",
    f"set -a; . ./mixkv.env; set +a\n{RUN}": "line 1 (set -a) can set anything",
    f"if true; then . ./mixkv.env; fi\n{RUN}": "line 1 (.) can set anything",
    f"[Service]\nEnvironment={ON}=1\nExecStart=/usr/bin/{RUN}": "line 1 ([Service])",
    f"cat > run.sh <<EOF\n{RUN}\nEOF": "line 1 (<<) can set anything",
    f"declare -x {ON}=1\n{RUN}": f"{ON} is computed in line 1",
    f": ${{{ON}:=1}}; export {ON}\n{RUN}": f"{ON} is set again in line 1",
    f"{ON}=1\n{RUN}": f"{ON} is not exported in line 1",
    f"cd /opt && export {ON}=1 && {RUN}": f"{ON} is computed in line 1, or set under a cond",
    f"export {ON}=1\nunset {ON}\n{RUN}": f"{ON} may be changed in line 2 (unset)",
    f"export {ON}=1\nenv -u {ON} {RUN}": "env -u drops variables",
    f"{ON}=$1 {RUN}": f"{ON} 1 is an argument",
    "containers: [{command: [sglang, serve, m, --tp, $(TP)]}]": "TP is filled in by",
    "services: {a: {command: 'sglang serve m --tp ${TP:-8}'}}": "TP comes from compose's own shell",
}  # fmt: skip


@pytest.mark.parametrize("text", STOPPED)
def test_a_shell_is_not_imitated(text: str, tmp_path: Path) -> None:
    """The error names the line that stopped `plan`, and shows which command to run instead."""
    script = tmp_path / "a run.sh"
    script.write_text(text)
    with pytest.raises(ValueError, match="START-04") as caught:
        split(load(str(script)), "prefill")
    assert STOPPED[text] in str(caught.value)
    command = f"SGLANG_MIXKV_PLAN=prefill.json bash {shlex.quote(str(script))} exits before"
    assert command in str(caught.value)
    assert "plan --prefill prefill.json" in str(caught.value)


CONFIG = """\
kind: ConfigMap
metadata: {name: pair}
data:
  decode.yaml: "disaggregation-mode: decode\\ntp-size: 1"
  both: "prefill: {disaggregation-mode: prefill, tp-size: 2}"
  run~/it: python3 -m sglang.launch_server --model-path m --tp 3
---
spec:
  volumes: [{name: flags, configMap: {name: pair, items: [{key: decode.yaml, path: a.yaml}]}},
            {name: all, configMap: {name: pair}}]
  containers:
    - {command: [dynamo.sglang, --config, /etc/a.yaml],
       volumeMounts: [{name: flags, mountPath: /etc}]}
    - {command: [dynamo.sglang, --disagg-config, /x, --disagg-config-key, prefill],
       volumeMounts: [{name: all, mountPath: /x, subPath: both}]}
    - {command: [sleep, inf]}
"""


@pytest.mark.parametrize(
    ("pointer", "role", "mode", "size"),
    [("", "prefill", "prefill", 2), ("", "decode", "decode", 1),
     ("#/1/spec/containers/0", "decode", "decode", 1),
     ("#/1/spec/containers/1/command", "prefill", "", None),
     ("#/0/data/decode.yaml", "decode", "decode", 1),
     ("#/0/data/both/prefill", "prefill", "prefill", 2),
     ("#/0/data/run~0~1it", "decode", "", "3")],
)  # fmt: skip
def test_data_is_pointed_at(
    tmp_path: Path, pointer: str, role: str, mode: str, size: object
) -> None:
    """A pointer selects a container, a command, flags, a line, or YAML in a string. Files that a
    ConfigMap mounts are read."""
    file = tmp_path / "pair.yaml"
    file.write_text(CONFIG)
    found = split(load(f"{file}{pointer}"), role)
    given = dict(zip(found.flags, found.flags[1:], strict=False))
    assert (found.mode, {**found.config}.get("tp-size", given.get("--tp"))) == (mode, size)


ROOT = Path(__file__).parents[3]


def test_the_products_own_files() -> None:
    """Dynamo's workers are read. For a file that runs a launch script of an image, the error
    shows which command to run instead."""
    found = [
        split(load(f"{ROOT}/examples/kubernetes/dynamo.yaml"), r) for r in ("prefill", "decode")
    ]
    assert [(one.mode, one.environ[ON], one.is_dynamos) for one in found] == [
        ("prefill", "1", True), ("decode", "1", True),
    ]  # fmt: skip
    for file in ("examples/kubernetes/pair.yaml", "docker/compose.yaml"):
        with pytest.raises(ValueError, match=r"found none in .*decode\.json COMMAND exits"):
            split(load(f"{ROOT}/{file}"), "decode")


def test_a_role_of_a_recipe_has_its_variables(tmp_path: Path) -> None:
    """A role of an srt-slurm recipe has its variables, with or without a pointer to the role."""
    file = tmp_path / "recipe.yaml"
    file.write_text("b: {decode_environment: {A: 1}, sglang_config: {decode: {model-path: m}}}")
    for pointer in ("", "#/0/b/sglang_config/decode"):
        found = split(load(f"{file}{pointer}"), "decode")
        assert (found.environ, found.config) == ({"A": "1"}, {"model-path": "m"})


@pytest.mark.parametrize("word", ["[a", ",", "=(", "$(a ", "`", "{a,", "'a' "])
def test_a_long_script_is_read_at_once(word: str) -> None:
    """The time to read a word, as of base64, grows with its length, not with its square."""
    began = time.process_time()
    with suppress(ValueError):
        split(f"echo {{{word * 30_000}\n{RUN}", "prefill")
    assert time.process_time() - began < 2


def test_flags_of_a_function_are_not_a_whole_line() -> None:
    """If a script passes flags to a function that adds others, `plan` takes neither part alone."""
    script = f'run() {{\n  {RUN} --dp 2 "$@"\n}}\nrun --model-path m {PREFILL}\n'
    with pytest.raises(ValueError, match=r"got 2; choose one:\n  line 4\n  line 2\n"):
        split(script, "prefill")


def test_nodes_that_would_do_are_listed_ready_to_paste(tmp_path: Path) -> None:
    """If several nodes have a launch line, the error lists a flag for each and shows no values."""
    file = tmp_path / "a b.yaml"
    sides = (f"{RUN} --api-key secret --tp {tp} {PREFILL}".split() for tp in (2, 4))
    file.write_text(f"a/b: {{command: {next(sides)}}}\nc: [{{args: {next(sides)}}}]\n")
    with pytest.raises(ValueError, match="got 2; choose one") as caught:
        split(load(str(file)), "prefill")
    assert "secret" not in str(caught.value)
    pasted = re.findall(r"--prefill ('.*')\n", str(caught.value))
    assert [split(load(*shlex.split(one)), "prefill").flags[-3] for one in pasted] == ["2", "4"]
    with pytest.raises(ValueError, match=r"got 2; choose one:\n  line 1\n  line 2\n"):
        split(f"{RUN}\n{RUN}-2", "prefill")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "expected a launch line of SGLang or Dynamo, found none"),
        ("prefill.sh --enable-metrics", "and no such file is here"),
        ("--model-path 'm", "No closing quotation. Have the launch write"),
        ("command: [sh, -c]\nargs: serve 'm", "No closing quotation. Have the launch write"),
        (f"{RUN} \\\n  # --dp 8 \\\n  --tp 8", "--tp is cut off from its command"),
        (f"{RUN}\n  --tp 8", "--tp is cut off .* SGLANG_MIXKV_PLAN=prefill.json COMMAND exits"),
        ("kind: Pod\nspec: {containers: [{args: {a: b}, env: 5, command: [a, --b]}]}", "none"),
        ("args: [--model-path, m, --tp, {{ .Values.tp }}]", "render it first"),
        ("args:\n  - --tp\n  - {{ .Values.tp | quote }}\n  - --model-path", "render it first"),
        ("a: &a [*a]", "expected a launch line"),
        ("command: [sglang, serve]\nenv: [5]", "lists and mappings are not those of a manifest"),
        ("kind: ConfigMap\nmetadata: a", "lists and mappings are not those of a manifest"),
        (f"a: {'[' * 2000}", "START-04"),
        (Given("a: {b: 1}", "f", "/0/c"), "f has no node /0/c"),
        (Given("a: [1]", "f", "/0/a/7"), "has no node /0/a/7"),
        (Given("a", "f", "/3"), "has no node /3"),
    ],
)  # fmt: skip
def test_what_is_no_line(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        split(given, "prefill")
    assert re.match(r"\[MIXKV-START-04\] ", str(caught.value))


def test_a_file_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    """A folder, a FIFO and a file of 1 GiB are rejected in one sentence and not opened."""
    os.mkfifo(tmp_path / "fifo")
    with open(tmp_path / "large", "wb") as large:
        large.truncate(1 << 30)
    for name, words in ((".", "not a regular file"), ("fifo", "not a regular file"),
                        ("large", f"1,073,741,824 bytes; .* {LIMIT:,}")):  # fmt: skip
        for pointer in ("", "#/0/a"):
            with pytest.raises(ValueError, match=words):
                load(f"{tmp_path / name}{pointer}")
    assert load("-#/0/a", "text") == Given("text", "-", "/0/a")
    assert load("a#b") == Given("a#b")
