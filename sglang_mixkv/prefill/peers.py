"""The decode ranks of one prefill rank: who was admitted, and why others were refused."""

from __future__ import annotations

import threading

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.prefill.peer import Local, Peer, admit
from sglang_mixkv.protocol.registration import Registration

# Strangers that are remembered whose registration was refused, or could not be read.
MAX_NOTED = 1 << 16


class Peers:
    """By session. SGLang's control thread changes it; transfer threads look peers up.

    A peer that registers anew and does not fit keeps its last plan, so that no thread takes it
    for a peer without a drafter, but is sent nothing more. `any_planned`: whether this rank's
    decode ranks have a drafter, and plans say what is sent.
    """

    def __init__(self, local: Local) -> None:
        self._local = local
        self._peers: dict[str, Peer] = {}
        self._refused: dict[str, str] = {}
        self._unread: dict[str, str] = {}
        self._lock = threading.Lock()
        self.any_planned = False

    def admit(self, registration: Registration) -> Peer:
        """Raises MixKVError with every reason why it is not served, and keeps the reason."""
        session = registration.sender.session
        try:
            peer = admit(self._local, registration)
        except MixKVError as error:
            self.refuse(session, str(error))
            raise
        with self._lock:
            self._peers[session] = peer
            self.any_planned = any(one.plan is not None for one in self._peers.values())
            self._refused.pop(session, None)
            self._unread.pop(session, None)
        return peer

    def refuse(self, session: str, reason: str) -> None:
        """Nothing is sent to this session until it registers anew."""
        with self._lock:
            self._unread.pop(session, None)
            self._note(self._refused, session, reason)

    def note_unread(self, session: str, reason: str) -> None:
        """A registration came that could not be read: what this session registered before may be
        no more."""
        with self._lock:
            if session:
                self._note(self._unread, session, reason)

    def _note(self, table: dict[str, str], session: str, reason: str) -> None:
        """Of strangers only so many are kept, the others count as never registered. A peer always
        is: it keeps its plan, and must be sent nothing more by it."""
        if session in self._peers or session in table or len(table) < MAX_NOTED:
            table[session] = reason

    def get(self, session: str) -> Peer | None:
        return self._peers.get(session)

    def refusal(self, session: str) -> MixKVError | None:
        """Why this session is not served; None for a peer. See messages.lacks_registration."""
        unread, refused = self._unread.get(session), self._refused.get(session)
        if unread is None and refused is not None:
            text = f"sglang-mixkv refuses this decode rank: {refused}"
            return MixKVError("MIXKV-REG-03", text)
        if unread is None and session in self._peers:
            return None
        why = f"was rejected: {unread.rstrip('.')}" if unread else "never arrived"
        text = f"its registration {why}; it registers again with its next request"
        return MixKVError("MIXKV-REG-02", text)

    def knows(self, endpoint: str, port: int) -> bool:
        """Whether a peer listens there."""
        where = {(peer.address.endpoint, peer.address.port) for peer in list(self._peers.values())}
        return (endpoint, port) in where
