"""A decode rank and its prefill servers, with real HTTP, threads, sockets and ranks on both sides.
Only SGLang's table of servers is faked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import msgspec
from rig.channel.invariants import strikes
from rig.channel.threads import HOST, Decode, Prefill, wait_for
from rig.process.answers import serving

from sglang_mixkv.channel.handshake import Row, StagingFacts, Target
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.channel.times import Times
from sglang_mixkv.config import Config
from sglang_mixkv.decode.transfer import server_of
from sglang_mixkv.decode.worker import ReceiveHandle
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout
from sglang_mixkv.engine.prefill_servers import PrefillServers

PORT = 9000  # the port of a prefill rank's SGLang socket, which these tests do not use
TOKENS = 20
PATIENCE = 3  # for busy machines


def row(instance: bytes, address: str, staging: StagingFacts) -> Row:
    draft = DraftLayout(DraftFacts("Llama", "EAGLE3", 4, (16, 16), "uint8"), 1, 0)
    return Row(
        PROTOCOL, "0.3.0", "0.5.23", instance, HOST, PORT, address, 1, 0, 0, (8, 8), "mooncake",
        Target(0, 4, layer_ids=False, even=True), 1, draft, staging,
    )  # fmt: skip


def row_of(prefill: Prefill, **changes: Any) -> Row:
    """Return the row that this rank publishes, with these fields changed."""
    own = row(prefill.instance, prefill.channel.address, prefill.row.staging)
    return msgspec.structs.replace(own, **changes)


def sizes(**changed: int) -> SimpleNamespace:
    """Return SGLang's entry for a server of these sizes, of which attention-TP rank 0 is
    contacted."""
    same = dict.fromkeys(("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"), 1)
    return SimpleNamespace(target_tp_ranks=[0], **{**same, **changed})


class Site:
    """A decode rank with its table of prefill servers. `reasons`: why requests were refused."""

    def __init__(self) -> None:
        self.times = Times(PATIENCE)
        self.decode = Decode(self.times, self._restarted, self._lost)
        self.table: dict[str, Any] = {}
        self.reasons: list[Any] = []
        own = row(self.decode.instance, "", StagingFacts(self.decode.plane.name, b"", 0, 1, 2))
        self.manager = SimpleNamespace(
            prefill_info_table=self.table, decode_channel=self.decode.channel,
            resolve=lambda _: sizes(dp_size=4),
            connection_lock=threading.Lock(), connection_pool={},
            local=SimpleNamespace(
                config=Config(), reporter=SimpleNamespace(refused=self.reasons.append)
            ),
        )  # fmt: skip
        self.servers = PrefillServers(self.manager, own)
        self._rooms = 0

    def _restarted(self, peer: bytes) -> None:
        self.servers.forget(server_of(peer))

    def _lost(self, peer: bytes) -> None:
        self.servers.check(server_of(peer))

    def is_ready(self, address: str) -> bool:
        return wait_for(lambda: self.servers.ensure(address)) and bool(self.table.get(address))

    def peer(self, address: str) -> bytes:
        """Return the peer that is the only rank of a ready server."""
        infos = [{"rank_ip": HOST, "rank_port": PORT}]
        (source,) = self.servers.plan(address, infos, None).sources
        return source.peer

    def request(self, address: str, prefill: Prefill) -> str:
        """Run a request, and return `warm` or the reason why it is cold."""
        self._rooms += 1
        use = prefill.send(self._rooms, TOKENS)
        found = self.ended(self.decode.open(self._rooms, TOKENS, self.peer(address)))
        prefill.channel.end(use)
        return found

    def ended(self, entry: ReceiveHandle) -> str:
        """Complete an open request, and return `warm` or the reason why it is cold."""
        self.decode.channel.target_arrived(entry)
        assert wait_for(lambda: entry.state is not None)
        self.decode.channel.close(entry)
        return entry.reason or "warm"

    def held(self) -> dict[str, int]:
        """Count the objects that the decode rank holds for prefill servers."""
        channel: Any = self.decode.channel
        return {
            "servers": len(self.servers._servers), "sockets": len(channel._links._links),
            "of the data plane": len(self.decode.plane._peers),
            "breakers": len(strikes(channel._machine)),
        }  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        for address in list(self.servers._servers):
            self.servers.forget(address)
        self.decode.close()


def answer_of(*rows: Row) -> bytes:
    """Return the answer to GET /mixkv."""
    return b'{"protocol":%d,"rows":%b}' % (PROTOCOL[1], msgspec.json.encode(rows))


@contextmanager
def publishing(*rows: Row, host: str = HOST, port: int = 0) -> Iterator[str]:
    """Yield the address of a prefill server that answers GET /mixkv with these rows."""
    body = answer_of(*rows)
    with serving(lambda _: (200, body), host, port) as address:
        yield address
