"""Hung, hostile and dead prefill servers do not affect a decode rank's other servers.

The last part tests which prefill ranks are notified of a refused request.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from rig.channel.servers import PORT, TOKENS, Site, answer_of, publishing, row_of, sizes
from rig.channel.threads import Prefill, wait_for
from rig.process.answers import many, serving, silent

from sglang_mixkv.channel.handshake import Row
from sglang_mixkv.channel.messages import draw_instance
from sglang_mixkv.channel.times import Times
from sglang_mixkv.config import Config
from sglang_mixkv.decode import links
from sglang_mixkv.engine import notices, prefill_http, prefill_servers
from sglang_mixkv.engine.prefill_http import Names, fetch
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


def test_limits_and_intervals_are_as_intended() -> None:
    """The limits and intervals are as intended.

    SGLang polls once a second, and fails a request after 15 s.
    """
    assert (prefill_servers.ASKED_AT_ONCE, prefill_servers.CONNECTED_AT_ONCE) == (1024, 1024)
    assert (prefill_servers.CHECK_S, prefill_servers.SOON_S) == (1.0, 0.05)
    assert (prefill_servers.AGAIN_S, prefill_servers.KNOWN_S) == (5.0, 60.0)


# ---------------------------------------------------------------- servers that are silent


@pytest.fixture(params=["no answer", "no channel"])
def hung(
    request: pytest.FixtureRequest, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """Yield the addresses of HUNG servers, which hang for longer than the test takes."""
    monkeypatch.setattr(prefill_http, "ASK_S", FOR_EVER_S)
    monkeypatch.setattr(links, "CONNECT_S", FOR_EVER_S)
    with silent() as address:
        if request.param == "no answer":
            yield many(address, HUNG)
            return
        with publishing(row_of(prefill, address=f"tcp://{address}"), host="") as address:
            yield many(address, HUNG)


def test_hung_servers_do_not_delay_another_server(
    site: Site, hung: list[str], prefill: Prefill
) -> None:
    for _ in range(3):
        assert not any(map(site.servers.ensure, hung))
        time.sleep(0.05)
    with publishing(row_of(prefill)) as address:
        assert site.is_ready(address)
        assert site.request(address, prefill) == "warm"
    assert not any(map(site.servers.ensure, hung)), "the servers do not hang any more"


# ---------------------------------------------------------------- names

KNOWN, NEW, MANY = "known.example", "new.example", 6


class NameServer:
    """A name server that answers for KNOWN and NEW; other look-ups hang until `answers` is set.

    `asked`: the number of look-ups by name. `at_once`: the number of look-ups in flight.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers, self.is_known_answered = threading.Event(), True
        self.asked, self.at_once, self.most = Counter[str](), 0, 0
        self._real, self._lock = socket.getaddrinfo, threading.Lock()
        monkeypatch.setattr(socket, "getaddrinfo", self.look_up)

    def look_up(self, host: Any, *args: Any, **hints: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name is None or not name.endswith(".example"):
            return self._real(host, *args, **hints)
        with self._lock:
            self.asked[name] += 1
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        if name not in (KNOWN, NEW) or not (name == NEW or self.is_known_answered):
            self.answers.wait()
        with self._lock:
            self.at_once -= 1
        if name in (KNOWN, NEW):
            return self._real("127.0.0.1", *args, **hints)
        raise socket.gaierror(-3, "Temporary failure in name resolution")


@pytest.fixture
def name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    monkeypatch.setattr(prefill_http, "LOOKED_UP", MANY)
    monkeypatch.setattr(prefill_http, "FRESH_S", 0.1)
    monkeypatch.setattr(prefill_http, "ASK_S", 1.0)
    monkeypatch.setattr(prefill_servers, "CONNECTED_AT_ONCE", 2)
    one = NameServer(monkeypatch)
    yield one
    one.answers.set()


@pytest.mark.parametrize("hung", [MANY - 2, MANY - 1, 10 * MANY])
def test_hanging_look_ups_delay_only_new_names(
    name_server: NameServer, prefill: Prefill, hung: int
) -> None:
    """Hanging look-ups delay only new names, and only if no thread is left.

    A server with an IP address or with a name that was looked up before is ready while they hang.
    """
    with Site() as site, publishing(row_of(prefill)) as address:
        port = address.rpartition(":")[2]
        by_name = f"{KNOWN}:{port}"
        assert site.is_ready(by_name)
        site.servers.forget(by_name)
        name_server.is_known_answered = False
        hang = [f"hang-{number % hung}.example:{number}" for number in range(2 * hung)]
        for _ in range(3):  # requested again while the first look-up is in flight
            assert not any(map(site.servers.ensure, hang))
            time.sleep(0.8)
        assert wait_for(lambda: name_server.at_once == min(hung, MANY))
        assert site.is_ready(address)
        assert site.request(address, prefill) == "warm"
        assert site.is_ready(by_name)
        if hung + 1 >= MANY:  # one more: the known name is looked up again
            assert not wait_for(lambda: site.servers.ensure(f"{NEW}:{port}"), 0.5)
        else:
            assert site.is_ready(f"{NEW}:{port}")
        often = {name for name, count in name_server.asked.items() if count > 1}
        assert not [name for name in often if name.startswith("hang")], "two look-ups of one name"
        assert name_server.most <= MANY
        for one in hang:
            site.servers.forget(one)
        name_server.answers.set()
        assert site.is_ready(f"{NEW}:{port}")


def test_a_changed_address_of_a_name_is_used(
    name_server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new look-up replaces a name's address; the former one is used if the look-up fails."""
    answers: dict[str, Any] = {"a": "127.0.0.1"}

    def look_up(host: str, *args: Any, **hints: Any) -> Any:
        assert hints == {"type": socket.SOCK_STREAM, "flags": socket.AI_ADDRCONFIG}
        if isinstance(answers[host], Exception):
            raise answers[host]
        return name_server._real(answers[host], *args, **hints)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)

    async def check() -> None:
        by = prefill_http.Names()

        async def found(name: str) -> list[str]:
            return [one["host"] for one in await by.resolve(name, 80)]

        assert await found("a") == ["127.0.0.1"]
        answers["a"] = "127.0.0.2"
        assert await found("a") == ["127.0.0.2"]
        answers["a"] = socket.gaierror(-3, "")
        assert await found("a") == ["127.0.0.2"]
        answers["b"] = UnicodeError("a label that is too long")
        with pytest.raises(UnicodeError):
            await found("b")
        for number in range(prefill_http.REMEMBERED):
            answers[f"{number}"] = "127.0.0.3"
            await found(f"{number}")
            if number == 5:
                await found("a")  # the use keeps the entry from being dropped
        assert len(by._answered) == prefill_http.REMEMBERED
        assert "0" not in by._answered
        assert "a" in by._answered
        monkeypatch.setattr(prefill_http, "LOOKED_UP", 0)
        assert await found("a") == ["127.0.0.2"]
        with pytest.raises(BlockingIOError, match="0 names are being looked up"):
            await found("c")

    monkeypatch.setattr(prefill_http, "REMEMBERED", 20)
    asyncio.run(check())


def test_a_changed_address_is_used_after_late_look_ups(
    name_server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late answer is used by the next request for its name, and no request waits for it.

    A late failure has no effect.
    """
    late, over = ["127.0.0.1", "127.0.0.2", "", "127.0.0.3"], list[str]()

    def look_up(host: str, *args: Any, **hints: Any) -> Any:
        found = late[min(len(over), 3)]
        time.sleep(4 * prefill_http.FRESH_S)
        over.append(found)
        if not found:
            raise socket.gaierror(-3, "")
        return name_server._real(found, *args, **hints)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)

    async def check() -> list[str]:
        by, found = prefill_http.Names(), list[str]()
        for _ in range(5):
            found += [one["host"] for one in await by.resolve("a", 80)]
            while by._under_way:
                await asyncio.sleep(0.01)
        return found

    first, second, third = "127.0.0.1", "127.0.0.2", "127.0.0.3"
    assert asyncio.run(check()) == [first, first, second, second, third]


@pytest.mark.parametrize("full", [False, True])
def test_servers_whose_routes_hang_hold_one_thread_each(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """A server whose look-up of routes hangs holds one thread.

    Other servers wait only if no thread is left.
    """
    monkeypatch.setattr(prefill_servers, "CONNECTED_AT_ONCE", MANY)
    go, resolving = threading.Event(), Counter[str]()
    with Site() as site, publishing(row_of(prefill), host="") as address:

        def resolve(of: str) -> Any:
            resolving[of] += 1
            if of != address:
                go.wait()
            return sizes()

        site.manager.resolve = resolve
        hung = many(address, MANY - 1 + full)
        assert not any(map(site.servers.ensure, hung))
        assert wait_for(lambda: len(resolving) == len(hung))
        if full:
            assert not wait_for(lambda: site.servers.ensure(address), 0.5)
        else:
            assert site.is_ready(address)
        go.set()
        assert site.is_ready(address)
        assert set(resolving.values()) == {1}
        assert all(map(site.is_ready, hung))


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
def test_a_request_ends_whatever_the_server_answers(
    begin: bytes, drip: bytes, seconds: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request to a server ends with an error for a slow, long or compressed answer.

    A compressed answer could have any size once it is decompressed.
    """
    monkeypatch.setattr(prefill_http, "ASK_S", seconds)
    monkeypatch.setattr(prefill_http, "MAX_BODY", 1 << 20)
    with silent(begin, drip) as address, pytest.raises((TimeoutError, MixKVError), match=words):
        asyncio.run(fetch(address, Names()))


def test_a_server_that_was_silent_is_ready_once_it_answers(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server becomes ready once it answers, even after a request that hangs and an error."""
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
    assert len(asked) >= 3  # more on a slow machine


def test_a_refused_server_is_contacted_again_later(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused server is contacted again after AGAIN_S, not with each request.

    If SGLang refuses a server by an exception, for example for another page size, the scheduler
    continues.
    """
    asked: list[str] = []

    def answer(path: str) -> tuple[int, bytes]:
        asked.extend([path] * (path == "/mixkv"))
        return NO_ROUTE

    def refuse_one() -> None:
        """Refuse a request, from `try_ensure_parallel_info` to `receiver.init`."""
        assert wait_for(lambda: site.servers.ensure(address))
        assert "[MIXKV-PAIR-01]" in site.servers.refuse(address, None)

    def differs(_: str) -> bool:
        raise RuntimeError("Page size mismatch")

    with serving(answer) as address:
        for number in range(3):
            assert number == 0 or site.servers.ensure(address), "not ready for the next request"
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


def test_refused_requests_do_not_delay_the_next_query(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused server is contacted again AGAIN_S after its first refused request, however many
    follow: under steady traffic, a server that was mended would stay refused otherwise."""
    monkeypatch.setattr(prefill_servers, "AGAIN_S", 0.3)
    asked: list[str] = []

    def answer(path: str) -> tuple[int, bytes]:
        asked.extend([path] * (path == "/mixkv"))
        return NO_ROUTE

    with serving(answer) as address:

        def is_asked_again() -> bool:
            if site.servers.ensure(address):
                site.servers.refuse(address, None)
            return len(asked) > 1

        assert wait_for(is_asked_again)


def test_a_refused_server_without_requests_gets_no_heartbeats(site: Site) -> None:
    """SGLang's heartbeats query each server in its table in turn, and one of them may hang: a
    refused server is there only from a request's `try_ensure_parallel_info` to its `init`."""
    with serving(lambda _: NO_ROUTE) as address:
        assert not site.servers.ensure(address)
        assert wait_for(lambda: address in site.servers._refusals)
        assert address not in site.table, "of a request that a client may have aborted"
        for _ in range(2):
            assert site.servers.ensure(address)
            assert site.table[address] is prefill_servers.STAND_IN
            assert site.servers.refuse(address, None)
            assert address not in site.table


# ---------------------------------------------------------------- false rows


@pytest.mark.parametrize("claim", ["address", "instance", "all"])
@pytest.mark.parametrize("first", [True, False])
def test_false_rows_do_not_affect_another_server(
    site: Site, prefill: Prefill, claim: str, first: bool
) -> None:
    """A server that publishes another server's rank as its own does not affect that server.

    The false row copies the other rank's address, its instance or all fields. The false row
    is published before or after the other server's row.
    """
    other, own = Prefill(Times()), row_of(prefill)
    stolen = own if claim == "all" else row_of(other, **{claim: getattr(own, claim)})
    with publishing(own) as real, publishing(stolen) as thief:
        for address in (thief, real) if first else (real, thief):
            assert site.is_ready(address)
        for room in range(4):  # one more than the strikes that open a breaker
            assert site.request(real, prefill) == "warm"
            assert site.is_ready(thief)  # it may have been dropped as another instance
            site.ended(site.decode.open(100 + room, TOKENS, site.peer(thief)))
        assert site.request(real, prefill) == "warm"
        assert site.is_ready(thief)
        site.servers.forget(thief)
        assert wait_for(lambda: site.held()["sockets"] == 1)
        assert site.request(real, prefill) == "warm"
    other.close()


@pytest.mark.parametrize("asked", ["refuse", "cold"])
def test_a_server_with_another_drafter_is_refused_unless_allowed(
    site: Site, prefill: Prefill, asked: Any
) -> None:
    """A server with another drafter is refused, or served cold if the operator allows that.

    In the second case, the rank connects to it as to any other server.
    """
    site.manager.local.config = Config(on_draft_mismatch=asked)
    own = row_of(prefill)
    facts = msgspec.structs.replace(own.draft.facts, architecture="Another")
    other = row_of(prefill, draft=msgspec.structs.replace(own.draft, facts=facts))
    with publishing(other) as address:
        assert site.is_ready(address)
        if asked == "refuse":
            assert "Another" in str(site.servers.refuse(address, None))
        else:
            assert site.servers.refuse(address, None) is None
            infos = [{"rank_ip": "127.0.0.1", "rank_port": PORT}]
            assert site.servers.plan(address, infos, None).cold
            assert wait_for(lambda: site.held()["sockets"] == 1)  # the channel thread adds it


# ---------------------------------------------------------------- limits per server


def rows_at(prefill: Prefill, *places: tuple[int, int]) -> list[Row]:
    """Return one row for each pair of attention-TP rank and stage in `places`.

    The rows differ in instance, port and address. Nothing listens at these addresses.
    """
    return [
        row_of(
            prefill, instance=draw_instance(), rank_port=PORT + number, attn_tp=2, attn_tp_rank=tp,
            pp_rank=stage, address=f"tcp://127.0.0.1:{number + 1}",
        )
        for number, (tp, stage) in enumerate(places)
    ]  # fmt: skip


FOUR = {"attn_tp_size": 2, "dp_size": 2}


@pytest.mark.parametrize(
    ("places", "published", "code", "dialled"),
    [
        ([(0, 0), (1, 0)] * 2, FOUR, "MSG-02", {1, 3}),
        ([(0, 0), (0, 1)], {"pp_size": 2}, "MSG-02", {2}),
        ([(0, 0), (0, 0), (1, 0)], FOUR, "MSG-02", {1, 2}),
        ([(0, 0), (1, 0)] * 2 + [(1, 0)], FOUR, "PAIR-04", set()),  # more ranks than in its sizes
        ([(0, 0)] * 3 + [(1, 0)], FOUR, "PAIR-04", set()),  # too many ranks for this decode rank
        ([(0, 0)] * 2, {"attn_cp_size": 2}, "MSG-02", {1, 2}),
        ([(0, 0)] * 3, {"attn_cp_size": 2}, "PAIR-04", set()),
        ([(0, 0)], {"dp_size": 0}, "PAIR-04", set()),
        ([(0, 0)] * 2, {"dp_size": prefill_http.MAX_RANKS + 1}, "PAIR-04", set()),
        ([(0, 0)] * prefill_http.MAX_RANKS, {"dp_size": prefill_http.MAX_RANKS}, "MSG-02",
         set(range(1, prefill_http.MAX_RANKS + 1))),
        ([(0, 0)] * (prefill_http.MAX_RANKS + 1), {"dp_size": prefill_http.MAX_RANKS}, "PAIR-02",
         set()),
    ],
)  # fmt: skip
def test_decode_connects_only_to_ranks_that_requests_can_contact(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch, places: list[tuple[int, int]],
    published: dict[str, int], code: str, dialled: set[int],
) -> None:  # fmt: skip
    """Decode connects to a server's ranks only if their number fits the server's sizes.

    Of these ranks, it connects only to those that its requests can contact.
    """
    links = list[Any]()

    def dial(row: Row, server: str) -> Any:
        links.append(int(row.address.rpartition(":")[2]))
        if len(links) == len(dialled):
            raise ConnectionError
        return SimpleNamespace(peer=row.instance)

    monkeypatch.setattr(site.decode.channel, "dial", dial)
    monkeypatch.setattr(site.decode.channel, "add", lambda _: None)
    site.manager.resolve = lambda _: sizes(**published)
    with publishing(*rows_at(prefill, *places)) as address:
        assert wait_for(lambda: site.servers.ensure(address))
        assert f"[MIXKV-{code}]" in str(site.servers.refuse(address, None))
    assert sorted(links) == sorted(dialled)


def test_two_ranks_with_one_address_are_refused(site: Site, prefill: Prefill) -> None:
    """A server is refused if two of its ranks publish the same address.

    Ranks without a channel publish an empty address.
    """
    same = [msgspec.structs.replace(one, address="tcp://127.0.0.1:1") for one in
            rows_at(prefill, (0, 0), (0, 0))]  # fmt: skip
    with publishing(*same) as address:
        assert wait_for(lambda: site.servers.ensure(address))
        assert "[MIXKV-PAIR-04]" in str(site.servers.refuse(address, None))
    none = [msgspec.structs.replace(one, address="") for one in rows_at(prefill, (0, 0), (0, 0))]
    with publishing(row_of(prefill, rank_port=1), *none) as address:
        assert site.is_ready(address)
        assert site.servers.refuse(address, None) is None


@pytest.mark.parametrize("by", ["ranks", "ranks with unlimited files", "files"])
def test_the_number_of_ranks_of_all_servers_is_limited(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The number of connected ranks is limited over all servers.

    A server beyond the limit is refused with a remedy, and connected servers are not affected. A
    forgotten server makes room for others.
    """
    assert prefill_servers.MAX_LINKS == 8192
    if "ranks" in by:
        monkeypatch.setattr(prefill_servers, "MAX_LINKS", 2)
    if "files" in by:
        limit = resource.RLIM_INFINITY if "unlimited" in by else 12
        monkeypatch.setattr(prefill_servers.resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(prefill_servers, "AGAIN_S", 0.0)
    one, two = Prefill(Times()), Prefill(Times())
    both = [row_of(one), row_of(two, rank_port=PORT + 1)]
    with publishing(row_of(prefill)) as known, publishing(*both) as large:
        assert site.is_ready(known)
        assert wait_for(lambda: site.servers.ensure(large))
        assert "ulimit -n" in str(site.servers.refuse(large, None))
        assert site.request(known, prefill) == "warm"
        site.servers.forget(known)
        site.servers.forget(large)
        assert site.is_ready(large)
        assert site.servers.refuse(large, None) is None
        assert wait_for(lambda: site.held()["sockets"] == 2)
    for side in (one, two):
        side.close()


def test_the_number_of_sockets_for_aborts_is_limited(site: Site) -> None:
    """The number of sockets for aborts is limited. Sockets with a pending abort stay open."""
    aborts, most, ran = site.servers._aborts, notices.MAX_NOTICES, list[Any]()
    for count, runs in ((most, 0), (most - 1, 1)):
        aborts._class = SimpleNamespace(_socket_cache=dict.fromkeys(range(count)))
        aborts._background = SimpleNamespace(run=lambda work: ran.append(work.close()))
        aborts.add([], SimpleNamespace())
        assert len(ran) == runs


# ---------------------------------------------------------------- cleanup


def test_servers_that_are_gone_leave_nothing(site: Site) -> None:
    with publishing(row_of(one := Prefill(Times()))) as address:  # allocates one-time resources
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
        late = site.decode.open(200 + number, TOKENS, peer)  # uses a plan made before `forget`
        assert site.ended(late) == "lost"
    assert wait_for(lambda: not any(site.held().values())), site.held()
    gc.collect()  # frees channels, which are in reference cycles
    assert wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert not site.table


def test_forgetting_a_server_during_connects_leaves_nothing(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is forgotten during a connection attempt leaves nothing open.

    Its remaining ranks are not connected.
    """
    dialling, go, dial, dialled = (
        threading.Event(), threading.Event(), site.decode.channel.dial, list[Any]()
    )  # fmt: skip

    def slow(*args: Any) -> Any:
        dialled.append(link := dial(*args))
        dialling.set()
        go.wait()
        return link

    monkeypatch.setattr(site.decode.channel, "dial", slow)
    second = Prefill(Times())
    with publishing(row_of(prefill), row_of(second, rank_port=PORT + 1)) as address:
        assert not site.servers.ensure(address)
        assert wait_for(lambda: site.servers.ensure(address) or dialling.is_set())
        site.servers.forget(address)
        go.set()
        assert wait_for(lambda: not site.servers._background.running)
        assert not any(site.held().values())
        assert len(dialled) == 1
        assert site.is_ready(address)
        assert site.request(address, prefill) == "warm"
    second.close()


def test_a_server_with_an_unreachable_rank_leaves_nothing(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "CONNECT_S", 0.1)
    other = row_of(prefill, instance=draw_instance(), address=f"tcp://{NOBODY}", rank_port=PORT + 1)
    with publishing(row_of(prefill), other) as address:
        assert wait_for(lambda: site.servers.ensure(address))
        assert "[MIXKV-MSG-02]" in site.servers.refuse(address, None)
        assert wait_for(lambda: not site.held()["sockets"] + site.held()["of the data plane"])


def test_a_silent_server_is_queried_ever_more_rarely_and_logged_by_reason(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pause between two queries doubles up to CHECK_S, and a repeated reason is logged once."""
    monkeypatch.setattr(prefill_servers, "SOON_S", 0.01)
    monkeypatch.setattr(prefill_servers, "CHECK_S", 0.05)
    asked, reasons = list[float](), ["one", "one", "one", "other", "other", "one"]

    async def fetch(*_: Any) -> Any:
        asked.append(time.monotonic())
        raise ConnectionError(reasons[min(len(asked), len(reasons)) - 1])

    monkeypatch.setattr(prefill_servers, "fetch", fetch)
    site.servers.ensure(NOBODY)
    assert wait_for(lambda: len(asked) > len(reasons))
    gaps = [after - before for before, after in itertools.pairwise(asked)]
    least = 0.01, 0.02, 0.04, 0.05, 0.05
    assert all(gap > 0.95 * pause for gap, pause in zip(gaps, least, strict=False)), gaps
    lines = [line for line in caplog.messages if "no facts of" in line]
    assert [line.rpartition(" ")[2] for line in lines] == ["one", "other", "one"]


def test_a_silent_server_is_kept_while_requests_ask_for_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent server is forgotten KNOWN_S after its last request, not after its first."""
    monkeypatch.setattr(prefill_http, "ASK_S", 0.1)
    monkeypatch.setattr(prefill_servers, "CHECK_S", 0.05)
    monkeypatch.setattr(prefill_servers, "KNOWN_S", 1.0)
    with silent() as address:
        site.servers.ensure(address)
        server, asked = site.servers._servers[address], site.servers._servers[address].asked
        while time.monotonic() < asked + 2:
            site.servers.ensure(address)
            time.sleep(0.02)
        assert (site.servers._servers[address], server.gone) == (server, False)
        assert wait_for(lambda: server.gone)


def test_servers_without_requests_are_forgotten(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers without requests are forgotten after KNOWN_S, except those that are ready."""
    monkeypatch.setattr(prefill_http, "ASK_S", 0.1)
    monkeypatch.setattr(prefill_servers, "CHECK_S", 0.05)
    with silent() as address, publishing(row_of(prefill)) as real:
        assert site.is_ready(real)
        for one in many(address, 20):
            site.servers.ensure(one)
        assert site.held()["servers"] == 21
        monkeypatch.setattr(prefill_servers, "KNOWN_S", 0.0)
        assert wait_for(lambda: set(site.servers._servers) == {real})
        time.sleep(0.3)
        assert set(site.servers._servers) == {real}
        assert site.request(real, prefill) == "warm"


class Late:
    """A lock whose first acquisition by the creating thread waits for a condition."""

    def __init__(self, lock: Any, happened: Any) -> None:
        self._lock, self._happened, self._asker = lock, happened, threading.current_thread()

    def __enter__(self) -> None:
        if threading.current_thread() is self._asker:
            self._asker = None
            assert wait_for(self._happened)
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


def test_a_server_that_becomes_ready_is_connected_once(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that becomes ready during a request's check is not connected a second time."""
    looks, real = threading.Event(), prefill_servers.fetch

    async def fetch(*args: Any) -> Any:
        while not looks.is_set():
            await asyncio.sleep(0.01)
        return await real(*args)

    def is_ready() -> bool:
        looks.set()
        return address in site.table

    monkeypatch.setattr(prefill_servers, "fetch", fetch)
    with publishing(row_of(prefill)) as address:
        assert not site.servers.ensure(address)
        lock = site.servers._lock
        site.servers._lock = Late(lock, is_ready)
        assert site.servers.ensure(address)
        site.servers._lock = lock
        assert site.request(address, prefill) == "warm"
        assert site.held()["servers"] == site.held()["sockets"] == 1


def test_a_server_that_becomes_ready_is_not_removed_with_its_refusal(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that becomes ready while a request finds it refused stays connected."""
    monkeypatch.setattr(prefill_servers, "AGAIN_S", 0.0)
    answers = [NO_ROUTE]
    with serving(lambda _: answers[-1]) as address:
        assert wait_for(lambda: site.servers.ensure(address))
        answers.append((200, answer_of(row_of(prefill))))
        assert "PAIR-01" in str(site.servers.refuse(address, None))  # so it is queried again
        held, lock, real = threading.Event(), site.servers._lock, site.manager.resolve

        def is_ready() -> bool:
            held.set()
            return address in site.table

        site.manager.resolve = lambda one: held.wait(10) and real(one)
        assert not site.servers.ensure(address)
        site.servers._lock = Late(lock, is_ready)
        assert "PAIR-01" in str(site.servers.refuse(address, None))
        site.servers._lock = lock
        assert site.servers.ensure(address)
        assert site.servers.refuse(address, None) is None
        assert site.request(address, prefill) == "warm"
        assert site.held()["servers"] == 1


@pytest.mark.parametrize("late", ["other rows", "a refusal"])
def test_a_former_servers_late_answer_has_no_effect(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """A late answer to a check of a former server does not affect the next one at its address.

    The former server was forgotten while the check was in flight.
    """
    monkeypatch.setattr(prefill_servers, "CHECK_S", 0.05)
    held, asked, real = threading.Event(), list[str](), prefill_servers.fetch

    async def fetch(*args: Any) -> Any:
        asked.append("")
        if len(asked) != 2:
            return await real(*args)
        while not held.is_set():
            await asyncio.sleep(0.01)
        if late == "a refusal":
            raise MixKVError("MIXKV-PAIR-02", "late")
        return {}

    monkeypatch.setattr(prefill_servers, "fetch", fetch)
    with publishing(row_of(prefill)) as address:
        assert site.is_ready(address)
        site.servers.check(address)
        assert wait_for(lambda: len(asked) == 2)
        site.servers.forget(address)
        assert site.is_ready(address)
        entry = site.table[address]
        held.set()
        time.sleep(0.3)
        assert site.table[address] is entry
        assert site.request(address, prefill) == "warm"


def test_a_lost_bootstrap_server_is_served_until_removed(site: Site, prefill: Prefill) -> None:
    """A server whose bootstrap server is gone is served until SGLang's heartbeats remove it.

    Then its pending requests go cold. It is connected again if it returns at the same address.
    """
    with publishing(row_of(prefill)) as address:
        assert site.is_ready(address)
    entry = site.decode.open(100, TOKENS, site.peer(address))  # without a target, no deadline
    site.servers.check(address)
    assert site.request(address, prefill) == "warm"
    assert site.is_ready(address)
    del site.table[address]
    site.servers.ensure(NOBODY)
    assert wait_for(lambda: entry.state is not None)
    assert site.ended(entry) == "lost"
    with pytest.raises(MixKVError, match="MIXKV-PAIR-03"):
        site.peer(address)
    assert not site.servers.ensure(address)
    with publishing(row_of(prefill), port=int(address.rpartition(":")[2])):
        assert site.is_ready(address)
        assert site.request(address, prefill) == "warm"


def test_a_removed_server_is_connected_again_without_delay(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request for a server that SGLang has removed does not wait for the task to notice.

    The former connection is dropped.
    """
    monkeypatch.setattr(prefill_servers, "CHECK_S", 60.0)
    with publishing(row_of(prefill)) as address:
        assert site.is_ready(address)
        former = site.servers._servers[address]
        site.table.pop(address)
        assert not site.servers.ensure(address)
        assert (former.gone, site.servers._servers[address].ready) == (True, False)
        assert site.is_ready(address)
        assert site.request(address, prefill) == "warm"
        assert site.held()["sockets"] == 1


@pytest.mark.parametrize(
    ("raises", "text"),
    [
        (MixKVError("MIXKV-PAIR-04", "too many ranks"), "[MIXKV-PAIR-04] too many ranks"),
        (ValueError("page_size"), "[MIXKV-PAIR-03] SGLang refuses it: page_size"),
    ],
)
def test_a_server_that_sglang_cannot_resolve_is_refused_with_its_reason(
    site: Site, prefill: Prefill, raises: Exception, text: str
) -> None:
    def resolve(_: str) -> None:
        raise raises

    site.manager.resolve = resolve
    with publishing(row_of(prefill)) as address:
        assert wait_for(lambda: site.servers.ensure(address))
        assert str(site.servers.refuse(address, None)).endswith(f" is refused: {text}")
    assert not site.held()["sockets"]


def test_a_server_requested_again_is_checked_by_one_task(site: Site, prefill: Prefill) -> None:
    """A server that is removed and requested again at once is checked by one task only.

    The former connection's task has not run in between.
    """
    with publishing(row_of(prefill)) as address:
        for _ in range(3):
            assert site.is_ready(address)
            site.table.pop(address)
            assert not site.servers.ensure(address)
        assert site.is_ready(address)
        assert wait_for(lambda: len(site.servers._background.running) == 1, 5)
        assert site.request(address, prefill) == "warm"


def test_a_rank_restarted_at_another_port_is_found(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that restarts at another port is found, although SGLang does not notice.

    The rank's bootstrap server has answered all the time.
    """
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

        assert not wait_for(is_noticed, 1), "the published rows have not changed"
        rows[:] = [row_of(other)]
        assert wait_for(is_noticed)
        assert site.is_ready(address)
        assert site.request(address, other) == "warm"
    other.close()


def test_a_doubt_that_arises_during_a_check_is_checked_again(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may restart right after its server has answered a check."""
    monkeypatch.setattr(prefill_servers, "CHECK_S", 0.05)
    row, checks = row_of(prefill), list[str]()

    def answer(path: str) -> tuple[int, bytes]:
        if not site.table:
            return 200, answer_of(row)
        checks.append(path)
        if len(checks) > 1:
            return 200, answer_of(row_of(prefill, instance=draw_instance(), rank_port=PORT + 1))
        site.servers.check(address)
        return 200, answer_of(row)

    with serving(answer) as address:
        assert site.is_ready(address)
        site.servers.check(address)
        assert wait_for(lambda: address not in site.table)
        assert len(checks) == 2


@pytest.mark.parametrize(
    ("status", "body", "is_another"),
    [
        (200, None, False), (200, b"", True), (200, b'{"protocol":1,"rows":[]}', True),
        (404, b"", True), (409, b"no sglang-mixkv", True), (500, b"", False),
        (503, b"not all prefill ranks have registered", False), (0, b"late", False),
        (0, None, False),
    ],
)  # fmt: skip
def test_only_an_answer_drops_a_server_in_doubt(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch,
    status: int, body: bytes | None, is_another: bool,
) -> None:  # fmt: skip
    """A server in doubt is dropped only if it answers with other rows, or without the plugin.

    Its connections stay open if it does not answer, if it answers late or "not ready yet", or if a
    proxy answers with an error.
    """
    monkeypatch.setattr(prefill_servers, "CHECK_S", 0.05)
    monkeypatch.setattr(prefill_http, "ASK_S", 0.3)
    facts, doubts, go = answer_of(row_of(prefill)), list[str](), threading.Event()

    def answer(path: str) -> tuple[int, bytes]:
        if not site.table:
            return 200, facts
        doubts.append(path)
        if not status and body:
            go.wait()
        return status or 200, facts if body is None else body

    def is_heard() -> bool:
        """Return True once the answer to a check was handled, or the entry was replaced."""
        if entry is site.table.get(address):
            site.servers.check(address)
        return len(doubts) > 2 or entry is not site.table.get(address)

    with serving(answer) as address:
        assert site.is_ready(address)
        entry = site.table[address]
        site.servers.ensure(address)
        assert wait_for(is_heard)
        assert (site.table.get(address) is not entry) == is_another
        if not is_another:
            assert site.request(address, prefill) == "warm"
        go.set()


def test_a_rank_that_registers_late_is_found(
    site: Site, prefill: Prefill, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that registers late is found by the first request that contacts it.

    A server of an earlier release may report too early that all ranks are registered. Its rows are
    fetched again only when a request contacts a rank without a row. That request is refused, and
    prefill is notified.
    """
    monkeypatch.setattr(prefill_servers, "CHECK_S", 0.05)
    asked, rows = list[str](), [row_of(prefill)]
    late = row_of(prefill, rank_port=PORT + 1, instance=draw_instance(), address="")
    infos = [{"rank_ip": "127.0.0.1", "rank_port": PORT + number} for number in (0, 1)]

    def answer(path: str) -> tuple[int, bytes]:
        asked.append(path)
        return 200, answer_of(*rows)

    def is_planned(of: list[Any]) -> bool:
        site.servers.ensure(address)
        try:
            return bool(site.servers.plan(address, of, receiver).sources)
        except MixKVError:
            return False

    with serving(answer) as address:
        assert site.is_ready(address)
        for _ in range(5):
            assert is_planned(infos[:1])
            time.sleep(0.05)
        assert len(asked) == 1
        assert not is_planned(infos)
        assert [error.reason for error in site.reasons] == ["no_plugin"]
        assert wait_for(lambda: receiver.notified == [[PORT, PORT + 1]] * 3)
        assert wait_for(lambda: len(asked) == 2)
        assert is_planned(infos[:1]), "the known rank must stay usable"
        rows.append(late)
        assert wait_for(lambda: is_planned(infos), 3)
        assert site.request(address, prefill) == "warm"


# ---------------------------------------------------------------- races


@contextmanager
def at(site: Site, point: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Yield a list. A function that the test adds to the list is called once at the given point.

    A point is the beginning or the end of a call that a server's task or thread makes. The function
    runs in a separate thread, since it may need a lock that is held. It stays in the list until it
    has returned.
    """
    name, when = point.split()
    todo: list[Any] = []
    others: list[threading.Thread] = []

    def call() -> None:
        todo[0]()
        todo.clear()

    def happens(now: str) -> None:
        if now == when and todo and not others:
            others.append(threading.Thread(target=call, daemon=True))
            others[0].start()
            others[0].join(0.3)

    owner = {"fetch": prefill_servers, "ranks_of": prefill_servers, "_connect": site.servers,
             "resolve": site.manager, "dial": site.decode.channel,
             "add": site.decode.channel}[name]  # fmt: skip
    real: Any = getattr(owner, name)

    async def awaited(*args: Any) -> Any:
        happens("begins")
        found = await real(*args)
        happens("ends")
        return found

    def called(*args: Any) -> Any:
        happens("begins")
        found = real(*args)
        happens("ends")
        return found

    monkeypatch.setattr(owner, name, awaited if owner is prefill_servers else called)
    yield todo
    assert not todo, "the point was not reached"


POINTS = [f"{name} {when}" for name in ("fetch", "resolve", "dial", "add", "_connect", "ranks_of")
          for when in ("begins", "ends")]  # fmt: skip


@pytest.mark.parametrize("is_asked_for", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_a_server_may_be_forgotten_at_any_point(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch, point: str, is_asked_for: bool
) -> None:
    """A server may be forgotten at any point of its connection.

    Nothing that its task does later has an effect, and the next request connects it again.
    `is_asked_for`: whether that request comes before the task ends.
    """
    refuses = [point.startswith("ranks_of")]

    def answer(path: str) -> tuple[int, bytes]:
        if refuses[0]:
            return ranks(path) if path.startswith("/route") else NO_ROUTE
        return 200, answer_of(row_of(prefill))

    def forget() -> None:
        refuses[0] = False
        site.servers.forget(address)
        if is_asked_for:
            site.servers.ensure(address)

    with serving(answer) as address:
        with at(site, point, monkeypatch) as todo:
            todo.append(forget)
            assert not site.servers.ensure(address)
            assert wait_for(lambda: not todo)
            if not is_asked_for:
                assert wait_for(lambda: not site.servers._background.running)
                assert site.table == {} == site.servers._refusals
                assert wait_for(lambda: not any(site.held().values())), site.held()
        for _ in range(3):
            assert site.is_ready(address)
            assert site.servers.refuse(address, None) is None
            assert site.request(address, prefill) == "warm"
            time.sleep(0.05)
        assert site.held()["servers"] == site.held()["sockets"] == 1
        site.servers.forget(address)
        assert wait_for(lambda: not any(site.held().values()))
        assert wait_for(lambda: not site.servers._background.running)


@pytest.mark.parametrize("then", ["refused again", "ready", "forgotten"])
def test_the_expiry_of_a_refusal_has_no_later_effect(
    site: Site, prefill: Prefill, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    real, minutes, refuses = asyncio.sleep, list[threading.Event](), [True]

    async def sleep(seconds: float) -> None:
        if seconds != prefill_servers.KNOWN_S:
            return await real(seconds)
        minutes.append(ends := threading.Event())
        while not ends.is_set():
            await real(0.01)

    def answer(_: str) -> tuple[int, bytes]:
        return NO_ROUTE if refuses[0] else (200, answer_of(row_of(prefill)))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(prefill_servers, "AGAIN_S", 0)
    with serving(answer) as address:
        assert wait_for(lambda: site.servers.ensure(address))
        assert wait_for(lambda: len(minutes) == 1)
        assert site.servers.refuse(address, None)
        if then == "forgotten":
            site.servers.forget(address)
        refuses[0] = then == "refused again"
        assert wait_for(lambda: site.servers.ensure(address))
        if refuses[0]:
            assert wait_for(lambda: len(minutes) == 2)
        running = len(site.servers._background.running)
        minutes[0].set()
        assert wait_for(lambda: len(site.servers._background.running) == running - 1)
        assert address in site.table
        assert bool(site.servers.refuse(address, None)) == refuses[0]
        if not refuses[0]:
            assert site.request(address, prefill) == "warm"
            return
        minutes[1].set()
        assert wait_for(lambda: not site.servers._background.running)
        assert (site.table, site.servers._refusals) == ({}, {})


def test_plans_are_cached_by_a_requests_ranks(site: Site, prefill: Prefill) -> None:
    """A plan is cached by the ranks that a request contacts, not by the identity of SGLang's list.

    SGLang frees these lists when its pool is cleared, and new ones may have the same identity.
    """
    site.manager.resolve = lambda _: sizes(dp_size=8)
    rows = [row_of(prefill)] + [
        row_of(prefill, rank_port=PORT + rank, instance=draw_instance(), address="")
        for rank in range(1, 8)
    ]
    with publishing(*rows) as address:
        assert site.is_ready(address)
        for number in range(400):
            infos = [{"rank_ip": "127.0.0.1", "rank_port": PORT + (rank := number % 7)}]
            plan = site.servers.plan(address, infos, None)
            assert site.servers.plan(address, infos, None) is plan
            (source,) = plan.sources
            assert source.peer[: len(rows[0].instance)] == rows[rank].instance
            del infos


# ---------------------------------------------------------------- refused requests


class Receiver:
    """The part of SGLang's receiver that notifies prefill of an abort, once.

    As in SGLang, the sockets are in a dict of the class.
    """

    abort_notified = True
    bootstrap_infos: Any = ()
    _socket_cache: ClassVar[dict[str, Any]] = {"another": "server's"}
    _socket_locks: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.notified: list[list[int]] = []
        self.closed: list[int] = []
        self.fresh: list[bool] = []  # by notification, whether there was no socket yet

    def ensure_abort_notified(self) -> None:
        if self.abort_notified:
            return
        self.abort_notified = True
        self.fresh.append(not self._socket_cache)
        self.notified.append([info["rank_port"] for info in self.bootstrap_infos])
        for info in self.bootstrap_infos:
            self._socket_cache[str(info)] = self

    def close(self, linger: int) -> None:
        self.closed.append(linger)


def ranks(path: str) -> tuple[int, bytes]:
    """Answer GET requests as a server with TP 2, two stages and no plugin."""
    if path.endswith("/mixkv"):
        return NO_ROUTE
    query = {name: int(value) for name, (value,) in parse_qs(urlsplit(path).query).items()}
    sizes: dict[str, Any] = {"dp_size": 1, "attn_cp_size": 1, "attn_tp_size": 2, "pp_size": 2}
    if "huge" in path:
        sizes["dp_size"] = 10**5
    port = 9000 + 10 * query["target_pp_rank"] + query["target_tp_rank"]
    found = {"rank_ip": "127.0.0.1", "rank_port": port}
    return 200, json.dumps(sizes if query["target_tp_rank"] < 0 else found).encode()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Yield a receiver, with short pauses between the notifications of prefill."""
    monkeypatch.setattr(notices, "PAUSES_S", (0.0, 0.05, 0.05))
    monkeypatch.setattr(Receiver, "_socket_cache", {"another": "server's"})
    yield Receiver()
    assert Receiver._socket_cache == {"another": "server's"}


def test_each_rank_of_a_refused_server_is_notified_repeatedly(
    site: Site, receiver: Receiver
) -> None:
    """Each rank of a refused server is notified several times.

    Prefill ignores an abort that arrives before its request. The ranks are looked up once, and a
    receiver that raises does not stop the notifications of others.
    """
    asked, broken = list[str](), Receiver()
    del broken.notified  # so that it raises

    def answer(path: str) -> tuple[int, bytes]:
        asked.append(path)
        return ranks(path)

    with serving(answer) as address:
        assert wait_for(lambda: site.servers.ensure(address))
        for one in (broken, receiver):
            assert site.servers.refuse(address, one)
        assert wait_for(lambda: len(receiver.notified) == 3)
    assert len([path for path in asked if path != "/mixkv"]) == 5
    assert receiver.notified == [[9000, 9010, 9001, 9011]] * 3
    assert receiver.abort_notified, "only a copy of the receiver may notify"
    assert wait_for(lambda: len(receiver.closed) == 4), "sockets are left open"


def test_a_second_burst_of_aborts_opens_new_sockets(site: Site, receiver: Receiver) -> None:
    """A second burst of aborts opens new sockets, since those of the first were closed."""
    with serving(ranks) as address:
        for burst in (1, 2):
            assert wait_for(lambda: site.servers.ensure(address))
            assert site.servers.refuse(address, receiver)
            assert wait_for(lambda burst=burst: len(receiver.notified) == 3 * burst)
            assert wait_for(lambda burst=burst: len(receiver.closed) == 4 * burst)
            assert receiver.fresh == [True, False, False] * burst


def test_a_server_with_unknown_ranks_gets_no_abort(site: Site, receiver: Receiver) -> None:
    other = Receiver()
    with serving(ranks) as address:
        for one, its in ((f"{address}/huge", receiver), (address, other)):
            assert wait_for(lambda one=one: site.servers.ensure(one))
            assert site.servers.refuse(one, its)
        assert wait_for(lambda: len(other.notified) == 3)
    assert receiver.notified == []


@pytest.mark.parametrize(
    ("most", "host", "found"),
    [(4, "127.0.0.1", 4), (3, "127.0.0.1", 0), (4, "::1", 4), (4, "rank.example", 0), (4, 7.5, 0)],
)
def test_ranks_need_ip_addresses_and_are_limited(
    monkeypatch: pytest.MonkeyPatch, most: int, host: Any, found: int
) -> None:
    """A server's ranks are known only up to MAX_RANKS, and only if they have IP addresses."""
    monkeypatch.setattr(prefill_http, "MAX_RANKS", most)

    def answer(path: str) -> tuple[int, bytes]:
        status, body = ranks(path)
        return status, body.replace(b'"127.0.0.1"', json.dumps(host).encode())

    with serving(answer) as address:
        of = asyncio.run(prefill_http.ranks_of(address, Names()))
    assert [one["rank_ip"] for one in of] == [host] * found


@pytest.mark.parametrize(("beyond", "is_read"), [(0, True), (1, False)])
def test_an_answer_is_read_up_to_its_maximum_size(
    monkeypatch: pytest.MonkeyPatch, prefill: Prefill, beyond: int, is_read: bool
) -> None:
    monkeypatch.setattr(prefill_http, "MAX_BODY", 5000)
    body = answer_of(row_of(prefill)).ljust(5000 + beyond)
    with serving(lambda _: (200, body)) as address:
        if is_read:
            assert len(asyncio.run(fetch(address, Names()))) == 1
        else:
            with pytest.raises(MixKVError, match="PAIR-02"):
                asyncio.run(fetch(address, Names()))
