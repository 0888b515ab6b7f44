"""What an older SGLang has not, as the overrides expect it.

A release names the shims that it needs (releases.py). Each is a class over SGLang's own, and is
put between that and the plugin's class (backends.py).
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver


class MessageSocket:
    """A socket to a prefill rank; registration and metadata go by the receiver's method. Who
    sends holds the socket's lock."""

    def __init__(self, socket: Any, receiver: OneWayOut, info: dict[str, Any]) -> None:
        self._socket, self._receiver, self._info = socket, receiver, info

    def send_multipart(self, message: list[bytes]) -> None:
        """A registration names no room, metadata starts with its number; the rest are tagged."""
        tag = message[0]
        if tag != b"None" and not tag.isdigit():
            self._socket.send_multipart(message)
            return
        operation = "_register_kv_args" if tag == b"None" else "send_metadata"
        self._receiver._send_bootstrap_message(
            bootstrap_info=self._info, message=message, operation=operation
        )


class OneWayOut(MooncakeKVReceiver):
    """0.5.22 builds messages where it sends them; here they pass _send_bootstrap_message, which
    RoomReceiver overrides. What that raises reaches SGLang's caller as what a socket raises."""

    def _connect_to_bootstrap_server(self, bootstrap_info: dict[str, Any]) -> tuple[Any, Any]:
        socket, lock = super()._connect_to_bootstrap_server(bootstrap_info)
        return MessageSocket(socket, self, bootstrap_info), lock

    def _send_bootstrap_message(
        self, *, bootstrap_info: dict[str, Any], message: list[bytes], operation: str
    ) -> bool:
        socket, _ = super()._connect_to_bootstrap_server(bootstrap_info)
        socket.send_multipart(message)
        return True


class OwnAnswers(MooncakeKVReceiver):
    """0.5.22 may keep an answer that came while its room was cleared. A request that gets the
    room's number again must not count it."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        if bootstrap_room not in mgr.request_status:
            mgr.prefill_response_tracker.pop(bootstrap_room, None)
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
