"""The decode ranks of one prefill rank: who was admitted, and why others were refused."""

from __future__ import annotations

import threading

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.prefill.peer import Local, Peer, admit
from sglang_mixkv.protocol.messages import REFUSED, REGISTER_AGAIN
from sglang_mixkv.protocol.registration import Registration

# Sessions that are remembered whose registration could not be read.
MAX_UNREAD = 1 << 16


class Peers:
    """By session. SGLang's control thread changes it; transfer threads look peers up.

    A peer that registers anew and does not fit keeps its last plan, so that no thread takes it
    for a peer without a drafter, but is sent nothing more.
    """

    def __init__(self, local: Local) -> None:
        self._local = local
        self._peers: dict[str, Peer] = {}
        self._refused: dict[str, str] = {}
        self._unread: dict[str, str] = {}
        self._lock = threading.Lock()

    def admit(self, registration: Registration) -> Peer:
        """Raises MixKVError with every reason why it is not served, and keeps the reason."""
        session = registration.sender.session
        try:
            peer = admit(self._local, registration)
        except MixKVError as error:
            self.refuse(session, f"{REFUSED}: {error}")
            raise
        with self._lock:
            self._peers[session] = peer
            self._refused.pop(session, None)
            self._unread.pop(session, None)
        return peer

    def refuse(self, session: str, reason: str) -> None:
        """Nothing is sent to this session until it registers anew."""
        with self._lock:
            self._refused[session] = reason

    def note_unread(self, session: str, reason: str) -> None:
        """A registration came that could not be read: what this session registered before may be
        no more."""
        with self._lock:
            if session and len(self._unread) < MAX_UNREAD:
                self._unread[session] = reason

    def get(self, session: str) -> Peer | None:
        return self._peers.get(session)

    def refusal(self, session: str) -> str | None:
        """Why this session is not served; None for a peer."""
        why = self._unread.get(session)
        if why is None and session in self._refused:
            return self._refused[session]
        if why is None and session in self._peers:
            return None
        why = f"its registration was rejected: {why}" if why else "its registration never arrived"
        return f"{why.rstrip('.')}; {REGISTER_AGAIN}"

    def knows(self, endpoint: str, port: int) -> bool:
        """Whether a peer listens there."""
        where = {(peer.address.endpoint, peer.address.port) for peer in list(self._peers.values())}
        return (endpoint, port) in where

    @property
    def any_planned(self) -> bool:
        """Whether this rank's decode ranks have a drafter: then plans say what is sent."""
        return any(peer.plan is not None for peer in list(self._peers.values()))
