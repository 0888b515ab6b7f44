"""Links between ranks, in namespaces of the tests' own: down, slow, one or all of a server.

Rank 1 of a prefill server of TP 2 sends draft KV alone, since one rank sends an MLA target. Server
`A` meets the fault, server `B` does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from rig.evidence import kind
from rig.netns import Network, why_not
from rig.special import Key
from rig.stages import STAGES
from rig.traffic import TIMEOUTS, Ring, Traffic, failed, nobody_waited, run, states, untouched

from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode.breaker import LONGEST_WAIT

PATIENCE = 3
TIMES = Times(PATIENCE)
AT = 80  # requests
DRAFT_ONLY, A_HOSTS = 1, (0, 1)
TRICKLE, QUARTER, HUNDREDTH = "100kbit", "1mbit", "100mbit"
"""Of what the draft KV of these requests needs, a fortieth and a quarter; of what a pair of veth
devices carries on two cores, some 10 Gbit/s, a hundredth."""


def full(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


backends = pytest.mark.parametrize("backend", ["mooncake", full("nixl-tcp")], indirect=True)


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TIMEOUTS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SGLANG_MIXKV_PATIENCE", str(PATIENCE))


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(f"LINKS ARE NOT TESTED: {reason}")
    with Network(4) as network:
        yield network


def hosts(network: Network) -> dict[Key, tuple[int, str]]:
    """Each rank of A has a host, B has one, decode has one."""
    return {
        **{("prefill", rank): network.hosts[min(rank, 2)] for rank in range(4)},
        ("decode", 0): network.hosts[3],
    }


def flow(network: Network, seconds: float = 10, **more: Any) -> Traffic:
    """Long enough for what lasts so long, and for the probe after it."""
    tail = 20 * (min(seconds, LONGEST_WAIT) + 6)
    most = 2 * (AT + 20 * (seconds + 5) + tail)
    return Traffic(
        int(most), int(tail), prefills=2, every=0.05, hosts=hosts(network), **more
    )  # fmt: skip


def for_a_while(
    network: Network, seconds: float, begin: Callable[[int], None], *numbers: int
) -> Callable[[Ring], None]:
    """Something befalls the links of these hosts."""

    def act(_: Ring) -> None:
        for number in numbers:
            begin(number)
        time.sleep(seconds)
        for number in numbers:
            network.mend(number)

    return act


@backends
@pytest.mark.parametrize("seconds", [full(1), 5, full(40)])
def test_a_link_goes_down(network: Network, seconds: int, backend: str) -> None:
    """That of the host whose rank sends draft KV alone, in the middle of requests."""
    cut = for_a_while(network, seconds, network.cut, DRAFT_ONLY)
    what = f"the link of the rank that sends draft KV alone is down for {seconds} s"
    result = run(flow(network, seconds), {AT: cut}, what)
    assert result.found(late=False) == []
    assert failed(result.ended) == []
    untouched(result, TIMES.longest_wait)
    nobody_waited(result.ended, TIMES.longest_wait)
    assert states(result.before(AT)) == {"warm"}
    if seconds > TIMES.longest_wait:
        assert "cold" in states(result.during(AT)[:8])
        assert states(result.during(AT)[8:]) == {"cold"}
    assert states(result.of(True)[-5:]) == {"warm"}


@backends
def test_a_link_goes_down_at_each_stage(network: Network, backend: str) -> None:
    """Of a room, one after the other."""

    def at(stage: str) -> Callable[[Ring], None]:
        def act(ring: Ring) -> None:
            ring.at_stage(stage, lambda: network.cut(DRAFT_ONLY))
            time.sleep(1)
            network.mend(DRAFT_ONLY)
            time.sleep(2)

        return act

    acts = {AT + number: at(stage) for number, stage in enumerate(STAGES)}
    what = "the link of the rank that sends draft KV alone is down for 1 s at each stage of a room"
    result = run(flow(network, 60, tokens=32), acts, what)
    assert result.found(late=False) == []
    assert failed(result.ended) == []
    untouched(result, TIMES.longest_wait)
    nobody_waited(result.ended, TIMES.longest_wait)
    assert states(result.of(True)[-5:]) == {"warm"}


@backends
@pytest.mark.parametrize("rate", [TRICKLE, full(QUARTER), full(HUNDREDTH)])
def test_a_link_is_slow(network: Network, rate: str, backend: str) -> None:
    """Draft KV may come late there, or not at all; progress is waited for a little longer."""
    slow = for_a_while(network, 8, lambda number: network.slow(number, rate), DRAFT_ONLY)
    what = f"the link of the rank that sends draft KV alone carries {rate}/s for 8 s"
    result = run(flow(network), {AT: slow}, what)
    assert result.found(late=False) == []
    assert failed(result.ended) == []
    untouched(result, TIMES.longest_wait)
    nobody_waited(result.ended, TIMES.whole_wait)
    assert states(result.before(AT)) == {"warm"}
    if rate == TRICKLE:
        assert "cold" in states(result.during(AT))
    assert states(result.of(True)[-5:]) == {"warm"}


@backends
@pytest.mark.parametrize(("seconds", "beside"), [(10, False), full(10, True), full(40, True)])
def test_all_links_of_a_server_go_down(
    network: Network, seconds: int, beside: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests fail or wait by SGLang's own rules, which gives it up after some 4 s, and for
    no other reason than without the plugin. The others notice nothing.

    Later its requests may wait for as long again: decode's sockets to the prefill ranks' own ports,
    SGLang's, try to connect at the kernel's growing intervals."""
    for what in ("BOOTSTRAP", "WAITING"):
        monkeypatch.setenv(f"SGLANG_DISAGGREGATION_{what}_TIMEOUT", "50")
    cut = for_a_while(network, seconds, network.cut, *A_HOSTS)
    what = f"all links of a prefill server are down for {seconds} s"
    result = run(flow(network, seconds), {AT: cut}, what)
    assert result.found(late=False) == []
    untouched(result, TIMES.longest_wait)
    lost = {kind(one.reason) for one in failed(result.of(True))}
    assert not any("sglang-mixkv" in reason for reason in lost)
    nobody_waited(result.of(True), seconds)
    assert states(result.of(True)[-5:]) == {"warm"}
    if beside:
        stock = run(replace(flow(network, seconds), stock=True), {AT: cut}, what)
        assert failed(stock.before(AT)) == []
        assert len(stock.since(AT)) > 100
        assert lost <= {kind(one.reason) for one in failed(stock.of(True))}
