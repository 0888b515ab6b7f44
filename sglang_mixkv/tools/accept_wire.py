"""What a run sent between the pair's servers, by their /metrics pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_mixkv.tools import pages
from sglang_mixkv.tools.client import RequestFailed


class NothingToJudge(RuntimeError):
    """Why there is no verdict."""


@dataclass(frozen=True)
class Wire:
    """What servers' pages say of a run. `first_token_s`: the pair's mean."""

    transfers: pages.Transfers
    first_token_s: float

    @property
    def share(self) -> float | None:
        """The transfer's, of the time to the first token."""
        mean = self.transfers.mean_s
        return mean / self.first_token_s if mean is not None and self.first_token_s else None

    def figures(self) -> dict[str, Any]:
        sent, rooms = self.transfers.sent, self.transfers.rooms
        return {
            "transfer_s": self.transfers.mean_s, "transfer_share": self.share, "sent_bytes": sent,
            "warm_share": rooms.warm_share, "rooms": rooms.counts,
        }  # fmt: skip

    def table(self) -> Iterator[str]:
        if (mean := self.transfers.mean_s) is not None:
            share = "" if self.share is None else f", {self.share:.1%} of the first token's time"
            yield f"transfer: {mean * 1e3:.1f} ms per request{share}"
        sent = self.transfers.sent.items()
        if sent:
            sizes = ", ".join(f"{name} {size / 2**20:.2f} MiB" for name, size in sent)
            yield f"bytes sent, to anyone: {sizes}"
        rooms = self.transfers.rooms
        if (warm := rooms.warm_share) is not None:
            cold = ", ".join(f"{why} {n}" for why, n in rooms.counts.items() if why != "warm" and n)
            why = f"; cold: {cold}" if cold else ""
            yield f"drafters: {warm:.1%} of {rooms.counts.total()} warm{why}"


def look(urls: list[str]) -> pages.Transfers:
    """Raises NothingToJudge where a page has no metrics."""
    try:
        return pages.read([pages.page(url) for url in urls])
    except (RequestFailed, ValueError) as error:
        raise NothingToJudge(
            f"no metrics: {error}. Give servers' own pages, http://HOST:PORT/metrics, and start "
            "them with --enable-metrics"
        ) from error
