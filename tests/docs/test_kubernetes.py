"""examples/kubernetes: the objects have the fields of their kinds, and both sides opt in alike.

The schema is strict and small: the fields of leaderworkerset.x-k8s.io/v1, and of pods those that
the example uses. A field that it does not know is refused, as the API server's strict mode does.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from sglang_mixkv import config
from sglang_mixkv.tools import doctor, plan_server
from sglang_mixkv.tools.plan_pair import make_plan

from .pages import ROOT

FOLDER, SCRIPTS = ROOT / "examples" / "kubernetes", ROOT / "scripts" / "launch"
PAIR = ROOT / "mixkv_demo" / "models" / "mla"
Json = dict[str, Any]

TEXT, COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1}
LABELS = {"type": "object", "additionalProperties": TEXT}


def fields(required: str = "", **known: Any) -> Json:
    """An object with these fields and no other."""
    return {"type": "object", "additionalProperties": False, "properties": known,
            "required": required.split()}  # fmt: skip


def many(item: Json) -> Json:
    return {"type": "array", "items": item, "minItems": 1}


def one_of(*words: str) -> Json:
    return {"enum": list(words)}


NAMED = fields("name", name={"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"},
               labels=LABELS)  # fmt: skip
PROBE = fields(
    "httpGet", httpGet=fields("path port", path=TEXT, port=COUNT), periodSeconds=COUNT,
    timeoutSeconds=COUNT, failureThreshold=COUNT, initialDelaySeconds=COUNT,
)  # fmt: skip
CONTAINER = fields(
    "name image command", name=TEXT, image=TEXT, command=many(TEXT), args=many(TEXT),
    env=many(fields("name value", name=TEXT, value={"type": "string"})),
    envFrom=many(fields("configMapRef", configMapRef=fields("name", name=TEXT))),
    ports=many(fields("containerPort", containerPort=COUNT, name=TEXT)),
    startupProbe=PROBE, readinessProbe=PROBE, livenessProbe=PROBE,
    resources=fields(limits=LABELS, requests=LABELS),
    securityContext=fields(capabilities=fields(add=many(TEXT))),
    volumeMounts=many(
        fields("name mountPath", name=TEXT, mountPath=TEXT, readOnly={"type": "boolean"})
    ),
)  # fmt: skip
VOLUME = fields(
    "name", name=TEXT,
    persistentVolumeClaim=fields("claimName", claimName=TEXT, readOnly={"type": "boolean"}),
    emptyDir=fields(medium=one_of("", "Memory"), sizeLimit=TEXT),
)  # fmt: skip
POD = fields(
    "spec", metadata=fields(labels=LABELS, annotations=LABELS),
    spec=fields(
        "containers", containers=many(CONTAINER), initContainers=many(CONTAINER),
        volumes=many(VOLUME), terminationGracePeriodSeconds=COUNT, nodeSelector=LABELS,
    ),
)  # fmt: skip
SHARE = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+%$"}]}
LWS_SPEC = fields(
    "leaderWorkerTemplate", replicas={"type": "integer", "minimum": 0},
    startupPolicy=one_of("LeaderCreated", "LeaderReady"),
    networkConfig=fields("subdomainPolicy", subdomainPolicy=one_of("Shared", "UniquePerReplica")),
    rolloutStrategy=fields(
        "type", type=one_of("RollingUpdate"),
        rollingUpdateConfiguration=fields(partition=SHARE, maxUnavailable=SHARE, maxSurge=SHARE),
    ),
    leaderWorkerTemplate=fields(
        "workerTemplate", leaderTemplate=POD, workerTemplate=POD, size=COUNT,
        restartPolicy=one_of(
            "Default", "None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"
        ),
        subGroupPolicy=fields(
            subGroupPolicyType=one_of("LeaderWorker", "LeaderExcluded"), subGroupSize=COUNT
        ),
        volumeClaimTemplates=many({"type": "object"}),
        persistentVolumeClaimRetentionPolicy={"type": "object"},
    ),
)  # fmt: skip
SELECTOR = fields("matchLabels", matchLabels=LABELS)
KINDS: dict[tuple[str, str], Json] = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {"spec": LWS_SPEC},
    ("v1", "ConfigMap"): {"data": {"type": "object", "additionalProperties": {"type": "string"}}},
    ("v1", "Service"): {
        "spec": fields(
            "selector ports", selector=LABELS,
            ports=many(fields("port", port=COUNT, targetPort=COUNT, name=TEXT)),
        )
    },
    ("networking.k8s.io/v1", "NetworkPolicy"): {
        "spec": fields(
            "podSelector policyTypes ingress", podSelector=SELECTOR,
            policyTypes=many(one_of("Ingress", "Egress")),
            ingress=many(fields(**{"from": many(fields(podSelector=SELECTOR))},
                                ports=many(fields("port", port=COUNT)))),
        )
    },
    ("apps/v1", "Deployment"): {
        "spec": fields(
            "selector template", replicas=COUNT, template=POD,
            selector=SELECTOR,
        )
    },
}  # fmt: skip


def wrong(item: Json) -> list[str]:
    """What the API server would say of this object."""
    body = KINDS.get((item.get("apiVersion", ""), item.get("kind", "")))
    if body is None:
        return [f"unknown kind {item.get('apiVersion')} {item.get('kind')}"]
    required = " ".join(["apiVersion kind metadata", *body])
    schema = fields(required, apiVersion=TEXT, kind=TEXT, metadata=NAMED, **body)
    return [error.message for error in Draft202012Validator(schema).iter_errors(item)]


def read(text: str) -> dict[str, Json]:
    """Name -> object."""
    return {item["metadata"]["name"]: item for item in yaml.safe_load_all(text)}


TEXT_A = (FOLDER / "pair.yaml").read_text()
GROUP = read(TEXT_A)
FRONT = read((FOLDER / "front.yaml").read_text())
POLICY = read((FOLDER / "policy.yaml").read_text())
SERVERS = [item for item in GROUP.values() if item["kind"] == "LeaderWorkerSet"]


def template(server: Json) -> Json:
    found: Json = server["spec"]["leaderWorkerTemplate"]
    return found


def pods(server: Json) -> list[Json]:
    """The pod templates of a server: workers', and the leader's where it has one."""
    found = template(server)
    return [found[key]["spec"] for key in ("leaderTemplate", "workerTemplate") if key in found]


def role(server: Json) -> str:
    return str(template(server)["workerTemplate"]["metadata"]["labels"]["role"])


def environment(container: Json) -> dict[str, str]:
    """What Kubernetes sets: ConfigMaps first, then the container's own."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= GROUP[source["configMapRef"]["name"]]["data"]
    return found | {pair["name"]: pair["value"] for pair in container.get("env", [])}


# ---------------------------------------------------------------- the schema


ITEMS = [*GROUP.values(), *FRONT.values(), *POLICY.values()]


@pytest.mark.parametrize("item", ITEMS, ids=lambda i: i["kind"])
def test_every_object_has_the_fields_of_its_kind(item: Json) -> None:
    assert wrong(item) == []


def pod_of(item: Json) -> Json:
    return pods(item)[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda i: i.update(apiVersion="leaderworkerset.x-k8s.io/v2"),
        lambda i: i["spec"].update(leaderWorkerTemplates={}),
        lambda i: i["spec"].update(startupPolicy="Leader"),
        lambda i: template(i).pop("workerTemplate"),
        lambda i: template(i).update(restartPolicy="Always"),
        lambda i: template(i).update(size="2"),
        lambda i: pod_of(i)["containers"][0].update(env=[{"name": "TP", "value": 8}]),
        lambda i: pod_of(i)["containers"][0].update(readyProbe={}),
        lambda i: pod_of(i)["containers"][0]["startupProbe"].update(port=1),
        lambda i: i["metadata"].update(name="Mixkv"),
    ],
)
def test_a_mistake_is_found(change: Callable[[Json], Any]) -> None:
    item = copy.deepcopy(SERVERS[0])
    change(item)
    assert wrong(item) != []


# ---------------------------------------------------------------- what it says


def test_both_sides_opt_in_alike_on_every_pod() -> None:
    assert sorted(map(role, SERVERS)) == ["decode", "prefill"]
    containers = [
        container for server in SERVERS for pod in pods(server)
        for container in (*pod["initContainers"], *pod["containers"])
    ]  # fmt: skip
    sources = {source["configMapRef"]["name"] for each in containers for source in each["envFrom"]}
    assert len(sources) == 1
    assert all(config.resolve(None, environment(each)).enabled for each in containers)
    assert len({each["image"] for each in containers}) == 1


def test_every_variable_is_known() -> None:
    """To the scripts, to the plugin, or to LeaderWorkerSet, which sets these three."""
    listed = (SCRIPTS / "common.sh").read_text().split("\nfail()")[0]
    scripts = set(re.findall(r"\b[A-Z][A-Z_]+\b", listed))
    own = {config.ENABLE_ENV, config.ALLOW_UNTESTED_ENV, config.STATS_DIR_ENV}
    known = scripts | own | {option.environ for option in config.OPTIONS}
    given = {"LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"}
    routers = GROUP["mixkv-a-router"]["spec"]["template"]["spec"]["containers"]
    servers = [c for server in SERVERS for pod in pods(server) for c in pod["containers"]]
    for container in (*routers, *servers):
        words = " ".join(container["command"])
        set_there = set(re.findall(r"\b([A-Z_]+)=", words))
        assert {*environment(container), *set_there} - known == set()
        assert set(re.findall(r"\$(\w+)", words)) <= given


def printed(server: Json, index: int) -> str:
    """The command that this pod runs: its container's, with the scripts of this repository."""
    (container,) = pods(server)[0]["containers"]
    environ = {
        **environment(container), "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
        "LWS_GROUP_SIZE": str(template(server)["size"]), "LWS_WORKER_INDEX": str(index),
        "LWS_LEADER_ADDRESS": "first.node",
        "MODEL": str(PAIR / "target"), "DRAFT": str(PAIR / "drafter"), "LAUNCHER": "printf %s\\n",
    }  # fmt: skip
    done = subprocess.run(
        container["command"], env=environ, text=True, capture_output=True, check=True
    )
    return shlex.join(["python", "-m", "sglang.launch_server", *done.stdout.split("\n")[:-1]])


def test_the_commands_of_all_pods_are_one_pair() -> None:
    """They run as they stand, each node of a server with its rank; the plan finds nothing."""
    first = {}
    for server in SERVERS:
        nodes = template(server)["size"]
        lines = [printed(server, index) for index in range(nodes)]
        assert all(" --enable-mixkv" in line for line in lines)
        if nodes > 1:
            ranks = [re.findall(r"--node-rank (\d)", line) for line in lines]
            assert ranks == [[str(index)] for index in range(nodes)]
            assert all("--dist-init-addr first.node:5000" in line for line in lines)
        first[role(server)] = plan_server.read(role(server), lines[0])
    assert make_plan(first["prefill"], first["decode"]).findings == ()


def test_probes_and_the_router_ask_the_ports_that_servers_open() -> None:
    (router,) = GROUP["mixkv-a-router"]["spec"]["template"]["spec"]["containers"]
    for server in SERVERS:
        (container,) = pods(server)[0]["containers"]
        ports = [port["containerPort"] for port in container["ports"]]
        assert str(ports[0]) == environment(container)["PORT"]
        for probe in ("startupProbe", "readinessProbe"):
            assert container[probe]["httpGet"] == {"path": "/health", "port": ports[0]}
        name = server["metadata"]["name"]
        urls = environment(router)[role(server).upper()]
        bootstrap = f",{ports[1]}" if role(server) == "prefill" else ""
        assert urls == f"http://{name}-0.{name}:{ports[0]}{bootstrap}"
        assert f"--disaggregation-mode {role(server)} " in printed(server, 0)


def test_the_doctor_runs_before_a_model_is_loaded() -> None:
    for server in SERVERS:
        for pod in pods(server):
            (container,) = pod["initContainers"]
            assert container["command"][:4] == ["python3", "-m", "sglang_mixkv", "doctor"]
            args = doctor._parser().parse_args(container["command"][4:])
            assert (args.enable_mixkv, args.no_seams) == (True, True)


def labels_of(item: Json) -> list[Json]:
    """Those of the pods that it makes."""
    if item["kind"] == "Deployment":
        return [item["spec"]["template"]["metadata"]["labels"]]
    found = template(item)
    keys = ("leaderTemplate", "workerTemplate")
    return [found[key]["metadata"]["labels"] for key in keys if key in found]


def test_the_policy_is_for_all_pods_of_the_group_and_lets_in_its_own_alone() -> None:
    """And everybody to the router, on the port that it listens on."""
    group, router = (item["spec"] for item in POLICY.values())
    makers = [item for item in GROUP.values() if item["kind"] != "ConfigMap"]
    pods = [labels for item in makers for labels in labels_of(item)]
    assert all(group["podSelector"]["matchLabels"].items() <= labels.items() for labels in pods)
    assert group["ingress"] == [{"from": [{"podSelector": group["podSelector"]}]}]
    wanted = router["podSelector"]["matchLabels"].items()
    assert [labels["role"] for labels in pods if wanted <= labels.items()] == ["router"]
    (front,) = FRONT.values()
    assert router["ingress"] == [{"ports": [{"port": front["spec"]["ports"][0]["targetPort"]}]}]


def test_two_groups_never_meet() -> None:
    """The documented change makes another group that shares no name, label or address."""
    (change,) = re.findall(r"sed '(.*)' pair\.yaml", TEXT_A)
    done = subprocess.run(["sed", change], input=TEXT_A, text=True, capture_output=True, check=True)
    other = read(done.stdout)
    assert len(other) == len(GROUP)
    assert set(other) & set(GROUP) == set()
    code = [line for line in done.stdout.splitlines() if not line.lstrip().startswith("#")]
    assert not re.search(r"mixkv-a|group: a\b", "\n".join(code))
    assert all(wrong(item) == [] for item in other.values())
    (front,) = FRONT.values()
    labels = [items["mixkv-" + g + "-router"]["spec"]["template"]["metadata"]["labels"]
              for g, items in (("a", GROUP), ("b", other))]  # fmt: skip
    assert [front["spec"]["selector"].items() <= found.items() for found in labels] == [True, False]
