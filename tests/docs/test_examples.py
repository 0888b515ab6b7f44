"""The files for Kubernetes, compose and GitHub, which no test can run, are valid by the schemas of
these programs, and the commands in the examples start one pair of servers."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from sglang_mixkv.tools import plan_server
from sglang_mixkv.tools.plan_pair import make_plan

from .pages import ROOT, bash

SCRIPTS, PAIR = ROOT / "scripts" / "launch", ROOT / "mixkv_demo" / "models" / "mla"
EXAMPLES = ROOT / "examples"
ITEMS = [
    item for path in sorted((EXAMPLES / "kubernetes").iterdir()) if path.stem != "kustomization"
    for item in yaml.safe_load_all(path.read_text())
]  # fmt: skip
OVERLAYS = sorted(path.name for path in (EXAMPLES / "overlays").iterdir())
OTHERS = ("LeaderWorkerSet", "PodMonitor", "DynamoGraphDeployment", "HTTPRoute")
"""Custom resources. Kubernetes has schemas only for their pod templates."""


def of_kind(kind: str, items: list[dict[str, Any]] = ITEMS) -> list[dict[str, Any]]:
    return [item for item in items if item["kind"] == kind]


@cache
def rendered(folder: str) -> list[dict[str, Any]]:
    """Return the objects that `kubectl apply -k` would create."""
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", str(EXAMPLES / folder)]
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    return [*yaml.safe_load_all(done.stdout)]


def templates(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the pod templates in an object."""
    for key, value in item.items():
        if key in ("leaderTemplate", "workerTemplate", "podTemplate"):
            yield value
        for one in value if isinstance(value, list) else [value]:
            yield from templates(one) if isinstance(one, dict) else ()


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item["kind"])
def test_every_field_is_valid_in_kubernetes(item: dict[str, Any]) -> None:
    """Validation is strict, so an unknown field is an error."""
    objects = [item]
    if item["kind"] in OTHERS:
        head: dict[str, Any] = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}}
        objects = [head | {"template": template} for template in templates(item["spec"])]
    for one in objects:
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_field_of_an_overlay_is_valid(name: str) -> None:
    for item in rendered(f"overlays/{name}"):
        test_every_field_is_valid_in_kubernetes(item)


def test_files_for_compose_and_github_are_valid() -> None:
    compose = resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
    jsonschema.validate(
        yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text()),
        json.loads(compose.read_text()),
    )
    for file in (ROOT / ".github" / "workflows").iterdir():
        workflow = file.read_text()
        as_read = yaml.safe_load(workflow.replace("\non:", '\n"on":'))  # YAML 1.1: `on` is true
        jsonschema.validate(as_read, get_builtin_schema("vendor.github-workflows"))
        used = re.findall(r"uses: (\S+)", workflow)
        assert [action for action in used if not re.search("@[0-9a-f]{40}$", action)] == []
    for file in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir():
        form = yaml.safe_load(file.read_text())
        jsonschema.validate(form, get_builtin_schema("vendor.github-issue-forms"))
        needed = {one["id"] for one in form["body"] if one.get("validations", {}).get("required")}
        assert needed >= ({"doctor", "plan"} if file.name == "fault.yml" else {"question"})
    dependabot = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())
    jsonschema.validate(dependabot, get_builtin_schema("vendor.dependabot"))


# ---------------------------------------------------------------- the page's commands


KUBECTL = 'kubectl() { if [ "$1" = kustomize ]; then command kubectl "$@"; else cat; fi; }'


def applied(part: str, folder: str) -> list[dict[str, Any]]:
    """Return the objects that the docs/deploy.md block with this text passes to kubectl."""
    (block,) = [block for block in bash(ROOT / "docs" / "deploy.md") if part in block.text]
    done = subprocess.run(
        ["bash", "-c", f"{KUBECTL}\n{block.text}"], cwd=ROOT / folder, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def test_a_second_group_has_the_same_objects_as_the_first() -> None:
    first = rendered("kubernetes")
    of_group = [item for item in ITEMS if item["metadata"].get("labels", {}).get("group") == "a"]
    assert sorted(item["kind"] for item in first) == sorted(item["kind"] for item in of_group)
    second = applied("kubectl kustomize", "examples/kubernetes")
    renamed = (
        json.dumps(first).replace("mixkv-a", "mixkv-b").replace('"group": "a"', '"group": "b"')
    )
    assert sorted(map(json.dumps, json.loads(renamed))) == sorted(map(json.dumps, second))


def test_the_prometheus_rule_contains_the_alerts() -> None:
    (rule,) = applied("PrometheusRule", ".")
    assert rule["kind"] == "PrometheusRule"
    text = json.dumps(rule["spec"]).replace("https://git.example.com/sglang-mixkv/docs/", "docs/")
    assert json.loads(text) == yaml.safe_load((ROOT / "docs" / "alerts.yml").read_text())


def test_the_canary_splits_traffic_between_two_groups() -> None:
    """The route's two backends are the services of groups a and b, and their weights add up to
    100 %."""
    (route,) = of_kind("HTTPRoute")
    ((first, second),) = [rule["backendRefs"] for rule in route["spec"]["rules"]]
    service = next(s for s in of_kind("Service") if s["metadata"]["name"] == first["name"])
    ports = [port["port"] for port in service["spec"]["ports"]]
    assert [first["port"]] == [second["port"]] == ports
    assert second["name"] == first["name"].replace("mixkv-a", "mixkv-b")
    assert first["weight"] + second["weight"] == 100


def test_an_upgrade_in_place_replaces_all_images_of_a_server() -> None:
    """The patch in docs/operate.md replaces existing fields, and no old image remains."""
    (block,) = [b for b in bash(ROOT / "docs" / "operate.md") if "workerTemplate" in b.text]
    script = f"IMAGE=new:1\nkubectl() {{ printf '%s\\n' \"$@\"; }}\n{block.text}"
    done = subprocess.run(["bash", "-c", script], text=True, capture_output=True, check=True)
    words = done.stdout
    (server,) = [s for s in of_kind("LeaderWorkerSet") if s["metadata"]["name"] in words]
    server = json.loads(json.dumps(server))
    (patch,) = re.findall(r"(?m)^\[.*\]$", words)
    for change in json.loads(patch):
        *folders, last = change["path"].strip("/").split("/")
        place: Any = server
        for name in folders:
            place = place[int(name) if name.isdigit() else name]
        assert change["op"] == "replace"
        assert last in place
        place[last] = change["value"]
    images = re.findall(r'"image": "([^"]*)"', json.dumps(server))
    assert {*images} == {"new:1"}


# ---------------------------------------------------------------- one pair of servers


def environment(container: dict[str, Any], items: list[dict[str, Any]] = ITEMS) -> dict[str, str]:
    """Return a container's variables: those of its ConfigMaps, then its own. Values from pod fields
    are `field`."""
    maps = {item["metadata"]["name"]: item["data"] for item in of_kind("ConfigMap", items)}
    names = [source["configMapRef"]["name"] for source in container.get("envFrom", [])]
    found = {key: value for name in names for key, value in maps[name].items()}
    return found | {pair["name"]: pair.get("value", "field") for pair in container.get("env", [])}


def printed(
    server: dict[str, Any], index: int, items: list[dict[str, Any]] = ITEMS, **changed: str
) -> str:
    """Return the launch command of pod number `index` of a server, with this repository's
    scripts."""
    template = server["spec"]["leaderWorkerTemplate"]
    (container,) = next(templates(template))["spec"]["containers"]
    environ = {
        **environment(container, items), "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
        "LWS_GROUP_SIZE": str(template["size"]), "LWS_WORKER_INDEX": str(index),
        "LWS_LEADER_ADDRESS": "first.node",
        "MODEL": str(PAIR / "target"), "DRAFT": str(PAIR / "drafter"), "LAUNCHER": "printf %s\\n",
        **changed,
    }  # fmt: skip
    done = subprocess.run(
        container["command"], env=environ, text=True, capture_output=True, check=True
    )
    return shlex.join(["python", "-m", "sglang.launch_server", *done.stdout.split("\n")[:-1]])


@pytest.mark.parametrize("name", ["", *OVERLAYS])
def test_the_commands_of_all_pods_are_one_pair(name: str) -> None:
    """Each node of a server has its own rank, and `plan` has no finding."""
    first, items = {}, rendered(f"overlays/{name}") if name else ITEMS
    for server in of_kind("LeaderWorkerSet", items):
        nodes = server["spec"]["leaderWorkerTemplate"]["size"]
        lines = [printed(server, index, items) for index in range(nodes)]
        assert ("--disaggregation-transfer-backend nixl" in lines[0]) is (name == "nixl")
        for index, line in enumerate(lines if nodes > 1 else []):
            assert f"--node-rank {index}" in line
            assert "--dist-init-addr first.node:5000" in line
        role = lines[0].partition("--disaggregation-mode ")[2].split()[0]
        first[role] = plan_server.read(role, lines[0])
        assert first[role].enabled
    assert make_plan(first["prefill"], first["decode"]).findings == ()


def test_pods_on_the_host_network_use_the_hosts_devices() -> None:
    """The pods request no RDMA device plugin, and the channel listens on the host's address."""
    servers = of_kind("LeaderWorkerSet", rendered("overlays/host-network"))
    assert len(servers) == len(of_kind("LeaderWorkerSet"))
    for template in (template for server in servers for template in templates(server["spec"])):
        pod = template["spec"]
        (container,) = pod["containers"]
        assert pod["hostNetwork"]
        assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"
        assert {*container["resources"]["limits"]} == {"nvidia.com/gpu"}
        paths = {v["name"]: v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
        mounted = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        assert paths
        assert paths.items() <= mounted.items()
        assert environment(container)["SGLANG_HOST_IP"] == "field"


def test_a_stock_group_is_not_checked_by_the_doctor(tmp_path: Path) -> None:
    """The `sed` command in docs/deploy.md switches both variables off, so the init container does
    not run `doctor`."""
    (said,) = re.findall(r"`(s/MIXKV[^`]*)`", (ROOT / "docs" / "deploy.md").read_text())
    (settings,) = of_kind("ConfigMap")
    pair = ROOT / "examples" / "kubernetes" / "pair.yaml"
    done = subprocess.run(["sed", said, pair], text=True, capture_output=True, check=True)
    stock = next(yaml.safe_load_all(done.stdout))["data"]
    changed = {key: value for key, value in stock.items() if value != settings["data"][key]}
    assert changed == {"SGLANG_ENABLE_MIXKV": "0", "MIXKV": "0"}
    (tmp_path / "python3").write_text("#!/bin/sh\necho $*\n")
    (tmp_path / "python3").chmod(0o755)
    for server in of_kind("LeaderWorkerSet"):
        assert "--enable-mixkv" in printed(server, 0)
        assert "--enable-mixkv" not in printed(server, 0, **changed)
        (init,) = next(templates(server["spec"]))["spec"]["initContainers"]
        for variables, ran in (({}, "doctor --enable-mixkv"), (changed, "")):
            environ = {**environment(init), **variables}
            environ["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
            asked = subprocess.run(
                init["command"], env=environ, text=True, capture_output=True, check=True
            )
            assert ran in asked.stdout
            assert bool(asked.stdout) == bool(ran)


def test_the_dynamo_workers_are_one_pair() -> None:
    """The workers opt in only by the environment variable, since Dynamo's parser rejects a plugin's
    flags."""
    servers = {}
    (dynamo,) = of_kind("DynamoGraphDeployment")
    models = f"--model-path={PAIR}/target", f"--speculative-draft-model-path={PAIR}/drafter"
    for component in dynamo["spec"]["components"]:
        (worker,) = component["podTemplate"]["spec"]["containers"]
        if (role := component["type"]) != "frontend":
            variables = [f"{name}={value}" for name, value in environment(worker).items()]
            line = [*variables, "dynamo.sglang", *worker["args"], *models]
            servers[role] = plan_server.read(role, shlex.join(line))
            assert servers[role].enabled
    plan = make_plan(servers["prefill"], servers["decode"])
    assert (plan.findings, plan.need and plan.need.needed) == ((), True)
