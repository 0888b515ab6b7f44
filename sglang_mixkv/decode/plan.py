"""What a decode rank makes of one prefill server's rows: whom to open, for which heads, or why not.

Pure: the contacted ranks are those of SGLang's receiver (`bootstrap_infos`), the rows are what GET
/mixkv answered, and the plan is worked out once for each set of contacted ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.decode.events import Source, peer_of
from sglang_mixkv.draft.facts import (
    NO_DRAFTER,
    Difference,
    Row,
    Severity,
    common_version,
    differences,
)
from sglang_mixkv.draft.routes import NO_HEADS, readers_of, routes
from sglang_mixkv.errors import MixKVError, refuse


class Contact(NamedTuple):
    """One entry of `bootstrap_infos`. `is_send_target`: SGLang's `not is_dummy`."""

    rank_ip: str
    rank_port: int
    is_send_target: bool


class Plan(msgspec.Struct, frozen=True):
    """For each room with these contacts. `sources`: the ranks of the drafter's stage.

    `cold`: why nothing is fetched. `differences`: those that are served, for the log.
    """

    sources: tuple[Source, ...]
    rows: tuple[Row, ...]
    version: int = PROTOCOL[1]
    cold: str = ""
    differences: tuple[Difference, ...] = ()

    required_draft_responses: int = 0
    """From how many ranks draft heads are read."""


class Pairing:
    """The plan for requests that contact the ranks of these entries of `bootstrap_infos`.

    SGLang has one entry for each rank as long as it is connected, and requests come with the same
    ones again. They are retained, so that their identities remain theirs. `checked`: the counts
    were compared with SGLang's.
    """

    def __init__(self, infos: Sequence[Any], plan: Plan) -> None:
        self.infos, self.plan, self.checked = tuple(infos), plan, False
        self.is_send_target = tuple(contact.is_send_target for contact in contacts_of(infos))
        self.required_target_responses = sum(self.is_send_target)


def contacts_of(infos: Iterable[Any]) -> tuple[Contact, ...]:
    return tuple(
        Contact(info["rank_ip"], int(info["rank_port"]), not info["is_dummy"]) for info in infos
    )


def judge(
    rows: Iterable[Row], own: Row, *, serve_mismatch: bool
) -> tuple[str, tuple[Difference, ...]]:
    """Why rooms are cold, "" for warm, and the differences that are served. Raises MixKVError."""
    rows = list(rows)
    known = {str(d): d for row in rows for d in differences(row, own)}
    if any(row.draft is not None for row in rows):  # earlier stages have no drafter: no difference
        known = {k: d for k, d in known.items() if d.what != NO_DRAFTER}
    cold = ""
    for text, difference in known.items():
        if difference.severity is Severity.REFUSED:
            raise MixKVError("MIXKV-PAIR-03", text)
        if difference.severity is Severity.COLD:
            cold = cold or "no_drafter"
        elif serve_mismatch:
            cold = "mismatch"
        else:
            hint = "Or serve with a cold drafter: --mixkv-on-draft-mismatch cold."
            raise MixKVError("MIXKV-PAIR-03", f"{text} {hint}")
    return cold, tuple(known.values())


def make_plan(
    contacts: Iterable[Contact],
    rows: Mapping[tuple[str, int], Row],
    own: Row,
    *,
    serve_mismatch: bool,
    server: str = "",
) -> Plan:
    """Raises MixKVError where the pair is refused. `serve_mismatch`: other drafters are cold.
    `server`: its bootstrap address."""
    found = [(contact, _row_of(contact, rows)) for contact in contacts]
    _check_instances({contact[:2]: row.instance for contact, row in found})
    cold, known = judge((row for _, row in found), own, serve_mismatch=serve_mismatch)
    version = _version(row for _, row in found)
    stage = max((row.pp_rank for _, row in found if row.draft is not None), default=None)
    drafting = [(c, row) for c, row in found if row.pp_rank == stage and row.draft is not None]
    heads: tuple[range, ...] = (NO_HEADS,) * len(drafting)
    if own.draft is not None and drafting and not cold:
        heads = routes([row.draft.heads for _, row in drafting if row.draft], own.draft.heads)
    sources = tuple(
        _source(contact, row, own, of, peer_of(row.instance, server))
        for (contact, row), of in zip(drafting, heads, strict=True)
    )  # fmt: skip
    answers = sum(bool(source.heads) for source in sources)
    return Plan(sources, tuple(row for _, row in drafting), version, cold, known, answers)


def _row_of(contact: Contact, rows: Mapping[tuple[str, int], Row]) -> Row:
    row = rows.get((contact.rank_ip, contact.rank_port))
    if row is None:
        raise refuse(
            "MIXKV-PAIR-01", "sglang-mixkv in every process of the prefill server",
            f"none in the rank at {contact.rank_ip}:{contact.rank_port}",
            "its draft KV would stay away, or land in the target's pages",
            "Start prefill with --enable-mixkv on every node",
        )  # fmt: skip
    return row


def _check_instances(instances: Mapping[tuple[str, int], bytes]) -> None:
    if len(set(instances.values())) < len(instances):
        raise refuse(
            "MIXKV-PAIR-04", "an instance for each prefill rank, which names it",
            "one that two ranks share", "heads of one of them would never be read",
            "Restart the prefill server",
        )  # fmt: skip


def _version(rows: Iterable[Row]) -> int:
    versions = [common_version(row.protocol, PROTOCOL) for row in rows]
    if None in versions or not versions:
        raise refuse(
            "MIXKV-PAIR-02", f"a prefill server with a protocol of {PROTOCOL[0]} to {PROTOCOL[1]}",
            "another one", "neither side could read the other's messages",
            "Install releases of sglang-mixkv that have a protocol in common",
        )  # fmt: skip
    return min(version for version in versions if version is not None)


def _source(contact: Contact, row: Row, own: Row, heads: range, peer: bytes) -> Source:
    readers = readers_of(row.attn_tp, own.attn_tp)
    if row.staging is None or own.staging is None or own.draft is None:
        return Source(peer, NO_HEADS, readers, is_send_target=contact.is_send_target)
    size = min(row.staging.slot_bytes, own.staging.slot_bytes)
    tokens = own.draft.facts.tokens_in(size, len(heads)) if heads else 0
    slots, sends = row.staging.slots, contact.is_send_target
    return Source(peer, heads, readers, slots, tokens, sends, row.patience)
