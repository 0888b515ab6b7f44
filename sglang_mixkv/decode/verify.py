"""The decode side of `--mixkv-verify checksum`: does the pool hold what the prefill sent?

Each sender tells, per entry, the CRC-32 of the rows that it sent (extension.Digest), just before
its success. When all have answered, the same rows are read here and compared, before the
request may start. State and metadata rows are not covered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.kv.layout import Caches, Shard
from sglang_mixkv.kv.pages import window_start
from sglang_mixkv.kv.plan import Ints, component_copies
from sglang_mixkv.kv.routes import Route
from sglang_mixkv.protocol.extension import Digest
from sglang_mixkv.rows.digest import Digester
from sglang_mixkv.rows.host import Rows

SHOWN = 4


@dataclass(frozen=True)
class Asked:
    """A room's pages, the drafter whose KV they get, and its senders by unique number."""

    pages: Ints
    draft: Shard | None
    senders: Mapping[int, Route]
    heard: dict[int, Digest] = field(default_factory=dict)

    def hear(self, digest: Digest) -> None:
        """Keep one sender's digest. Raises MixKVError for one that nobody waits for."""
        if digest.prefill_rank not in self.senders:
            raise not_awaited(digest)
        self.heard[digest.prefill_rank] = digest


def not_awaited(digest: Digest) -> MixKVError:
    return MixKVError(
        "MIXKV-ROOM-04",
        f"room {digest.room}: checksums from prefill rank {digest.prefill_rank}, which sends "
        "nothing to it.",
    )


class Verifier:
    """Compares what one decode rank received, once all of a room has come."""

    def __init__(self, caches: Caches, rows: Rows) -> None:
        self._caches = caches
        self._digester = Digester(rows)

    def problem(self, asked: Asked) -> str | None:
        """What differs, None when every byte that was needed is as it was sent."""
        found = [line for rank in asked.senders for line in self._of_sender(asked, rank)]
        found += self._gaps(asked)
        if not found:
            return None
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        return f"[MIXKV-LAND-02] KV checksum mismatch: {'; '.join(found[:SHOWN])}{more}"

    def _of_sender(self, asked: Asked, rank: int) -> Iterator[str]:
        digest, route = asked.heard.get(rank), asked.senders[rank]
        if digest is None:
            yield f"prefill rank {rank} sent no checksums"
            return
        caches = self._caches
        yield from self._compare(
            "target", rank, caches.target, caches.target_ptrs, route.target_heads,
            digest.target, asked.pages,
        )  # fmt: skip
        if asked.draft is not None:
            yield from self._compare(
                "draft", rank, asked.draft, caches.draft_ptrs, route.draft_heads,
                digest.draft, asked.pages,
            )  # fmt: skip

    def _compare(
        self, name: str, rank: int, shard: Shard, ptrs: tuple[int, ...], heads: range,
        said: tuple[tuple[int, int], ...], pages: Ints,
    ) -> Iterator[str]:  # fmt: skip
        entries = [ptrs.index(address) for address, _ in said if address in ptrs]
        if len(set(entries)) != len(said):
            yield f"prefill rank {rank} wrote to {name} entries that are not of this rank, or twice"
            return
        here = self._sums(shard, list(ptrs), heads, entries, pages)
        for entry, (_, sent) in zip(entries, said, strict=True):
            held = here[entry]
            if sent != held:
                what = f"{name} entry {entry}, heads {heads.start}-{heads.stop - 1}"
                yield f"{what}: prefill rank {rank} sent {sent:#010x}, decode holds {held:#010x}"

    def _sums(
        self, shard: Shard, ptrs: list[int], heads: range, entries: list[int], pages: Ints
    ) -> dict[int, int]:
        """Checksums of these entries, in the pages that their windows reach."""
        found: dict[int, int] = {}
        for window, alike in shard.component.by_window.items():
            some = [i for i in entries if i in alike]
            copies = component_copies(ptrs, shard, ptrs, shard, heads, [(i, i) for i in some])
            reached = pages[window_start(len(pages), shard.page_size, window) :]
            sums = self._digester.add([], copies, shard.page_size, reached)
            found.update(zip(some, sums, strict=True))
        return found

    def _gaps(self, asked: Asked) -> Iterator[str]:
        """Entries that no digest covers with all heads of this rank."""
        for name, shard, ptrs in (
            ("target", self._caches.target, self._caches.target_ptrs),
            ("draft", asked.draft, self._caches.draft_ptrs),
        ):
            if shard is None:
                continue
            heads = dict.fromkeys(ptrs, 0)
            for rank, digest in asked.heard.items():
                route = asked.senders[rank]
                count = len(route.target_heads if name == "target" else route.draft_heads)
                for address, _ in getattr(digest, name):
                    heads[address] = heads.get(address, 0) + count
            short = [i for i, ptr in enumerate(ptrs) if heads[ptr] != len(shard.heads)]
            if short:
                yield f"no sender's checksums cover {name} entries {short}"
