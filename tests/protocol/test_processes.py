"""What becomes of the others' requests when a rank or its port is gone, or stands still.

Rank 1 of a prefill server of TP 2 sends draft KV alone, since one rank sends an MLA target. Server
`A` meets the fault, server `B` does not; or one of two decode ranks that `A` serves does.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from rig.special import Key
from rig.stages import STAGES
from rig.traffic import (
    SLACK,
    TIMEOUTS,
    Act,
    Result,
    Ring,
    Traffic,
    failed,
    nobody_waited,
    run,
    states,
    typical,
    untouched,
)

from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode.breaker import LONGEST_WAIT

TARGET, DRAFT_ONLY, DECODE = ("prefill", 0), ("prefill", 1), ("decode", 1)
ALL_OF_A = TARGET, DRAFT_ONLY
NAMES = {
    TARGET: "the rank that sends the target", DRAFT_ONLY: "the rank that sends draft KV alone",
    DECODE: "one of two decode ranks",
}  # fmt: skip
PATIENCE = 3
STOPS = [
    *(pytest.param(DRAFT_ONLY, seconds, id=f"draft-{seconds}") for seconds in (2, 8, 40)),
    *(pytest.param(TARGET, seconds, id=f"target-{seconds}") for seconds in (2, 8, 40)),
    *(pytest.param(DECODE, seconds, id=f"decode-{seconds}") for seconds in (2, 8)),
]
BOUND = Times(PATIENCE).longest_wait
"""How long a request waits for draft KV that makes no progress, from its target's arrival."""
AT = 80  # requests
RESTART_S = 4
WRITE_S = 30
"""After which Mooncake gives up a write that makes no progress (MC_TCP_PROGRESS_TIMEOUT_SEC)."""
RESTARTS = {"stopped": 0, "killed": len(STAGES)}


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TIMEOUTS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SGLANG_MIXKV_PATIENCE", str(PATIENCE))


def full(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


def flow(rank: Key, seconds: float = 10, every: float = 0.05, **more: Any) -> Traffic:
    """Requests to what the rank belongs to, and to others: long enough for what lasts so long, and
    for the probe after it."""
    tail = int(20 * (min(seconds, LONGEST_WAIT) + 6))
    most = int(2 * (AT + 20 * (seconds + 5) + tail))
    sides = {"decodes": 2} if rank[0] == "decode" else {"prefills": 2}
    touched = rank if rank[0] == "decode" else ("prefill", 0)
    return Traffic(most, tail, touched=touched, every=every, **sides, **more)


def stopped(rank: Key, seconds: float) -> Act:
    def act(ring: Ring) -> None:
        ring.stop(rank)
        time.sleep(seconds)
        ring.go_on(rank)

    return act


def killed(*ranks: Key, restart: bool = False) -> Act:
    """As SGLang ends a server, and an operator starts it again."""

    def act(ring: Ring) -> None:
        ring.kill(*ranks)
        time.sleep(RESTART_S)
        if restart:
            ring.start(*ranks)

    return act


def port_closed(rank: Key, seconds: float) -> Act:
    def act(ring: Ring) -> None:
        ring.close_port(rank)
        time.sleep(seconds)
        ring.open_port(rank)

    return act


def by_sglang_alone(result: Result) -> None:
    """Requests that failed, did for its reasons."""
    assert [one for one in failed(result.ended) if "sglang-mixkv" in one.reason] == []


@pytest.mark.transports(1)
@pytest.mark.parametrize("end", ["killed", "stopped", "its port closed"])
def test_a_rank_that_sends_draft_kv_alone(end: str, backend: str) -> None:
    """It dies, or it goes on later. No request fails; B's notice nothing."""
    act = {
        "killed": killed(DRAFT_ONLY), "stopped": stopped(DRAFT_ONLY, 6),
        "its port closed": port_closed(DRAFT_ONLY, 6),
    }[end]  # fmt: skip
    result = run(flow(DRAFT_ONLY), {AT: act}, f"{NAMES[DRAFT_ONLY]}: {end}")
    assert result.found() == []
    assert failed(result.ended) == []
    untouched(result, BOUND)
    nobody_waited(result.ended, BOUND)
    assert states(result.before(AT)) == {"warm"}
    assert "cold" in states(result.during(AT)[:8])
    assert states(result.during(AT)[8:]) == {"cold"}
    assert states(result.of(True)[-5:]) == {"cold" if end == "killed" else "warm"}


@pytest.mark.full
@pytest.mark.parametrize(("rank", "seconds"), STOPS)
def test_a_rank_stands_still(rank: Key, seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than a request waits; than a read may take, and a message; than a segment waits
    for a slot. It goes on with what it had begun: every byte is right all the same."""
    monkeypatch.setenv("SGLANG_MIXKV_PATIENCE", "1")
    what = f"{NAMES[rank]} stands still for {seconds} s, patience 1"
    result = run(flow(rank, seconds), {AT: stopped(rank, seconds)}, what)
    assert result.found(late=False) == []
    untouched(result, Times().longest_wait)
    by_sglang_alone(result)
    if rank == DRAFT_ONLY:
        assert failed(result.ended) == []
        nobody_waited(result.ended, Times().longest_wait)
    assert states(result.of(True)[-5:]) == {"warm"}


@pytest.mark.full
@pytest.mark.parametrize("one_queue", [False, True], ids=["own queue", "one queue"])
def test_a_decode_rank_stands_still_in_a_write(
    one_queue: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the target, by SGLang. Mooncake gives most such writes up, and SGLang that rank. Others
    wait for it where SGLang has their writes in the same queue, as without the plugin."""
    monkeypatch.setenv("SGLANG_MIXKV_PATIENCE", "1")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "50")
    if one_queue:
        monkeypatch.setenv("SGLANG_DISAGGREGATION_QUEUE_SIZE", "1")
    seconds = 40
    of, acts = flow(DECODE, seconds, tokens=320), {AT: stopped(DECODE, seconds)}
    what = f"{NAMES[DECODE]} stands still for {seconds} s while SGLang writes to it"
    result = run(of, acts, what + ", in its only queue" * one_queue)
    assert result.found(late=False) == []
    by_sglang_alone(result)
    assert failed(result.of(True)) != []
    if not one_queue:
        untouched(result, Times().longest_wait)
        return
    assert states(result.of(False)) == {"warm"}
    stock = run(replace(of, stock=True), acts, what + ", in its only queue")
    for others in result.of(False), stock.of(False):
        assert failed(others) == []
        nobody_waited(others, seconds)
        assert max(one.seconds for one in others) > WRITE_S - SLACK


@pytest.mark.full
@pytest.mark.parametrize("restart", [False, True], ids=["for good", "and starts again"])
def test_a_decode_rank_is_killed(restart: bool) -> None:
    """Its requests are gone with it; those of the other one of that prefill server go on."""
    what = f"{NAMES[DECODE]} is killed" + " and starts again" * restart
    result = run(flow(DECODE), {AT: killed(DECODE, restart=restart)}, what)
    assert result.found(late=False) == []
    untouched(result, BOUND)
    by_sglang_alone(result)
    assert all(number % 2 == DECODE[1] for number in result.gone)
    if restart:
        assert states(result.of(True)[-5:]) == {"warm"}


@pytest.mark.full
@pytest.mark.parametrize("rank", [DRAFT_ONLY, TARGET, DECODE], ids=["draft", "target", "decode"])
@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_at_each_stage(end: str, rank: Key) -> None:
    """Of a room of its own, one after the other. A prefill rank that is killed takes its server
    with it."""
    others = [one for one in ALL_OF_A if one != rank] if rank in ALL_OF_A else []

    def at(stage: str) -> Act:
        def act(ring: Ring) -> None:
            if end == "killed":
                ring.at_stage(stage, lambda: ring.kill(rank))
                killed(*others)(ring)
                ring.start(rank, *others)
            else:
                ring.at_stage(stage, lambda: ring.stop(rank))
                time.sleep(2)
                ring.go_on(rank)
            time.sleep(3)

        return act

    acts = {AT + number: at(stage) for number, stage in enumerate(STAGES)}
    what = f"{NAMES[rank]} is {end} once at each stage of a room"
    several = flow(rank, 60, every=0.1, tokens=32, held=rank, restarts=RESTARTS[end])
    result = run(several, acts, what)
    assert result.found(late=False) == []
    untouched(result, BOUND)
    by_sglang_alone(result)
    if (end, rank) == ("stopped", DRAFT_ONLY):
        assert failed(result.ended) == []
        nobody_waited(result.ended, BOUND)
    assert states(result.of(True)[-5:]) == {"warm"}


def test_the_second_hundred_lose_no_time() -> None:
    """The breaker: three requests wait in vain, and after them probes alone."""
    acts = {100: lambda ring: ring.stop(DRAFT_ONLY), 300: lambda ring: ring.go_on(DRAFT_ONLY)}
    what = f"{NAMES[DRAFT_ONLY]}: stopped, one request at once"
    result = run(Traffic(300, at_once=1), acts, what)
    assert result.found() == []
    assert failed(result.ended) == []
    nobody_waited(result.ended, BOUND)
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


@pytest.mark.transports
@pytest.mark.parametrize("same_ports", [False, full(True)], ids=["other ports", "the same ports"])
def test_a_server_is_restarted(same_ports: bool, backend: str) -> None:
    """Requests fail that it had, by SGLang's own word; later ones are served, and warm."""
    ports = "the same ports" if same_ports else "other ports"
    what = f"a prefill server is killed and starts again on {ports}"
    act = killed(*ALL_OF_A, restart=True)
    result = run(flow(TARGET, same_ports=same_ports, restarts=1), {AT: act}, what)
    assert result.found() == []
    untouched(result, BOUND)
    lost = failed(result.ended)
    assert 0 < len(lost) <= 8
    assert all("Lost connection with prefill instance" in one.reason for one in lost)
    assert states(result.before(AT)) == {"warm"}
    assert states(result.since(AT)[8:]) == {"warm"}
