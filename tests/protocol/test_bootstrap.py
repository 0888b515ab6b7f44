"""GET /mixkv on SGLang's bootstrap server returns the rows of all prefill ranks; decode reads
them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import requests
from rig.channel import servers
from rig.ring.rank import wait_for_port

from mixkv_demo.ports import free_port
from sglang_mixkv.channel.handshake import MAX_ROW_BYTES, Row, StagingFacts
from sglang_mixkv.engine import bootstrap, prefill_http
from sglang_mixkv.engine.bootstrap import KEY, PATH
from sglang_mixkv.engine.prefill_http import Names
from sglang_mixkv.errors import MixKVError

STAGING = StagingFacts("mooncake", b"endpoint", 1 << 20, 1 << 20, 64)


def row(rank: int, **changes: Any) -> Row:
    plain = servers.row(b"instance", f"tcp://127.0.0.1:{9100 + rank}", STAGING)
    of_rank = {"rank_port": 9000 + rank, "attn_tp": 2, "attn_tp_rank": rank}
    return msgspec.structs.replace(plain, **{**of_rank, **changes})


def registration(rank: int, own: Row | None) -> dict[str, Any]:
    """Return the payload that SGLang's register_to_bootstrap sends for one of two ranks."""
    payload = {
        "attn_tp_size": 2, "attn_tp_rank": rank, "attn_cp_size": 1, "attn_cp_rank": 0,
        "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1,
        "system_dp_rank": 0, "rank_ip": "127.0.0.1", "rank_port": 9000 + rank, "page_size": 4,
        "kv_cache_dtype": "auto", "kv_layout": None, "dsv41_spec_layout": None,
        "load_balance_method": "round_robin", "enable_dsa_cache_layer_split": False,
        "enable_kv_cache_sharding": False, "prefill_http_port": 1,
        "decode_allocation_policy": "early",
    }  # fmt: skip
    return payload if own is None else {**payload, KEY: msgspec.to_builtins(own)}


class Server:
    def __init__(self) -> None:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVBootstrapServer

        from sglang_mixkv.engine.bootstrap import DraftBootstrapServer

        made = type("Draft", (DraftBootstrapServer, MooncakeKVBootstrapServer), {})
        self.port = free_port()
        self.server = made("127.0.0.1", self.port)
        wait_for_port(self.port)
        self.address = f"127.0.0.1:{self.port}"

    def put(self, rank: int, own: Row | None, **other: int) -> None:
        url, payload = f"http://{self.address}/route", registration(rank, own) | other
        assert requests.put(url, json=payload, timeout=5).status_code == 200


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.server.close()


def test_rows_are_returned_as_put_and_replaced_by_a_restart(
    server: Server,
) -> None:
    later_build, restarted = row(0, protocol=(3, 5)), row(1, instance=b"another_")
    for one in (later_build, row(1), restarted):
        server.put(one.attn_tp_rank, one)
    expected = {("127.0.0.1", 9000): later_build, ("127.0.0.1", 9001): restarted}
    assert asyncio.run(prefill_http.fetch(server.address, Names())) == expected


def rows_of(server: Server) -> int:
    """Return the number of rows in the server's answer, 0 for HTTP 503."""
    answer = requests.get(f"http://{server.address}{PATH}", timeout=5)
    assert answer.status_code in (200, 503)
    return len(answer.json()["rows"]) if answer.status_code == 200 else 0


def test_no_row_is_returned_before_all_ranks_have_registered(server: Server) -> None:
    """The server answers 503 until all ranks have registered. SGLang repeats a PUT if the answer is
    late, and SGLang's own counter counts both PUTs."""
    assert rows_of(server) == 0
    for _ in range(3):
        server.put(0, row(0))
        assert rows_of(server) == 0
    with pytest.raises(ConnectionError, match="503"):
        asyncio.run(prefill_http.fetch(server.address, Names()))
    server.put(1, row(1))
    assert rows_of(server) == 2


@pytest.mark.parametrize("size", ["attn_dp", "system_dp", "attn_cp", "pp"])
def test_each_registered_size_multiplies_the_expected_ranks(server: Server, size: str) -> None:
    """Ranks send `attn_dp_size` with DP attention; replicas without DP attention send
    `system_dp_size`."""
    for number, (one, tp) in enumerate((one, tp) for one in (0, 1, 1, 2) for tp in (0, 1)):
        assert rows_of(server) == 0, number
        server.put(tp, row(tp), **{f"{size}_size": 3, f"{size}_rank": one})
    assert rows_of(server) == 6


@pytest.mark.parametrize(("beyond", "status"), [(0, 200), (1, 409)])
def test_a_row_longer_than_the_limit_is_rejected(server: Server, beyond: int, status: int) -> None:
    plain = msgspec.to_builtins(row(0)) | {"more": ""}
    plain["more"] = "x" * (MAX_ROW_BYTES + beyond - len(msgspec.json.encode(plain)))
    url = f"http://{server.address}/route"
    for rank, own in ((0, plain), (1, msgspec.to_builtins(row(1)))):
        requests.put(url, json=registration(rank, None) | {KEY: own}, timeout=5)
    assert requests.get(f"http://{server.address}{PATH}", timeout=5).status_code == status


@pytest.mark.parametrize("most", [2, 5])
def test_rows_of_invented_ranks_are_limited(
    server: Server, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A stranger's PUTs for ranks that do not exist cannot fill the memory, and up to the limit a
    restarted rank replaces its row."""
    assert bootstrap.MAX_RANKS == prefill_http.MAX_RANKS == 1024
    monkeypatch.setattr(bootstrap, "MAX_RANKS", most)
    for number in range(most):
        server.put(number % 2, row(number), attn_dp_size=3, attn_dp_rank=number // 2)
    again = row(0, instance=b"another_")
    server.put(0, again, attn_dp_size=3, attn_dp_rank=0)
    kept = server.server.mixkv_rows
    assert len(kept) == most
    assert ("127.0.0.1:9000", msgspec.json.encode(again)) in kept.values()
    for number in range(most, 3 * most):
        server.put(number % 2, row(number), attn_dp_size=3, attn_dp_rank=number // 2)
    assert len(kept) == most + 1


def test_the_error_names_the_rank_without_the_plugin(server: Server) -> None:
    server.put(0, row(0))
    server.put(1, None)
    answer = requests.get(f"http://{server.address}{PATH}", timeout=5)
    assert answer.status_code == 409
    with pytest.raises(MixKVError, match=r"127\.0\.0\.1:9001") as refused:
        asyncio.run(prefill_http.fetch(server.address, Names()))
    assert refused.value.code == "MIXKV-PAIR-01"


@pytest.mark.parametrize("changed", [{"protocol": (4, 5)}, {"protocol": (0, 2)}, {"target": 1}])
def test_rows_that_this_build_cannot_read_are_refused(changed: dict[str, Any]) -> None:
    rows = [json.loads(msgspec.json.encode(row(0))) | changed]
    with pytest.raises(MixKVError) as refused:
        prefill_http.read_rows(json.dumps({"protocol": 5, "rows": rows}).encode())
    assert refused.value.code == "MIXKV-PAIR-02"


def test_a_put_without_the_servers_token_stores_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A PUT without the token stores no row. The patched SGLang follows a development branch, in
    which PUT needs a token and GET does not."""
    from aiohttp import web
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer as Stock

    stock = Stock._handle_route_put

    async def with_token(self: Any, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer secret":
            return web.Response(status=401)
        return await stock(self, request)

    monkeypatch.setattr(Stock, "_handle_route_put", with_token)
    one = Server()
    try:
        url = f"http://{one.address}/route"
        for rank in range(2):
            headers = {"Authorization": "Bearer secret"}
            for given, status in ((headers, 200), ({}, 401)):
                port = rank if given else 50 + rank
                put = registration(rank, row(port, attn_tp_rank=rank))
                assert requests.put(url, json=put, headers=given, timeout=5).status_code == status
        answer = requests.get(f"http://{one.address}{PATH}", timeout=5)
        assert [found["rank_port"] for found in answer.json()["rows"]] == [9000, 9001]
    finally:
        one.server.close()
