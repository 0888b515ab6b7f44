"""examples/kubernetes: the objects have the fields of their kinds, and both sides opt in alike.

manifests.py has the schemas.
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

from sglang_mixkv import config
from sglang_mixkv.tools import doctor, plan_server
from sglang_mixkv.tools.plan_pair import make_plan

from .manifests import Json, read, templates, wrong
from .pages import ROOT

FOLDER, SCRIPTS = ROOT / "examples" / "kubernetes", ROOT / "scripts" / "launch"
PAIR = ROOT / "mixkv_demo" / "models" / "mla"
TEXT_A = (FOLDER / "pair.yaml").read_text()
GROUP = read(TEXT_A)
FRONT = read((FOLDER / "front.yaml").read_text())
POLICY = read((FOLDER / "policy.yaml").read_text())
(MONITOR,) = read((FOLDER / "monitor.yaml").read_text()).values()
(DYNAMO,) = read((FOLDER / "dynamo.yaml").read_text()).values()
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


ITEMS = [*GROUP.values(), *FRONT.values(), *POLICY.values(), MONITOR, DYNAMO]


@pytest.mark.parametrize("item", ITEMS, ids=lambda i: i["kind"])
def test_every_object_has_the_fields_of_its_kind(item: Json) -> None:
    assert wrong(item) == []


def test_every_file_is_looked_at() -> None:
    names = {name for path in FOLDER.iterdir() for name in read(path.read_text())}
    assert names == {item["metadata"]["name"] for item in ITEMS}


def pod_of(item: Json) -> Json:
    """The first pod that it makes."""
    return next(templates(item["spec"]))["spec"]


PREFILL, ROUTER, PREFILL_POLICY = SERVERS[0], GROUP["mixkv-a-router"], POLICY["mixkv-a"]


@pytest.mark.parametrize(
    ("item", "change"),
    [
        (PREFILL, lambda i: i.update(apiVersion="leaderworkerset.x-k8s.io/v2")),
        (PREFILL, lambda i: i["spec"].update(leaderWorkerTemplates={})),
        (PREFILL, lambda i: i["spec"].update(startupPolicy="Leader")),
        (PREFILL, lambda i: template(i).pop("workerTemplate")),
        (PREFILL, lambda i: template(i).update(restartPolicy="Always")),
        (PREFILL, lambda i: template(i).update(size="2")),
        (PREFILL, lambda i: pod_of(i)["containers"][0].update(env=[{"name": "TP", "value": 8}])),
        (PREFILL, lambda i: pod_of(i)["containers"][0].update(readyProbe={})),
        (PREFILL, lambda i: pod_of(i)["containers"][0]["startupProbe"].update(port=1)),
        (PREFILL, lambda i: pod_of(i)["tolerations"][0].update(effects="NoSchedule")),
        (PREFILL, lambda i: i["metadata"].update(name="Mixkv")),
        (ROUTER, lambda i: i["spec"].update(replica=1)),
        (GROUP["mixkv-a"], lambda i: i["data"].update(PORT=30000)),
        (PREFILL_POLICY, lambda i: i["spec"]["ingress"][0].update(ports=["30000"])),
        (MONITOR, lambda i: i["spec"]["podMetricsEndpoints"][0].update(targetPort=30000)),
        (DYNAMO, lambda i: i["spec"].update(services={})),
        (DYNAMO, lambda i: i["spec"]["components"][1].update(type="Prefill")),
        (DYNAMO, lambda i: pod_of(i)["containers"][0].update(envs=[])),
    ],
)
def test_a_mistake_is_found(item: Json, change: Callable[[Json], Any]) -> None:
    item = copy.deepcopy(item)
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
    libraries = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}  # by which ranks meet
    known = scripts | libraries | config.KNOWN
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
    within, prometheus = group["ingress"]
    assert within == {"from": [{"podSelector": group["podSelector"]}]}
    assert prometheus["ports"] == [{"port": int(GROUP["mixkv-a"]["data"]["PORT"])}]
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


def test_prometheus_reads_the_servers_and_not_the_router() -> None:
    selector, (endpoint,) = MONITOR["spec"]["selector"], MONITOR["spec"]["podMetricsEndpoints"]
    (role_of,) = selector["matchExpressions"]
    for server in SERVERS:
        for pod in templates(server["spec"]):
            labels = pod["metadata"]["labels"]
            assert selector["matchLabels"].items() <= labels.items()
            assert labels[role_of["key"]] in role_of["values"]
            (container,) = pod["spec"]["containers"]
            named = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert str(named[endpoint["port"]]) == environment(container)["PORT"]
            assert "--enable-metrics" in " ".join(container["command"])
    assert "router" not in role_of["values"]


# ---------------------------------------------------------------- Dynamo


WORKERS = {
    component["type"]: component["podTemplate"]["spec"]["containers"][0]
    for component in DYNAMO["spec"]["components"] if component["type"] != "frontend"
}  # fmt: skip


def test_the_workers_of_dynamo_are_one_pair() -> None:
    """Opted in by the variable alone, since Dynamo's parser knows no flags of plugins."""
    servers = {}
    for name, worker in WORKERS.items():
        assert f"--disaggregation-mode={name}" in worker["args"]
        assert not any("mixkv" in word for word in worker["args"])
        models = [f"--model-path={PAIR}/target", f"--speculative-draft-model-path={PAIR}/drafter"]
        words = [*worker["args"], *models]  # what is said last counts
        variables = [f"{pair['name']}={pair['value']}" for pair in worker["env"]]
        servers[name] = plan_server.read(name, shlex.join([*variables, "dynamo.sglang", *words]))
        assert servers[name].enabled
    plan = make_plan(servers["prefill"], servers["decode"])
    assert plan.findings == ()
    assert plan.need is not None
    assert plan.need.needed


def test_decode_reaches_prefill_on_ports_that_are_known() -> None:
    bootstrap = {port["name"]: port["containerPort"] for port in WORKERS["prefill"]["ports"]}
    for worker in WORKERS.values():
        assert f"--disaggregation-bootstrap-port={bootstrap['bootstrap']}" in worker["args"]
    ports = [pair["value"] for pair in WORKERS["prefill"]["env"] if pair["name"] == config.PORT_ENV]
    assert [*ports, GROUP["mixkv-a"]["data"][config.PORT_ENV]] == ["28000", "28000"]
