"""docker/compose.yaml: the fields of the compose specification, and ports that do not meet."""

from __future__ import annotations

import json
from importlib import resources

import pytest
import yaml
from jsonschema.validators import validator_for

from .pages import ROOT

COMPOSE = (ROOT / "docker" / "compose.yaml").read_text()
SCHEMA = json.loads(
    resources.files("check_jsonschema")
    .joinpath("builtin_schemas", "vendor", "compose-spec.json").read_text()
)  # fmt: skip


def of_compose(text: str) -> list[str]:
    item = yaml.safe_load(text)
    return [error.message for error in validator_for(SCHEMA)(SCHEMA).iter_errors(item)]


def test_compose_has_the_fields_of_the_compose_specification() -> None:
    assert of_compose(COMPOSE) == []


@pytest.mark.parametrize(
    ("right", "mistake"),
    [
        ("healthcheck: &", "healthchecks: &"),
        ("condition: service_healthy", "condition: healthy"),
        ("network_mode: host", "network_mode: 7"),
        ("capabilities: [gpu]", "capability: [gpu]"),
    ],
)
def test_a_mistake_in_compose_is_found(right: str, mistake: str) -> None:
    assert right in COMPOSE
    assert of_compose(COMPOSE.replace(right, mistake)) != []


def test_servers_on_one_host_have_ports_apart() -> None:
    """With DP-attention SGLang takes ports from PORT + 233 on: five, and one for each DP rank."""
    services = yaml.safe_load(COMPOSE)["services"]
    ports = sorted(int(services[name]["environment"]["PORT"]) for name in ("prefill", "decode"))
    assert ports[1] - ports[0] > 233 + 5 + 8
