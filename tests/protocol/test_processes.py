"""What becomes of the others' requests when a prefill rank, its port or its link is gone.

Rank 1 of a prefill server of TP 2 sends draft KV alone, since one rank sends an MLA target. Server
`A` meets the fault, server `B` does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from rig.flow import TIMEOUTS, Result, Ring, run, typical
from rig.flow_rank import Ended, Flow
from rig.netns import Network, why_not
from rig.special import Key

from sglang_mixkv.channel.times import Times

A, B = 0, 1
DRAFT_ONLY = ("prefill", 1)
ALL_OF_A = ("prefill", 0), DRAFT_ONLY
PATIENCE = 3
BOUND = Times(PATIENCE).longest_wait
"""How long a request waits for draft KV that makes no progress, from its target's arrival."""
SLACK = 1.0
"""What a whole request takes besides on two busy cores."""
RESTART_S = 4
LATE = (
    "waiting left", "parts left", "request_status", "transfer_infos", "req_to_decode_prefix_len",
)  # fmt: skip
"""What messages leave for a time that come when their request has ended: SGLang's and ours."""


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TIMEOUTS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SGLANG_MIXKV_PATIENCE", str(PATIENCE))


def states(requests: list[Ended]) -> set[str]:
    return {one.state for one in requests}


def in_order(result: Result, *, late: bool = False) -> None:
    """Every byte is right, and nothing is left. `late`: but what the mended link brought to A."""
    excused = [f"prefill {rank}: left behind: " for rank in range(2)]
    found = [
        line for line in result.problems
        if not (late and line.startswith(tuple(excused)) and any(word in line for word in LATE))
    ]  # fmt: skip
    assert found == []


def nobody_failed(result: Result) -> None:
    assert [one for one in result.ended if one.status != "success"] == []


def nobody_waited(requests: list[Ended]) -> None:
    assert [one for one in requests if one.seconds > BOUND + SLACK] == []


def untouched(result: Result, mark: int = 80) -> None:
    """Requests to B are warm, and none of them has waited for one to A."""
    assert [one for one in result.of(B) if (one.status, one.state) != ("success", "warm")] == []
    nobody_waited(result.of(B))
    assert typical(result.since(mark, B)) < 3 * typical(result.before(mark, B))


def cold_from(result: Result, mark: int) -> None:
    """Requests to A are warm until that action, and cold from it on, soon without a wait."""
    assert states(result.before(mark, A)) == {"warm"}
    since = [one for one in result.since(mark, A) if one.began < result.end_of(mark)]
    assert "cold" in states(since[:8])
    assert states(since[8:]) == {"cold"}
    nobody_waited(since)


@pytest.mark.transports(every=3)
@pytest.mark.parametrize("end", ["killed", "stopped", "its port closed"])
def test_a_rank_that_sends_draft_kv_alone(end: str, backend: str) -> None:
    """It dies, or it goes on later. No request fails; B's notice nothing."""
    act, back = {
        "killed": (lambda ring: ring.kill(DRAFT_ONLY), None),
        "stopped": (lambda ring: ring.stop(DRAFT_ONLY), lambda ring: ring.go_on(DRAFT_ONLY)),
        "its port closed": (
            lambda ring: ring.close_port(DRAFT_ONLY), lambda ring: ring.open_port(DRAFT_ONLY),
        ),
    }[end]  # fmt: skip
    flow = Flow(700 if back else 300, prefills=2, every=0.05)
    result = run(flow, {80: act, **({200: back} if back else {})})
    in_order(result)
    nobody_failed(result)
    untouched(result)
    cold_from(result, 80)
    if back:
        assert states(result.since(200, A)[-5:]) == {"warm"}


def test_the_second_hundred_lose_no_time() -> None:
    """The breaker: three requests wait in vain, and after them probes alone."""
    acts = {100: lambda ring: ring.stop(DRAFT_ONLY), 300: lambda ring: ring.go_on(DRAFT_ONLY)}
    result = run(Flow(300, at_once=1), acts)
    in_order(result)
    nobody_failed(result)
    nobody_waited(result.ended)
    before, second = result.ended[10:100], result.ended[200:]
    waited = [one for one in result.ended[100:] if one.reason == "deadline"]
    print(
        f"typical request before {typical(before) * 1e3:.1f} ms, of the second hundred "
        f"{typical(second) * 1e3:.1f} ms, {len(waited)} waited"
    )
    assert states(second) == {"cold"}
    assert typical(second) < 1.5 * typical(before)
    assert sum(one.reason == "deadline" for one in second) <= 2  # probes
    assert len(waited) <= 3 + 4


def restart(ring: Ring) -> None:
    """As SGLang ends a server, and an operator starts it again."""
    ring.kill(*ALL_OF_A)
    time.sleep(RESTART_S)
    ring.start(*ALL_OF_A)


@pytest.mark.transports(every=1)
def test_a_server_is_restarted(backend: str) -> None:
    """Requests fail that it had, by SGLang's own word; later ones are served, and warm."""
    result = run(Flow(400, prefills=2, every=0.05), {80: restart})
    in_order(result)
    untouched(result)
    lost = [one for one in result.ended if one.status != "success"]
    assert 0 < len(lost) <= 8
    assert all("Lost connection with prefill instance" in one.reason for one in lost)
    assert states(result.before(80, A)) == {"warm"}
    assert states(result.since(80, A)[8:]) == {"warm"}


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


@pytest.mark.parametrize(
    "backend", ["mooncake", pytest.param("nixl-tcp", marks=pytest.mark.full)], indirect=True
)
def test_a_link_goes_down(network: Network, backend: str) -> None:
    """That of the host whose rank sends draft KV alone, in the middle of requests."""
    flow = Flow(700, prefills=2, every=0.05, hosts=hosts(network))
    result = run(flow, {80: lambda _: network.cut(1), 200: lambda _: network.mend(1)})
    in_order(result, late=True)
    nobody_failed(result)
    untouched(result)
    cold_from(result, 80)
    assert states(result.since(200, A)[-5:]) == {"warm"}


def test_all_links_of_a_server_go_down(network: Network) -> None:
    """Its requests fail or wait by SGLang's own rules. The others notice nothing."""

    def cut(_: Ring) -> None:
        network.cut(0)
        network.cut(1)

    def mend(_: Ring) -> None:
        time.sleep(10)  # SGLang gives it up after some four
        network.mend(0)
        network.mend(1)

    flow = Flow(700, prefills=2, every=0.05, hosts=hosts(network))
    result = run(flow, {80: cut, 120: mend})
    in_order(result, late=True)
    untouched(result)
    lost = [one for one in result.of(A) if one.status != "success"]
    assert all("sglang-mixkv" not in one.reason for one in lost)
    assert states(result.since(120, A)[-5:]) == {"warm"}
