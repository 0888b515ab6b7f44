"""The launch line in what people have: commands, scripts, manifests, compose files.

Shapes are those of public lines: SGLang's documentation and issues, recipes of Dynamo,
LeaderWorkerSets, RoleBasedGroups, StormServices, scripts of benchmarks.
"""

from __future__ import annotations

import re

import pytest

from sglang_mixkv.tools.plan_text import split

RUN = "python3 -m sglang.launch_server --model-path m"
ON = "SGLANG_ENABLE_MIXKV"
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
LWS = """\
kind: LeaderWorkerSet
spec:
  leaderWorkerTemplate:
    leaderTemplate: &node
      spec:
        containers:
          - command: [python3, -m, sglang.launch_server]
            args:
              - --model-path
              - m
              # - --tp
              # - "8"
              - --nnodes=2
              - --node-rank
              - $(LWS_WORKER_INDEX)
    workerTemplate: {spec: {containers: [{command: [sh, -c, "python3 -m sglang.launch_server
      --model-path m --nnodes=2 --node-rank $LWS_WORKER_INDEX > log 2>&1"]}]}}
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
      --model-path ${MODEL:-m} --disaggregation-mode prefill --tp 2
    environment: [SGLANG_ENABLE_MIXKV=1, OTHER]
  decode:
    <<: *server
    command: sglang serve m --disaggregation-mode decode --tp 4
    environment: {SGLANG_ENABLE_MIXKV: 1, NCCL_DEBUG:}
  router: {command: [python3, -m, sglang_router.launch_router, --pd-disaggregation]}
"""
SCRIPT = """\
#!/usr/bin/env bash\r
set -euo pipefail  # don't go on\r
export SGLANG_ENABLE_MIXKV=1 MODEL="${MODEL:-m}"\r
SGLANG_LOCAL=1\r
curl --fail http://registry/health; mkdir --parents /log\r
for rank in 0; do\r
  CUDA_VISIBLE_DEVICES=0 python3 -m sglang.launch_server --model-path $MODEL \\\r
    --disaggregation-mode prefill --tp 2 \\\r
    --host "$(hostname -i | head --lines 1)" 2>&1 | tee --append /log/prefill &\r
done\r
python3 -m sglang_router.launch_router --pd-disaggregation --prefill http://127.0.0.1:30000\r
"""
OPTIONS = """\
ARGS=(
    --model-path m   # the target
    --tp 2
)
ARGS+=(--json-model-override-args '{"a": 1}')
option="--page-size 64 "
option+=" --dtype bfloat16"
sglang serve "${ARGS[@]}" ${option}
"""
TWO = f"{RUN} --disaggregation-mode prefill --tp 2\n{RUN} --disaggregation-mode=decode --tp 4"


@pytest.mark.parametrize(
    ("text", "environ", "flags", "unread"),
    [
        # commands
        (f"{RUN} --tp 8 > log 2>&1 &", {}, "--model-path m --tp 8", []),
        ("--model-path m --tp 8  # one rank per GPU", {}, "--model-path m --tp 8", []),
        (f"A=1 nohup env {ON}=1 sglang serve m --x '# no; comment'", {"A": "1", ON: "1"},
         "--model-path m --x # no; comment", []),
        (f"docker run --gpus '\"device=0\"' -e A=1 --env={ON}=1 image bash -c \"{RUN} --tp 8\"",
         {"A": "1", ON: "1"}, "--model-path m --tp 8", []),
        (f"docker run --env {ON}=1 --entrypoint sh image -c 'exec {RUN} --tp $TP'", {ON: "1"},
         "--model-path m --tp $TP", ["$TP"]),
        (f"srun --nodes=2 numactl --membind=0 {RUN} --node-rank $SLURM_PROCID", {},
         "--model-path m --node-rank $SLURM_PROCID", ["$SLURM_PROCID"]),
        (f"pylet submit '{RUN} --port $PORT' --name a\npylet submit '{RUN} --port $PORT' --name b",
         {}, "--model-path m --port $PORT", ["$PORT"]),
        ("python /opt/sglang/launch_server.py --model-path m", {}, "--model-path m", []),
        ("prefill.sh --enable-metrics", {}, "--enable-metrics", []),
        # scripts
        (SCRIPT, {ON: "1", "MODEL": "m", "CUDA_VISIBLE_DEVICES": "0"},
         "--model-path m --disaggregation-mode prefill --tp 2 --host "
         "$(hostname\xa0-i\xa0head\xa0--lines\xa01)",
         ["SGLANG_LOCAL", "$(hostname\xa0-i\xa0head\xa0--lines\xa01)"]),
        (OPTIONS, {}, '--model-path m --tp 2 --json-model-override-args {"a": 1} --page-size 64 '
         "--dtype bfloat16", []),
        (f"if true; then\n  export A=1\nfi\n{ON}=1\nexport {ON}\n{RUN}", {"A": "1", ON: "1"},
         "--model-path m", []),
        (f"cat > run.sh <<EOF\n{RUN}\nEOF", {}, "--model-path m", []),
        (TWO, {}, "--model-path m --disaggregation-mode prefill --tp 2", []),
        # manifests
        (LWS, {}, "--model-path m --nnodes=2 --node-rank $(LWS_WORKER_INDEX)",
         ["$(LWS_WORKER_INDEX)"]),
        (COMPOSE, {ON: "1", "OTHER": ""}, "--model-path m --disaggregation-mode prefill --tp 2",
         []),
        ('args: ["--model-path", "m", "--tp", "8"]', {}, "--model-path m --tp 8", []),
        ("- --model-path\n- m\n- --tp\n- 8\n", {}, "--model-path m --tp 8", []),
        (f"data:\n  run.sh: |\n    export A=1\n    {RUN} \\\n      --tp 8\n", {"A": "1"},
         "--model-path m --tp 8", []),
        *((POD.format(command=command), {ON: "1", "MODEL": "m"},
           "--model-path m --tp 8", [])
          for command in (
              'command: [python3, -m, sglang.launch_server, --model-path, $(MODEL), --tp, "8"]',
              "command: [sglang, serve, $(MODEL)]\n          args: [--tp, 8]",
              "command: [/bin/sh, -c]\n          args:\n            - |\n              set -e\n"
              "              exec python3 -m sglang.launch_server \\\n"
              '                --model-path "$MODEL" --tp 8 > log\n',
              "args:\n          - --model-path\n          - $(MODEL)\n          - --tp\n"
              '          - "8"',
          )),
        (POD.format(command=f"envFrom: []\n          command: [bash, -c, '{RUN}']").replace(
            "envFrom: []", "envFrom: [{configMapRef: {name: a}}]"),
         {ON: "1", "MODEL": "m"}, "--model-path m", ["envFrom"]),
    ],
)  # fmt: skip
def test_the_line_that_starts_a_server(
    text: str, environ: dict[str, str], flags: str, unread: list[str]
) -> None:
    """Of two the one of the role; Kubernetes and compose fill variables in, too."""
    found = split(text, "prefill")
    assert (found.environ, " ".join(found.flags), [*found.unread]) == (environ, flags, unread)


def test_the_other_role_of_the_same_text() -> None:
    for text in (TWO, COMPOSE):
        found = split(text, "decode")
        assert found.flags[-1] == "4"
        assert found.environ.get("NCCL_DEBUG", "None") == "None"


@pytest.mark.parametrize(
    ("text", "is_dynamos"),
    [(RUN, False), ("python3 -m dynamo.sglang --model-path m", True),
     ("python3 -m dynamo.sglang.worker --model-path m", True), ("--model-path m", False)],
)  # fmt: skip
def test_dynamos_launcher(text: str, is_dynamos: bool) -> None:
    assert split(text).is_dynamos == is_dynamos


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected one launch line, got 0\n"),
        ("prefill.sh", "got 0\n.*or a script, manifest"),
        ("--model-path 'm", "No closing quotation"),
        (f"{RUN}\n{RUN}-2", "got 2\n  .*launch_server --model-path m\n  .*--model-path m-2\n"),
        ("vllm serve a --x 1\nother --y 2", r"got 2\n   --x 1\n   --y 2"),
        (f"{RUN} \\\n  # --dp 8 \\\n  --tp 8", "--tp is cut off from its command"),
        (f"{RUN}\n  --tp 8", "--tp is cut off from its command"),
        (f"{RUN}\n  # --dp 8\n  --tp 8", "--tp is cut off from its command"),
        ("kind: Pod\nspec: {containers: [{args: {a: b}, env: 5, command: [a, --b]}]}", "START-04"),
        ("a: &a [*a]", "recursion depth"),
    ],
)
def test_no_line_or_more_than_one(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        split(text)
    assert re.match(r"\[MIXKV-START-04\] ", str(caught.value))
