"""What looks at servers' pages say of each server, and of each decode server with each prefill
server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sglang_mixkv.series import DECODE, PREFILL
from sglang_mixkv.tools.pages import Ranks, Rooms, add_rooms
from sglang_mixkv.tools.status_look import Look, Page

RANK = ("dp_rank", "pp_rank", "tp_rank", "moe_ep_rank")
BYTES = {PREFILL: "sent_bytes_total", DECODE: "needed_bytes_total"}


@dataclass(frozen=True)
class Server:
    """`ranks`: that have series. `slots`, `slots_used`: of the rank that uses most. `moved`: bytes
    of draft KV a second, over all ranks, None without a second look."""

    name: str
    role: str
    is_sglang: bool
    has_plugin: bool
    ranks: int
    slots: int
    slots_used: int
    moved: float | None


@dataclass
class Drafts:
    """Of requests that have ended."""

    requests: float = 0
    rounds: float = 0
    tokens: float = 0

    @property
    def length(self) -> float | None:
        """Tokens a verify round."""
        return self.tokens / self.rounds if self.rounds else None


@dataclass
class Pair:
    """A decode server and a prefill server's bootstrap address. `rooms`: `warm`, or why cold, of
    the rank that has most colds. `drafts`: by state, over all ranks. `suspect`: by what."""

    decode: str
    prefill: str
    rooms: Counter[str] = field(default_factory=Counter)
    drafts: dict[str, Drafts] = field(default_factory=dict)
    suspect: set[str] = field(default_factory=set)
    breaker_open: bool = False

    @property
    def warm_share(self) -> float | None:
        return self.rooms["warm"] / self.rooms.total() if self.rooms.total() else None

    @property
    def lost(self) -> float | None:
        """The share of tokens a round that its cold drafters cost; None without both kinds."""
        warm, cold = (self.drafts.get(state, Drafts()) for state in ("warm", "cold"))
        if not warm.length or not cold.length:
            return None
        both = (warm.tokens + cold.tokens) / (warm.rounds + cold.rounds)
        return max(0.0, 1 - both / warm.length)


def accept_length(pairs: Iterable[Pair], state: str) -> float | None:
    """Of their requests together."""
    found = [pair.drafts.get(state, Drafts()) for pair in pairs]
    return Drafts(0, sum(d.rounds for d in found), sum(d.tokens for d in found)).length


def servers(now: Look, between: Look, seconds: float) -> Iterator[Server]:
    """`between`: what happened in so many seconds, 0 with one look."""
    for name, page in now.pages.items():
        moved = None
        if seconds:
            new = between.pages[name].of(BYTES.get(page.role, ""))
            moved = sum(value for _, value in new) / seconds
        used = max((round(value) for _, value in page.of("slots_used")), default=0)
        slots = max((round(value) for _, value in page.of("slots")), default=0)
        ranks = {tuple(map(sample.label, RANK)) for sample in page.series}
        yield Server(
            name, page.role, page.is_sglang, bool(page.series), len(ranks), slots, used, moved
        )


def pairs(since: Look) -> Iterator[Pair]:
    for name, page in since.pages.items():
        found: dict[str, Pair] = {}
        ranks: dict[str, Ranks] = {}
        for sample, value in page.series.items():
            prefill = sample.label("prefill")
            if prefill:
                pair = found.setdefault(prefill, Pair(name, prefill))
                _add(pair, sample.name, sample.label("state"), sample.label("against"), value)
            if sample.name == "prefill_rooms_total":
                add_rooms(ranks.setdefault(prefill, {}), (name,), sample, value)
        for prefill, pair in sorted(found.items()):
            pair.rooms = Rooms(ranks.get(prefill, {})).counts
            yield pair


def _add(pair: Pair, name: str, state: str, against: str, value: float) -> None:
    drafts = pair.drafts.setdefault(state, Drafts()) if state else Drafts()
    match name:
        case "finished_requests_total":
            drafts.requests += value
        case "verify_rounds_total":
            drafts.rounds += value
        case "accepted_tokens_total":
            drafts.tokens += value
        case "draft_suspect" if value:
            pair.suspect.add(against)
        case "breaker_open" if value:
            pair.breaker_open = True


def counted(page: Page, name: str, label: str = "") -> Counter[str]:
    """A counter's requests, by one label: the TP ranks of a DP rank serve the same ones, so the one
    that counts most stands for them."""
    most: Counter[tuple[str, str]] = Counter()
    ranks: Counter[tuple[str, str, str]] = Counter()
    for sample, value in page.of(name):
        where = sample.label("dp_rank"), sample.label(label)
        ranks[*where, sample.label("tp_rank")] += round(value)
    for (dp_rank, wanted, _), number in ranks.items():
        most[dp_rank, wanted] = max(most[dp_rank, wanted], number)
    found: Counter[str] = Counter()
    for (_, wanted), number in most.items():
        found[wanted] += number
    return +found
