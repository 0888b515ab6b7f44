"""SGLang's bootstrap server, with one more answer: GET /mixkv, the prefill's facts."""

from __future__ import annotations

from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from sglang_mixkv.engine.handshake import KEY, PATH
from sglang_mixkv.protocol.announcement import kept

_RANK = ("system_dp_rank", "attn_dp_rank", "attn_cp_rank", "attn_tp_rank", "pp_rank")


class AnnouncingBootstrapServer(CommonKVBootstrapServer):
    """`announced`: rank -> what that prefill rank put under KEY in its row."""

    def __init__(self, host: str, port: int) -> None:
        self.announced: dict[tuple[int, ...], bytes | None] = {}
        super().__init__(host, port)

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_get(PATH, self._handle_facts)

    async def _handle_route_put(self, request: web.Request) -> web.Response:
        response = await super()._handle_route_put(request)
        if response.status == 200:
            row = await request.json()
            self.announced[tuple(int(row[name] or 0) for name in _RANK)] = kept(row.get(KEY))
        return response

    async def _handle_facts(self, request: web.Request) -> web.Response:
        if not self._is_ready():
            return web.Response(text="Prefill server not fully registered yet", status=503)
        conflict = self._conflict()
        if conflict:
            return web.Response(text=conflict, status=409)
        last = max(self.announced, key=lambda rank: rank[-1])  # the stage with the drafter
        return web.Response(body=self.announced[last], content_type="application/json")

    def _conflict(self) -> str | None:
        """Why the ranks of this server do not speak with one voice, None when they do."""
        silent = [rank for rank, said in self.announced.items() if said is None]
        if silent:
            return (
                f"{len(silent)} of {len(self.announced)} prefill ranks do not run sglang-mixkv. "
                "Start every node of the prefill server with --enable-mixkv."
            )
        voices = {(rank[-1], said) for rank, said in self.announced.items()}
        if len(voices) != len({stage for stage, _ in voices}):
            return (
                "ranks of one prefill stage announce different facts. Start every node of the "
                "prefill server with the same flags and versions."
            )
        return None
