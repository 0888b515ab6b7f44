"""What the API server would say of a manifest.

Kubernetes' own kinds, and the pods that other kinds make, are compared with Kubernetes' schemas
(kubernetes-validate, strict: a field that it does not know is refused). The outer fields of
LeaderWorkerSet (leaderworkerset.x-k8s.io/v1) and PodMonitor are written down here after their
documents, those of DynamoGraphDeployment after the recipes of Dynamo, whose wheels have no schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

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


NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
POD = {"type": "object"}  # Kubernetes' schema has it
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
MONITOR_SPEC = fields(
    "selector podMetricsEndpoints", podTargetLabels=many(TEXT),
    selector=fields(
        matchLabels=LABELS,
        matchExpressions=many(
            fields("key operator", key=TEXT, operator=one_of("In", "NotIn", "Exists"),
                   values=many(TEXT))
        ),
    ),
    podMetricsEndpoints=many(fields("port path", port=TEXT, path=TEXT, interval=TEXT)),
)  # fmt: skip
DYNAMO_SPEC = fields(
    "backendFramework components", backendFramework=one_of("sglang", "vllm", "trtllm"),
    components=many(
        fields(
            "name type podTemplate", name=TEXT, podTemplate=POD, replicas=COUNT,
            type=one_of("frontend", "worker", "prefill", "decode", "planner", "epp"),
            multinode=fields("nodeCount", nodeCount=COUNT), sharedMemorySize=TEXT,
        )
    ),
)  # fmt: skip
OTHERS: dict[tuple[str, str], Json] = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LWS_SPEC,
    ("monitoring.coreos.com/v1", "PodMonitor"): MONITOR_SPEC,
    ("nvidia.com/v1beta1", "DynamoGraphDeployment"): DYNAMO_SPEC,
}
"""Kinds that are not Kubernetes' own, by their `spec`."""


def of_kubernetes(item: Json) -> list[str]:
    """What Kubernetes' schema says of this object."""
    try:
        kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return [error.message]
    return []


def templates(item: Json) -> Iterator[Json]:
    """Pod templates in an object of another kind."""
    for key, value in item.items():
        if key in ("leaderTemplate", "workerTemplate", "podTemplate"):
            yield value
        for one in value if isinstance(value, list) else [value]:
            yield from templates(one) if isinstance(one, dict) else ()


def wrong(item: Json) -> list[str]:
    """What the API server would say of this object."""
    found = [] if NAME.fullmatch(item["metadata"]["name"]) else ["no name of a DNS label"]
    spec = OTHERS.get((item.get("apiVersion", ""), item.get("kind", "")))
    if spec is None:
        return found + of_kubernetes(item)
    schema = fields("apiVersion kind metadata spec", apiVersion=TEXT, kind=TEXT, spec=spec,
                    metadata=fields("name", name=TEXT, labels=LABELS))  # fmt: skip
    found += [error.message for error in Draft202012Validator(schema).iter_errors(item)]
    for template in templates(item["spec"]):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": template}
        found += of_kubernetes(pod)
    return found


def read(text: str) -> dict[str, Json]:
    """Name -> object."""
    return {item["metadata"]["name"]: item for item in yaml.safe_load_all(text)}
