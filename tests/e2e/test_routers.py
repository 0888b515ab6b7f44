"""Test pairs behind SGLang's router and behind its successor smg: all policies, retries after
decode has refused a prefill server, and the errors that a client gets.

The servers start once for the module, since a router takes only a second to start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

from mixkv_demo import launch
from mixkv_demo.client import post
from mixkv_demo.launch import Launch, Topology
from mixkv_demo.pair import prompts
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import Deployment, bring_up, silent, start
from sglang_mixkv.tools.client import RequestFailed

from .conftest import ENABLE, START_TIMEOUT, TP1, TP2, Reference, all_arrived, answered, same

pytestmark = [START_TIMEOUT, pytest.mark.full]

MODULES = {"sglang-router": ("sglang_router.launch_router",), "smg": ("smg", "launch")}
COMMON = ("random", "round_robin", "cache_aware", "power_of_two")
CASES = [
    *((router, policy) for router in MODULES for policy in COMMON),
    *(("smg", policy) for policy in ("consistent_hashing", "prefix_hash", "least_load")),
]

Prefill = tuple[Launch, int]
"""A prefill server and its bootstrap port."""


@dataclass(frozen=True)
class Servers:
    """Two prefill servers with the plugin, one without, and a decode server with the plugin."""

    fitting: list[Prefill]
    stock: Prefill
    decode: Launch

    @property
    def all(self) -> tuple[Launch, ...]:
        return (*(one for one, _ in (*self.fitting, self.stock)), self.decode)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Fleet() as fleet:
        prefills = []
        for number, flags in enumerate((ENABLE, ENABLE, ())):
            topology = Topology(TP1, TP2, flags, ENABLE)
            prefill, decode, port = launch.prefill_and_decode("mla", topology)
            prefills.append((replace(prefill, name=f"prefill {number}"), port))
        start(fleet, [*(one for one, _ in prefills), decode])
        yield Servers(prefills[:2], prefills[2], decode)


@contextmanager
def router(
    name: str, servers: Servers, prefills: Sequence[Prefill], *flags: str
) -> Iterator[Deployment]:
    """Start this router in front of these prefill servers and the decode server."""
    (first, port), *others = prefills
    entry = launch.router(first, servers.decode, port, *others, module=MODULES[name], flags=flags)
    with Fleet() as fleet:
        bring_up(fleet, [entry], silent)
        yield Deployment(fleet, entry.url, servers.all)


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_each_routing_policy(
    name: str, policy: str, servers: Servers, reference: Reference
) -> None:
    expected = reference("mla", ()).fixed
    with router(name, servers, servers.fitting, "--policy", policy) as deployment:
        answers, counted = answered(deployment, expected, prompts())
    same(answers, expected)
    all_arrived(counted)


@pytest.mark.parametrize("retries", [(), ("--disable-retries",)], ids=["retries", "none"])
@pytest.mark.parametrize("name", MODULES)
def test_a_client_gets_the_reason_of_a_refusal(
    name: str, retries: tuple[str, ...], servers: Servers
) -> None:
    with (
        router(name, servers, [servers.stock], *retries) as deployment,
        pytest.raises(RequestFailed, match="MIXKV-PAIR-01"),
    ):
        deployment.ask(prompts()[0])


@pytest.mark.parametrize("name", MODULES)
def test_a_retry_reaches_a_server_with_the_plugin(
    name: str, servers: Servers, reference: Reference
) -> None:
    expected = reference("mla", ()).fixed
    prefills = [servers.stock, servers.fitting[0]]
    with router(name, servers, prefills, "--policy", "round_robin") as deployment:
        same([deployment.ask(prompt) for prompt in prompts()], expected)


@pytest.mark.parametrize("name", MODULES)
def test_a_client_gets_an_abort_by_prefill(name: str, servers: Servers) -> None:
    """Prefill aborts the request while decode is paused, before decode has contacted prefill."""
    (prefill, _), decode = servers.fitting[0], servers.decode
    with (
        router(name, servers, servers.fitting[:1], "--disable-retries") as deployment,
        ThreadPoolExecutor(1) as pool,
    ):
        post(f"{decode.url}/pause_generation", {"mode": "in_place"}).raise_for_status()
        asked = pool.submit(deployment.ask, prompts()[0])
        for _ in range(10):  # prefill may not have the request yet
            post(f"{prefill.url}/abort_request", {"abort_all": True}).raise_for_status()
            wait([asked], timeout=0.3)
        post(f"{decode.url}/continue_generation", {}).raise_for_status()
        with pytest.raises(RequestFailed, match=r"[Aa]bort"):
            asked.result()
