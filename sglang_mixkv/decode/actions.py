"""Actions that a decode rank's state machine requests and DecodeWorker._do carries out."""

from __future__ import annotations

from collections.abc import Hashable
from enum import StrEnum

import msgspec

from sglang_mixkv.channel.actions import Note, Send, StartCopies
from sglang_mixkv.decode.transfer import Peer, Request, Segment


class StartRead(msgspec.Struct, eq=False):
    """Read these segments of one transfer. `Machine.read_ended` always follows, with no time limit.
    The machine's notes: `began`, when the read started; `until`, its deadline; `failed`, if its
    segments must not be used."""

    peer: Peer
    segments: list[Segment]
    began: float
    until: float
    failed: bool = False


class Clear(msgspec.Struct, eq=False):
    """Zero the request's rows of tokens [first_token, end), through its gate."""

    request: Request
    first_token: int
    end: int


class State(StrEnum):
    WARM = "warm"  # every row is in place
    COLD = "cold"  # rows that are not in place are zero
    FAILED = "failed"  # rows may hold another request's KV


class Verdict(msgspec.Struct, frozen=True):
    """A request's outcome, given once. Only FAILED ends the request."""

    handle: Hashable
    state: State
    reason: str = ""


class Forget(msgspec.Struct, frozen=True):
    """Resolve the server again: a different instance now has this peer's address."""

    peer: Peer


Action = Send | StartRead | StartCopies | Verdict | Forget | Note
