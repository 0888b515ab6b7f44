"""Requests to prefill servers, and the answers of a bootstrap server, without SGLang.

The tests cover each status, each size at its limit, and drawn numbers of ranks.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig.process.answers import serving, silent

web = pytest.importorskip("aiohttp.web")

from sglang_mixkv.channel.handshake import MAX_ROW_BYTES, Row, Target  # noqa: E402
from sglang_mixkv.channel.messages import PROTOCOL  # noqa: E402
from sglang_mixkv.engine import prefill_http  # noqa: E402
from sglang_mixkv.engine.bootstrap import (  # noqa: E402
    KEY,
    PATH,
    DraftBootstrapServer,
    _kept,
)
from sglang_mixkv.engine.bootstrap import SIZES as BOOTSTRAP_SIZES  # noqa: E402
from sglang_mixkv.engine.prefill_http import (  # noqa: E402
    Names,
    check_sizes,
    fetch,
    ranks_of,
    read_rows,
)
from sglang_mixkv.errors import MixKVError  # noqa: E402

ROW = Row(
    PROTOCOL, "0.4.0", "0.5.23", b"instance", "10.0.0.1", 9000, "", 1, 0, 0, (8,), "mooncake",
    Target(0, 61, layer_ids=False, even=True),
)  # fmt: skip


def body_of(*rows: Row) -> bytes:
    return msgspec.json.encode({"protocol": 3, "rows": rows})


def asked(status: int, body: bytes) -> Any:
    """Return the result of `fetch` for this answer, or the error that it raises."""
    paths = list[str]()

    def answer(path: str) -> tuple[int, bytes]:
        paths.append(path)
        return status, body

    with serving(answer) as address:
        try:
            return asyncio.run(fetch(address, Names()))
        except Exception as error:
            return error
        finally:
            assert paths == [PATH]


# ---------------------------------------------------------------- rows


def test_rows_are_keyed_by_the_ranks_ip_and_port() -> None:
    rows = [msgspec.structs.replace(ROW, rank_port=9000 + n) for n in range(3)]
    assert asked(200, body_of(*rows)) == {("10.0.0.1", 9000 + n): rows[n] for n in range(3)}
    assert read_rows(body_of()) == {}


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (404, MixKVError, "MIXKV-PAIR-01.*does not run sglang-mixkv"),
        (409, MixKVError, "MIXKV-PAIR-01.*of the server. Start every node"),
        (503, ConnectionError, "503 of the server"), (500, ConnectionError, "500 of the server"),
        (302, ConnectionError, "302"), (201, ConnectionError, "201"),
    ],
)  # fmt: skip
def test_each_http_status_has_its_error(status: int, kind: type[Exception], words: str) -> None:
    found = asked(status, b"of the server")
    assert type(found) is kind
    with pytest.raises(kind, match=words):
        raise found


def test_512_bytes_of_an_error_answer_are_shown() -> None:
    assert str(asked(503, b"x" * 511 + b"yz")) == f"503 {'x' * 511}y"
    assert str(asked(503, b"\xff")) == "503 �"


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"rows":[{}]}', b'{"rows":[1]}', b"[" * 100_000],
)  # fmt: skip
def test_an_answer_without_valid_rows_is_refused(body: bytes) -> None:
    with pytest.raises(MixKVError, match="MIXKV-PAIR-02"):
        read_rows(body)


def test_an_answer_at_and_beyond_the_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prefill_http.MAX_BODY == 4 << 20
    monkeypatch.setattr(prefill_http, "MAX_BODY", 1 << 20)
    whole = body_of(ROW)
    assert asked(200, whole.ljust(1 << 20)) == {("10.0.0.1", 9000): ROW}
    assert "1 MiB" in str(asked(200, whole.ljust((1 << 20) + 1)))


def test_a_request_to_a_silent_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_http, "ASK_S", 0.1)
    with silent() as address:
        with pytest.raises(TimeoutError):
            asyncio.run(fetch(address, Names()))
        assert asyncio.run(ranks_of(address, Names())) == []


def test_a_redirect_is_not_followed() -> None:
    """A redirect is not followed, and no compressed answer is requested."""

    async def run() -> None:
        seen = list[Any]()

        async def answer(request: Any) -> Any:
            seen.append((request.path, request.headers["Accept-Encoding"]))
            return web.Response(status=307, headers={"Location": "/elsewhere"})

        app = web.Application()
        app.router.add_get("/{any:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            with pytest.raises(ConnectionError, match="307"):
                await fetch(f"127.0.0.1:{runner.addresses[0][1]}", Names())
        finally:
            await runner.cleanup()
        assert seen == [(PATH, "identity")]

    asyncio.run(run())


# ---------------------------------------------------------------- ranks of a refused server

NAMES = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
SIZES = ("dp_size", "attn_cp_size", "attn_tp_size", "pp_size")


def a_server_of(*counts: int, **sizes: Any) -> Callable[[str], tuple[int, bytes]]:
    """Return a function that answers at /route as SGLang does."""

    def answer(path: str) -> tuple[int, bytes]:
        url = urlsplit(path)
        assert url.path == "/route"
        query = {name: int(value) for name, (value,) in parse_qs(url.query).items()}
        ranks = tuple(query[name] for name in NAMES)
        if ranks == (-1,) * 4:
            found = dict(zip(SIZES, counts, strict=True)) | sizes
            return 200, json.dumps({k: v for k, v in found.items() if v is not None}).encode()
        if any(rank >= count for rank, count in zip(ranks, counts, strict=True)):
            return 404, b"unknown"
        number = int("1" + "".join(map(str, ranks)))
        return 200, json.dumps({"rank_ip": "10.0.0.1", "rank_port": str(number)}).encode()

    return answer


@settings(max_examples=8)
@given(st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_every_rank_is_looked_up(counts: list[int]) -> None:
    with serving(a_server_of(*counts)) as address:
        found = asyncio.run(ranks_of(address, Names()))
    dp, cp, tp, pp = map(range, counts)
    assert found == [
        {"rank_ip": "10.0.0.1", "rank_port": int(f"1{a}{b}{c}{d}")}
        for a in dp for b in cp for c in tp for d in pp
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [((1, 1, 1, 1), {"dp_size": "many"}),
     *[((1, 1, 1, 1), {name: value}) for name in SIZES for value in (0, -1, None, 2, 4097)]],
)  # fmt: skip
def test_no_rank_is_known_after_an_invalid_answer(
    counts: tuple[int, ...], sizes: dict[str, Any]
) -> None:
    """No rank is known if a server does not answer for one of its ranks or has invalid sizes."""
    with serving(a_server_of(*counts, **sizes)) as address:
        assert asyncio.run(ranks_of(address, Names())) == []


def test_all_ranks_are_looked_up_within_one_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time-out of one request applies to the requests for all ranks together.

    The test's server answers each request shortly before the time-out.
    """
    monkeypatch.setattr(prefill_http, "ASK_S", 0.4)
    paths, answer = list[str](), a_server_of(4, 1, 4, 1)

    def slow(path: str) -> tuple[int, bytes]:
        paths.append(path)
        time.sleep(0.15)
        return answer(path)

    with serving(slow) as address:
        assert asyncio.run(ranks_of(address, Names())) == []
    assert len(paths) <= 3


def test_ranks_are_looked_up_up_to_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prefill_http.MAX_RANKS == 1024
    assert (prefill_http.ASK_S, prefill_http.MAX_BODY) == (5.0, 4 << 20)
    monkeypatch.setattr(prefill_http, "MAX_RANKS", 6)
    for counts, known in (((1, 2, 3, 1), 6), ((1, 7, 1, 1), 0)):
        with serving(a_server_of(*counts)) as address:
            assert len(asyncio.run(ranks_of(address, Names()))) == known


@pytest.mark.parametrize(
    ("counts", "ranks"),
    [([1, 1, 1, 1], 1), ([2, 3, 4, 5], 120), ([2, 4, 8, 16], 1024), ([5, 5, 41, 1], None),
     ([-1, -2, 3, 4], None), *(([2] * at + [0] + [2] * (3 - at), None) for at in range(4))],
)  # fmt: skip
def test_a_server_has_one_to_1024_ranks(counts: list[int], ranks: int | None) -> None:
    """A size of 0, whichever it is, and sizes with too large a product are refused."""
    if ranks is not None:
        assert check_sizes(counts) == ranks
        return
    with pytest.raises(MixKVError, match="MIXKV-PAIR-04"):
        check_sizes(counts)


# ---------------------------------------------------------------- the bootstrap server


class Plain:
    """The part of SGLang's bootstrap server that the plugin extends."""

    dp_size, attn_cp_size, attn_tp_size, pp_size = 1, 1, 1, 1
    status = 200

    def __init__(self) -> None:
        self.app = web.Application()
        self._setup_routes()

    def _setup_routes(self) -> None:
        self.app.router.add_get("/route", lambda _: web.Response())

    async def _handle_route_put(self, request: Any) -> Any:
        return web.Response(status=self.status)


class Server(DraftBootstrapServer, Plain):
    def put(self, **row: Any) -> int:
        async def read() -> dict[str, Any]:
            return RANK | row

        put: Any = self._handle_route_put(SimpleNamespace(json=read))
        return asyncio.run(put).status

    def get(self) -> tuple[int, Any]:
        answer: Any = asyncio.run(self._handle_rows(None))  # type: ignore[arg-type]
        is_json = answer.content_type == "application/json"
        return answer.status, json.loads(answer.body) if is_json else answer.text


RANK = {
    "system_dp_rank": None, "attn_dp_rank": 0, "attn_cp_rank": 0, "attn_tp_rank": 0, "pp_rank": 0,
    "rank_ip": "10.0.0.1", "rank_port": 9000,
}  # fmt: skip


def test_a_bootstrap_server_returns_the_rows_of_all_ranks() -> None:
    server = Server()
    assert {route.resource.canonical for route in server.app.router.routes()} == {"/route", PATH}
    for name in ("system_dp_rank", "attn_dp_rank", "attn_cp_rank", "attn_tp_rank", "pp_rank"):
        for number in (1, 2):
            assert server.put(**{name: number, KEY: {"of": [name, number]}}) == 200
    assert server.put(**{KEY: {"of": "former"}}) == 200
    assert server.put(**{KEY: {"of": "later"}}) == 200  # replaces the former row
    status, body = server.get()
    assert (status, body["protocol"], len(body["rows"])) == (200, PROTOCOL[1], 11)
    assert body["rows"][-1] == {"of": "later"}
    server.status = 400
    assert server.put(pp_rank=7, **{KEY: {}}) == 400
    assert len(server.mixkv_rows) == 11


def test_an_unready_server_lists_ranks_without_a_row() -> None:
    server = Server()
    for number in range(10):
        server.put(pp_rank=number, rank_port=number)
    status, text = server.get()
    assert status == 409
    assert "'10.0.0.1:7'" in text
    assert "10.0.0.1:8" not in text
    sizes = dict.fromkeys(BOOTSTRAP_SIZES, 1)
    for size in sizes:
        for few, found in ((None, 503), (10, 409), (11, 503)):
            vars(server).update({**sizes, size: few})
            assert server.get()[0] == found


def test_invalid_or_too_long_rows_are_not_stored() -> None:
    frame = len(b'{"a":""}')
    longest = {"a": "x" * (MAX_ROW_BYTES - frame)}
    assert len(_kept(longest) or b"") == MAX_ROW_BYTES
    assert _kept({"a": "x" * (MAX_ROW_BYTES - frame + 1)}) is None
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for row in ([1], "row", None, 5, {"a": object()}, {"a": float}, {"a": deep}):
        assert _kept(row) is None
    assert _kept({}) == b"{}"
