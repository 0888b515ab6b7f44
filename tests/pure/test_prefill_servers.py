"""What asking a prefill server costs SGLang's scheduler, and who is told that one is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from rig.answers import serving
from rig.threads import wait_for

from sglang_mixkv.engine import prefill_servers, refused
from sglang_mixkv.engine.prefill_servers import PrefillServers
from sglang_mixkv.engine.refused import RefusedRequests

NO_ROUTE, NOBODY = (404, b""), "127.0.0.1:1"


@pytest.fixture
def servers() -> Iterator[PrefillServers]:
    """Of a rank that would refuse every server."""
    nothing: Any = None
    made = PrefillServers(
        nothing, nothing, {}, lambda _: False, object,
        serve_mismatch=False, refused=lambda _: None,
    )  # fmt: skip
    yield made
    made.close()


def seconds(what: Callable[[], Any]) -> float:
    began = time.monotonic()
    what()
    return time.monotonic() - began


def test_the_scheduler_waits_for_a_server_once(servers: PrefillServers) -> None:
    def slow(_: str) -> tuple[int, bytes]:
        time.sleep(1.5)
        return NO_ROUTE

    with serving(slow) as address:
        assert seconds(lambda: servers.ensure(address)) >= prefill_servers.FIRST_WAIT_S
        again = min(seconds(lambda: servers.ensure(address)) for _ in range(3))
        assert again < prefill_servers.FIRST_WAIT_S / 2
        assert wait_for(lambda: servers.ensure(address))


def test_a_refused_server_is_asked_again_but_not_with_each_request(
    servers: PrefillServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(path: str) -> tuple[int, bytes]:
        asked.append(path)
        return NO_ROUTE

    def refuse_one() -> None:
        """A request, from `try_ensure_parallel_info` to `receiver.init`."""
        assert wait_for(lambda: servers.ensure(address))
        assert "does not run sglang-mixkv" in str(servers.refusal(address))

    with serving(answer) as address:
        monkeypatch.setattr(prefill_servers, "AGAIN_S", 1000)
        for _ in range(3):
            refuse_one()
        assert len(asked) == 1
        monkeypatch.setattr(prefill_servers, "AGAIN_S", 0)
        refuse_one()
        assert len(asked) == 2


class Receiver:
    """As far as SGLang's is asked to tell prefill of an abort."""

    abort_notified = True
    bootstrap_infos: Any = ()

    def __init__(self) -> None:
        self.told: list[list[int]] = []

    def ensure_abort_notified(self) -> None:
        assert not self.abort_notified
        self.told.append([info["rank_port"] for info in self.bootstrap_infos])


def ranks(path: str) -> tuple[int, bytes]:
    """GET /route of a server of TP 2 and two stages."""
    query = {name: int(value) for name, (value,) in parse_qs(urlsplit(path).query).items()}
    sizes: dict[str, Any] = {"dp_size": 1, "attn_cp_size": 1, "attn_tp_size": 2, "pp_size": 2}
    if "older" not in path:
        sizes["prefill_http_port"] = 30000
    port = 9000 + 10 * query["target_pp_rank"] + query["target_tp_rank"]
    found = {"rank_ip": "127.0.0.1", "rank_port": port}
    return 200, json.dumps(sizes if query["target_tp_rank"] < 0 else found).encode()


@pytest.fixture
def refused_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[RefusedRequests]:
    monkeypatch.setattr(refused, "SENT_AFTER_S", (0.0, 0.05, 0.1))
    made = RefusedRequests()
    yield made
    made.close()


def test_each_rank_of_a_refused_server_is_told_more_than_once(
    refused_requests: RefusedRequests,
) -> None:
    """An abort that comes before its request is ignored."""
    receiver = Receiver()
    with serving(ranks) as address:
        refused_requests.add(address, receiver)
        assert wait_for(lambda: len(receiver.told) == 3)
    assert receiver.told == [[9000, 9010, 9001, 9011]] * 3
    assert receiver.abort_notified, "a copy of it is what tells"


def test_a_release_that_may_not_know_aborts_is_told_nothing() -> None:
    with serving(ranks) as address:
        assert len(refused.ranks_of(address)) == 4
        assert refused.ranks_of(f"{address}/older") == []


def test_a_server_that_does_not_answer_holds_up_nobody(refused_requests: RefusedRequests) -> None:
    receiver = Receiver()
    with serving(ranks) as address:
        refused_requests.add(NOBODY, Receiver())
        assert wait_for(lambda: not refused_requests._new.qsize())
        time.sleep(0.05)
        refused_requests.add(address, receiver)
        assert wait_for(lambda: len(receiver.told) == 3)
