"""SGLang's bootstrap server with one more route: GET /mixkv returns the rows of all prefill ranks.

The PUT that registers a rank with SGLang contains its row, under a separate key.
"""

from __future__ import annotations

import math

import msgspec
from aiohttp import web

from sglang_mixkv.channel.handshake import MAX_ROW_BYTES
from sglang_mixkv.channel.messages import PROTOCOL

KEY, PATH = "mixkv_row", "/mixkv"
MAX_RANKS = 1024  # of a prefill server; decode refuses one with more rows
SIZES = ("dp_size", "attn_cp_size", "attn_tp_size", "pp_size")  # None before the first PUT
_RANK = ("system_dp_rank", "attn_dp_rank", "attn_cp_rank", "attn_tp_rank", "pp_rank")


class DraftBootstrapServer:
    """Mixed into CommonKVBootstrapServer (manager.mixed). `mixkv_rows`: each rank's address, and
    its row as JSON, or None if it runs without the plugin."""

    mixkv_rows: dict[tuple[int, ...], tuple[str, bytes | None]]

    def _setup_routes(self) -> None:
        self.mixkv_rows = {}
        super()._setup_routes()  # type: ignore[misc]
        self.app.router.add_get(PATH, self._handle_rows)  # type: ignore[attr-defined]

    async def _handle_route_put(self, request: web.Request) -> web.Response:
        response: web.Response = await super()._handle_route_put(request)  # type: ignore[misc]
        if response.status == 200 and len(self.mixkv_rows) <= MAX_RANKS:
            row = await request.json()
            rank = tuple(int(row[name] or 0) for name in _RANK)
            self.mixkv_rows[rank] = f"{row['rank_ip']}:{row['rank_port']}", _kept(row.get(KEY))
        return response

    async def _handle_rows(self, request: web.Request) -> web.Response:
        sizes = [getattr(self, size) for size in SIZES]
        # SGLang's _is_ready counts PUTs, but a rank repeats one that is unanswered for 5 s.
        if None in sizes or len(self.mixkv_rows) < math.prod(sizes):
            return web.Response(status=503, text="not all prefill ranks have registered")
        silent = [address for address, row in self.mixkv_rows.values() if row is None]
        if silent:
            return web.Response(status=409, text=f"no sglang-mixkv in the ranks at {silent[:8]}")
        rows = b",".join(row for _, row in self.mixkv_rows.values() if row)
        body = b'{"protocol":%d,"rows":[%b]}' % (PROTOCOL[1], rows)
        return web.Response(body=body, content_type="application/json")


def _kept(row: object) -> bytes | None:
    """Return the row as JSON; None if it is not a JSON object, or is too long."""
    try:
        body = msgspec.json.encode(row)
    except (TypeError, ValueError, RecursionError):
        return None
    return body if isinstance(row, dict) and len(body) <= MAX_ROW_BYTES else None
