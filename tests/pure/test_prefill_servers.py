"""What hung, hostile and gone prefill servers cost a decode rank, and who is notified."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest
from rig.answers import many, serving, silent
from rig.servers import PORT, TOKENS, Site, answer_of, publishing, row_of
from rig.threads import Prefill, wait_for

from sglang_mixkv.channel.messages import draw_instance
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import links
from sglang_mixkv.engine import notices, prefill_http, prefill_servers
from sglang_mixkv.engine.prefill_http import fetch
from sglang_mixkv.engine.names import Names
from sglang_mixkv.errors import MixKVError

NO_ROUTE, NOBODY = (404, b""), "127.0.0.1:1"
OK = b"HTTP/1.1 200 OK\r\n\r\n"
HUNG = 64
FOR_EVER_S = 60.0


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as one:
        yield one


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    one = Prefill(Times())
    yield one
    one.close()


# ---------------------------------------------------------------- servers that are silent


@pytest.fixture(params=["no answer", "no channel"])
def hung(
    request: pytest.FixtureRequest, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """As many servers that are hung for longer than the test takes."""
    monkeypatch.setattr(prefill_http, "ASK_S", FOR_EVER_S)
    monkeypatch.setattr(links, "CONNECT_S", FOR_EVER_S)
    with silent() as address:
        if request.param == "no answer":
            yield many(address, HUNG)
            return
        with publishing(row_of(prefill, address=f"tcp://{address}"), host="") as address:
            yield many(address, HUNG)


def test_a_server_does_not_wait_for_those_that_are_hung(
    site: Site, hung: list[str], prefill: Prefill
) -> None:
    for _ in range(3):
        assert not any(map(site.servers.ensure, hung))
        time.sleep(0.05)
    with publishing(row_of(prefill)) as address:
        assert site.is_ready(address)
        assert site.request(address, prefill) == "warm"
    assert not any(map(site.servers.ensure, hung)), "they are hung no longer"


PACKED = OK[:-2] + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd"


@pytest.mark.parametrize(
    ("begin", "drip", "seconds", "words"),
    [
        (b"", b"", 0.3, "no answer within"),
        (OK, b"x: y\r\n", 0.3, "no answer within"),
        (OK[:-2], b"x: y\r\n", 0.3, "no answer within"),
        (OK, bytes(1 << 19), FOR_EVER_S, "PAIR-02.*than 1 MiB"),
        (PACKED, b"", FOR_EVER_S, "PAIR-02.*cannot be read"),
    ],
)
def test_a_question_ends_whatever_comes(
    begin: bytes, drip: bytes, seconds: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is packed is refused: it could be of any size once it is unpacked."""
    monkeypatch.setattr(prefill_http, "ASK_S", seconds)
    monkeypatch.setattr(prefill_http, "MAX_BODY", 1 << 20)
    with silent(begin, drip) as address, pytest.raises((TimeoutError, MixKVError), match=words):
        asyncio.run(fetch(address, Names()))


def test_a_server_that_was_silent_is_ready_once_it_answers(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first question hangs, the next is answered with an error."""
    asked, body, over = list[str](), answer_of(row_of(prefill)), threading.Event()

    def answer(path: str) -> tuple[int, bytes]:
        asked.append(path)
        if len(asked) == 1:
            over.wait()
        return (200, body) if len(asked) > 2 else (503, b"not yet")

    monkeypatch.setattr(prefill_http, "ASK_S", 0.3)
    with serving(answer) as address:
        assert site.is_ready(address)
        assert site.request(address, prefill) == "warm"
        over.set()
    assert len(asked) >= 3  # more where this machine is slow


def test_a_refused_server_is_asked_again_but_not_with_each_request(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one end the scheduler that SGLang refuses by raising, where page sizes differ."""
    asked: list[str] = []

    def answer(path: str) -> tuple[int, bytes]:
        asked.extend([path] * (path == "/mixkv"))
        return NO_ROUTE

    def refuse_one() -> None:
        """A request, from `try_ensure_parallel_info` to `receiver.init`."""
        assert wait_for(lambda: site.servers.ensure(address))
        assert "does not run sglang-mixkv" in str(site.servers.refuse(address, None))

    def differs(_: str) -> bool:
        raise RuntimeError("Page size mismatch")

    with serving(answer) as address:
        for _ in range(3):
            refuse_one()
        assert len(asked) == 1
        site.servers.forget(address)
        monkeypatch.setattr(prefill_servers, "AGAIN_S", 0)
        for _ in range(2):
            refuse_one()
        assert len(asked) == 3
    assert len(site.reasons) == 5
    monkeypatch.setattr(site.manager, "resolve", differs)
    with publishing(row_of(prefill)) as address:
        assert wait_for(lambda: site.servers.ensure(address))
        assert "Page size mismatch" in str(site.servers.refuse(address, None))


# ---------------------------------------------------------------- what another server publishes


@pytest.mark.parametrize("claim", ["address", "instance", "all"])
@pytest.mark.parametrize("first", [True, False])
def test_a_server_ends_nothing_of_another(
    site: Site, prefill: Prefill, claim: str, first: bool
) -> None:
    """What it publishes is in part, or all, that of another one's rank, whoever comes first."""
    other, own = Prefill(Times()), row_of(prefill)
    stolen = own if claim == "all" else row_of(other, **{claim: getattr(own, claim)})
    with publishing(own) as real, publishing(stolen) as thief:
        for address in (thief, real) if first else (real, thief):
            assert site.is_ready(address)
        for room in range(4):  # more than open a breaker
            assert site.request(real, prefill) == "warm"
            assert site.is_ready(thief)  # it may have been found to be another instance
            site.ended(site.decode.open(100 + room, TOKENS, site.peer(thief)))
        assert site.request(real, prefill) == "warm"
        assert site.is_ready(thief)
        site.servers.forget(thief)
        assert wait_for(lambda: site.held()["sockets"] == 1)
        assert site.request(real, prefill) == "warm"
    other.close()


# ---------------------------------------------------------------- what stays behind


def test_nothing_is_left_of_servers_that_are_gone(site: Site) -> None:
    with publishing(row_of(one := Prefill(Times()))) as address:  # what is made once
        assert site.is_ready(address)
        site.servers.forget(address)
    one.close()
    assert wait_for(lambda: not any(site.held().values()))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        one = Prefill(Times())
        with publishing(row_of(one)) as address:
            assert site.is_ready(address)
            if number % 2:
                assert site.request(address, one) == "warm"
            peer = site.peer(address)
            one.close()
        entry = site.decode.open(100 + number, TOKENS, peer)
        site.servers.forget(address)
        site.ended(entry)
        late = site.decode.open(200 + number, TOKENS, peer)  # planned before
        assert site.ended(late) == "lost"
    assert wait_for(lambda: not any(site.held().values())), site.held()
    gc.collect()  # channels refer to themselves, and those of this test end
    assert wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert not site.table


def test_nothing_is_left_of_a_server_that_is_given_up_while_it_is_connected_to(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialling, go, dial = threading.Event(), threading.Event(), site.decode.channel.dial

    def slow(*args: Any) -> Any:
        link = dial(*args)
        dialling.set()
        go.wait()
        return link

    monkeypatch.setattr(site.decode.channel, "dial", slow)
    with publishing(row_of(prefill)) as address:
        assert not site.servers.ensure(address)
        assert wait_for(lambda: site.servers.ensure(address) or dialling.is_set())
        site.servers.forget(address)
        go.set()
        assert wait_for(lambda: not any(site.held().values()))
        assert site.is_ready(address)
        assert site.request(address, prefill) == "warm"


def test_nothing_is_held_of_a_server_one_of_whose_ranks_cannot_be_reached(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "CONNECT_S", 0.1)
    other = row_of(prefill, instance=draw_instance(), address=f"tcp://{NOBODY}", rank_port=PORT + 1)
    with publishing(row_of(prefill), other) as address:
        assert wait_for(lambda: site.servers.ensure(address))
        assert "cannot be reached" in str(site.servers.refuse(address, None))
        assert wait_for(lambda: not site.held()["sockets"] + site.held()["of the data plane"])


def test_servers_that_nobody_asks_for_are_forgotten(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_http, "ASK_S", 0.1)
    with silent() as address, publishing(row_of(prefill)) as real:
        assert site.is_ready(real)
        for one in many(address, 20):
            site.servers.ensure(one)
        assert site.held()["servers"] == 21
        monkeypatch.setattr(prefill_servers, "KNOWN_S", 0.0)
        assert wait_for(lambda: set(site.servers._servers) == {real})
        assert site.request(real, prefill) == "warm"


def test_a_bootstrap_server_that_goes_away_alone_costs_what_sglang_gives_up(
    site: Site, prefill: Prefill
) -> None:
    """Its ranks live, and requests go on until SGLang's heartbeats take it out of the table. What
    waits for it then is cold. At the same address it is connected to anew."""
    with publishing(row_of(prefill)) as address:
        assert site.is_ready(address)
    entry = site.decode.open(100, TOKENS, site.peer(address))  # no target: no deadline
    site.servers.check(address)
    assert site.request(address, prefill) == "warm"
    assert site.is_ready(address)
    del site.table[address]
    site.servers.ensure(NOBODY)
    assert site.ended(entry) == "lost"
    with pytest.raises(MixKVError, match="being resolved anew"):
        site.peer(address)
    assert not site.servers.ensure(address)
    with publishing(row_of(prefill), port=int(address.rpartition(":")[2])):
        assert site.is_ready(address)
        assert site.request(address, prefill) == "warm"


def test_a_rank_that_was_restarted_at_another_port_is_found(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server has answered all the time, so SGLang does not notice."""
    monkeypatch.setattr(prefill_servers, "CHECK_S", 0.1)
    other, rows = Prefill(Times()), [row_of(prefill)]

    def answer(_: str) -> tuple[int, bytes]:
        return 200, answer_of(*rows)

    with serving(answer) as address:
        assert site.is_ready(address)
        assert site.request(address, prefill) == "warm"
        prefill.close()
        peer = site.peer(address)

        def is_noticed() -> bool:
            entry = site.decode.open(100, TOKENS, peer)
            wait_for(lambda: entry.state is not None, 0.3)
            site.decode.channel.close(entry)
            return address not in site.table

        assert not wait_for(is_noticed, 1), "its facts are what they were"
        rows[:] = [row_of(other)]
        assert wait_for(is_noticed)
        assert site.is_ready(address)
        assert site.request(address, other) == "warm"
    other.close()


# ---------------------------------------------------------------- refused requests


class Receiver:
    """As far as SGLang's is asked to tell prefill of an abort. Its sockets are in a dict of its
    class, as SGLang's are."""

    abort_notified = True
    bootstrap_infos: Any = ()
    _socket_cache: ClassVar[dict[str, Any]] = {"another": "server's"}
    _socket_locks: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.told: list[list[int]] = []
        self.closed: list[int] = []

    def ensure_abort_notified(self) -> None:
        assert not self.abort_notified
        self.told.append([info["rank_port"] for info in self.bootstrap_infos])
        for info in self.bootstrap_infos:
            self._socket_cache[str(info)] = self

    def close(self, linger: int) -> None:
        self.closed.append(linger)


def ranks(path: str) -> tuple[int, bytes]:
    """GET /route of a server of TP 2 and two stages that has no plugin."""
    if path.endswith("/mixkv"):
        return NO_ROUTE
    query = {name: int(value) for name, (value,) in parse_qs(urlsplit(path).query).items()}
    sizes: dict[str, Any] = {"dp_size": 1, "attn_cp_size": 1, "attn_tp_size": 2, "pp_size": 2}
    if "older" not in path:
        sizes["prefill_http_port"] = 30000
    if "huge" in path:
        sizes["dp_size"] = 10**5
    port = 9000 + 10 * query["target_pp_rank"] + query["target_tp_rank"]
    found = {"rank_ip": "127.0.0.1", "rank_port": port}
    return 200, json.dumps(sizes if query["target_tp_rank"] < 0 else found).encode()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """One whose copy notifies prefill, soon after it is asked to."""
    monkeypatch.setattr(notices, "PAUSES_S", (0.0, 0.05, 0.05))
    monkeypatch.setattr(Receiver, "_socket_cache", {"another": "server's"})
    yield Receiver()
    assert Receiver._socket_cache == {"another": "server's"}


def test_each_rank_of_a_refused_server_is_notified_more_than_once(
    site: Site, receiver: Receiver
) -> None:
    """An abort that comes before its request is ignored. The ranks are asked for once, and one
    receiver that raises ends nothing."""
    asked, broken = list[str](), Receiver()
    del broken.told  # so it raises

    def answer(path: str) -> tuple[int, bytes]:
        asked.append(path)
        return ranks(path)

    with serving(answer) as address:
        assert wait_for(lambda: site.servers.ensure(address))
        for one in (broken, receiver):
            assert site.servers.refuse(address, one)
        assert wait_for(lambda: len(receiver.told) == 3)
    assert len([path for path in asked if path != "/mixkv"]) == 5
    assert receiver.told == [[9000, 9010, 9001, 9011]] * 3
    assert receiver.abort_notified, "a copy of it is what notifies"
    assert wait_for(lambda: len(receiver.closed) == 4), "sockets stay behind"


@pytest.mark.parametrize("path", ["/older", "/huge"])
def test_a_server_of_unknown_ranks_or_that_may_not_know_aborts_is_sent_nothing(
    site: Site, path: str, receiver: Receiver
) -> None:
    other = Receiver()
    with serving(ranks) as address:
        for one, its in ((f"{address}{path}", receiver), (address, other)):
            assert wait_for(lambda one=one: site.servers.ensure(one))
            assert site.servers.refuse(one, its)
        assert wait_for(lambda: len(other.told) == 3)
    assert receiver.told == []
