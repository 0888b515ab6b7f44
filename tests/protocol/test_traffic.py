"""A rank or a link that is down, slow or stopped does not affect requests to other ranks.

Rank 1 of a prefill server with TP 2 sends draft KV only, since rank 0 alone sends the MLA target.
The fault affects server A and not server B, or one of two decode ranks that A serves. Links belong
to network namespaces that the tests create.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from rig.ring.special import Key
from rig.ring.timeouts import TIMEOUTS

from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode.breaker import FIRST_WAIT, LONGEST_WAIT

from .netns import Network, why_not
from .stages import STAGES
from .traffic import (
    AT,
    Act,
    Result,
    Ring,
    Traffic,
    failed,
    nobody_waited,
    run,
    states,
    untouched,
)

TARGET, DRAFT_ONLY, DECODE = ("prefill", 0), ("prefill", 1), ("decode", 1)
ALL_OF_A = TARGET, DRAFT_ONLY
PATIENCE = 3
TIMES = Times(PATIENCE)
RESTART_S = 4
EARLY_S = 0.3
"""A probe may seem to begin this much too early, since SGLang polls a request's end late."""
TRICKLE = "100kbit"
"""One fortieth of the bandwidth that the draft KV of these requests needs."""


def full(*values: Any, **more: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.full, **more)


def over(*by_default: str) -> Any:
    """Parametrize with these data planes by default, and with all of them under --full."""
    every = ("mooncake", "nixl", "nixl-tcp")
    some = [name if name in by_default else full(name) for name in every]
    return pytest.mark.parametrize("backend", some, indirect=True)


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"BOOTSTRAP_TIMEOUT": "30", "WAITING_TIMEOUT": "30"}
    own = {f"SGLANG_DISAGGREGATION_{name}": value for name, value in own.items()}
    for name, value in {**TIMEOUTS, **own, "SGLANG_MIXKV_PATIENCE": str(PATIENCE)}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Make a network with a host for each rank of A, one for B and one for decode."""
    if reason := why_not():
        pytest.skip(f"LINKS ARE NOT TESTED: {reason}")
    with Network(4) as network:
        yield network


def flow(
    rank: Key, seconds: float = 10, network: Network | None = None, every: float = 0.05, **more: Any
) -> Traffic:
    """Plan requests to the rank's server and to another one. The requests last through a fault of
    `seconds` and the breaker's probe, until they are warm again on a busy machine."""
    tail = int((min(seconds, LONGEST_WAIT) + 15) / every)
    most = int(2 * (AT + (seconds + 5) / every + tail))
    sides = {"decodes": 2} if rank[0] == "decode" else {"prefills": 2}
    if network is not None:
        hosts = {("prefill", at): network.hosts[min(at, 2)] for at in range(4)}
        more["hosts"] = {**hosts, ("decode", 0): network.hosts[3]}
    touched = rank if rank[0] == "decode" else TARGET
    return Traffic(most, tail, every, touched=touched, **{**sides, **more})


def for_a_while(seconds: float, begin: Callable[..., None], end: Callable[..., None]) -> Act:
    """Return an action that begins a fault on the running ring, waits, and ends the fault."""

    def act(ring: Ring) -> None:
        begin(ring)
        time.sleep(seconds)
        end(ring)

    return act


def stopped(rank: Key, seconds: float) -> Act:
    return for_a_while(seconds, lambda ring: ring.stop(rank), lambda ring: ring.go_on(rank))


def cut(network: Network, seconds: float, *hosts: int) -> Act:
    return for_a_while(
        seconds, lambda _: [*map(network.cut, hosts)], lambda _: [*map(network.mend, hosts)]
    )


def killed(*ranks: Key, restart: bool = False) -> Act:
    """Return an action that kills ranks, and starts them again later if `restart` is set."""
    return for_a_while(
        RESTART_S, lambda ring: ring.kill(*ranks), lambda ring: restart and ring.start(*ranks)
    )


def by_sglang_alone(result: Result) -> None:
    """Check that no request failed for a reason of the plugin's."""
    assert [one for one in failed(result.ended) if "sglang-mixkv" in one.reason] == []


# ---------------------------------------------------------------- the rank that sends only draft KV


@over("mooncake")
@pytest.mark.parametrize(
    ("end", "seconds"),
    [
        ("stopped", 6), full("killed", 6), full("its link down", 1), full("its link down", 40),
        full(TRICKLE, 8),
    ],
)  # fmt: skip
def test_a_fault_of_the_rank_that_sends_only_draft_kv(
    end: str, seconds: int, backend: str, request: pytest.FixtureRequest
) -> None:
    """If the rank dies, stops or has a slow link, no request fails, and requests to B are not
    affected. Once the breaker is open, only probes wait, one at a time. Over a slow link, requests
    that make progress wait longer."""
    network, host = None, DRAFT_ONLY[1]
    if "link" in end or end == TRICKLE:
        network = request.getfixturevalue("network")
    act = {
        "killed": lambda: killed(DRAFT_ONLY), "stopped": lambda: stopped(DRAFT_ONLY, seconds),
        "its link down": lambda: cut(network, seconds, host),
        TRICKLE: lambda: for_a_while(
            seconds, lambda _: network.slow(host, TRICKLE), lambda _: network.mend(host)
        ),
    }[end]()  # fmt: skip
    result = run(flow(DRAFT_ONLY, seconds + 4, network), {AT: act})
    assert result.found(late=network is None) == []
    assert failed(result.ended) == []
    untouched(result, TIMES.longest_wait)
    nobody_waited(result.ended, TIMES.whole_wait if end == TRICKLE else TIMES.longest_wait)
    assert states(result.before(AT)) == {"warm"}
    met = result.during(AT)
    if end == TRICKLE:
        assert "cold" in states(met)
    elif seconds > TIMES.longest_wait:
        assert "cold" in states(met[:8])
        assert states(met[8:]) == {"cold"}
    if end == "stopped":
        probes = [one for one in met[8:] if one.reason == "deadline"]
        assert probes
        for probe, following in pairwise(probes):
            gap = following.began - probe.began - probe.seconds
            assert gap > 2 * FIRST_WAIT - EARLY_S
    assert states(result.of(True)[-5:]) == {"cold" if end == "killed" else "warm"}


# ---------------------------------------------------------------- whole servers


@over("mooncake")
@pytest.mark.parametrize("same_ports", [False, full(True)], ids=["other ports", "the same ports"])
def test_a_server_is_restarted(same_ports: bool, backend: str) -> None:
    """SGLang fails the requests that the server had. Later requests are served, and are warm."""
    act = killed(*ALL_OF_A, restart=True)
    result = run(flow(TARGET, RESTART_S, same_ports=same_ports, restarts=1), {AT: act})
    assert result.found() == []
    untouched(result, TIMES.longest_wait)
    lost = failed(result.ended)
    assert 0 < len(lost) <= 8
    assert all("Lost connection with prefill instance" in one.reason for one in lost)
    assert states(result.before(AT)) == {"warm"}
    assert states(result.since(AT)[8:]) == {"warm"}


@over("mooncake")
@pytest.mark.parametrize("seconds", [6, full(40)])
def test_all_links_of_a_server_are_down(
    network: Network, seconds: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang decides what happens to the server's requests: they fail, or they wait until SGLang
    drops the server after about 4 s. Requests to other servers are not affected.

    After the links are up, the server's requests may wait for as long as the outage again, since
    SGLang's sockets from decode to prefill reconnect at the kernel's growing intervals. After an
    outage of 40 s over NIXL, all of them may fail, since SGLang's agent on prefill does not connect
    to decode again."""
    for what in ("BOOTSTRAP", "WAITING"):
        monkeypatch.setenv(f"SGLANG_DISAGGREGATION_{what}_TIMEOUT", "50")
    result = run(flow(TARGET, seconds, network), {AT: cut(network, seconds, 0, 1)})
    assert result.found(late=False) == []
    untouched(result, TIMES.longest_wait)
    by_sglang_alone(result)
    nobody_waited(result.of(True), seconds)
    last = result.of(True)[-5:]
    cut_off = [one for one in last if "NIXL_ERR_REMOTE_DISCONNECT" in one.reason]
    assert states(last) == {"warm"} or (seconds == 40 and cut_off == last)


# ---------------------------------------------------------------- any rank


@pytest.mark.full
@pytest.mark.parametrize(
    ("rank", "seconds", "tokens"),
    [
        (DRAFT_ONLY, 40, 96), (TARGET, 40, 96),
        (DECODE, 40, 320),  # SGLang is writing to this rank, and Mooncake gives up the write
    ],
)  # fmt: skip
def test_a_stopped_rank_continues_correctly(
    rank: Key, seconds: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is stopped for longer than all time limits of requests, reads, messages and slots.
    When it continues the work that it had started, every byte is still correct."""
    monkeypatch.setenv("SGLANG_MIXKV_PATIENCE", "1")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "50")
    result = run(flow(rank, seconds, tokens=tokens), {AT: stopped(rank, seconds)})
    assert result.found(late=False) == []
    untouched(result, Times().longest_wait)
    by_sglang_alone(result)
    if rank == DRAFT_ONLY:
        assert failed(result.ended) == []
        nobody_waited(result.ended, Times().longest_wait)
    assert states(result.of(True)[-5:]) == {"warm"} or tokens > 96


@pytest.mark.parametrize(
    ("end", "rank", "backend"),
    [
        pytest.param("cut", DRAFT_ONLY, "mooncake", id="cut"),
        full("cut", DRAFT_ONLY, "nixl-tcp", id="cut-nixl-tcp"),
        *(full(end, rank, "mooncake", id=f"{end}-{rank[0]}-{rank[1]}")
          for end in ("stopped", "killed") for rank in (DRAFT_ONLY, TARGET, DECODE)),
    ],
    indirect=["backend"],
)  # fmt: skip
def test_a_fault_at_each_stage_of_a_room(
    end: str, rank: Key, backend: str, request: pytest.FixtureRequest
) -> None:
    """At each stage of a room, a link is cut for a second, or a rank is stopped or killed. If a
    prefill rank is killed, its server ends too. While the test pauses decode's channel at a stage,
    all requests wait; `held` is the longest such pause."""
    network = request.getfixturevalue("network") if end == "cut" else None
    others, held = [one for one in ALL_OF_A if one != rank] if rank in ALL_OF_A else [], [0.0]

    def at(stage: str) -> Act:
        def begin(ring: Ring) -> None:
            began = time.monotonic()
            if network is not None:
                network.cut(rank[1])
            else:
                {"killed": ring.kill, "stopped": ring.stop}[end](rank)
            held[0] = max(held[0], time.monotonic() - began)

        def act(ring: Ring) -> None:
            ring.at_stage(stage, lambda: begin(ring))
            if network is not None:
                time.sleep(1)
                network.mend(rank[1])
            elif end == "killed":
                killed(*others)(ring)
                ring.start(rank, *others)
            else:
                time.sleep(2)
                ring.go_on(rank)
            time.sleep(0.5)

        return act

    acts = {AT + number: at(stage) for number, stage in enumerate(STAGES)}
    restarts = len(STAGES) if end == "killed" else 0
    lasts = 12 if end == "cut" else 40
    of = flow(rank, lasts, network, every=0.1, tokens=32, held=rank, restarts=restarts)
    result = run(of, acts)
    assert result.found(late=False) == []
    untouched(result, TIMES.longest_wait + held[0])
    by_sglang_alone(result)
    if end != "killed" and rank == DRAFT_ONLY:
        assert failed(result.ended) == []
        nobody_waited(result.ended, TIMES.longest_wait + held[0])
    assert states(result.of(True)[-5:]) == {"warm"}
