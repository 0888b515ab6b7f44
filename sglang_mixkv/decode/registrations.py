"""Which prefill ranks have this decode rank's registration, and of which staging buffer they know.

SGLang registers once per prefill server. This table says when it has to be done again: the buffer
came later, or a prefill rank has no registration that it can use.
"""

from __future__ import annotations

Endpoint = tuple[str, int]  # where a prefill rank listens
Span = tuple[int, int]  # address and bytes of the staging buffer


class Registrations:
    """The scheduler registers, and withdraws as the decode thread does; one dict operation each."""

    def __init__(self) -> None:
        self._told: dict[str, dict[Endpoint, Span]] = {}

    def told(self, address: str, endpoint: Endpoint, span: Span) -> None:
        """The rank of that server at this endpoint was sent a registration."""
        self._told.setdefault(address, {})[endpoint] = span

    def lacks(self, address: str, endpoint: Endpoint, span: Span) -> bool:
        """Whether it has to be sent one before the next request."""
        return self._told.get(address, {}).get(endpoint) != span

    def withdraw(self, address: str) -> None:
        """A rank of that server has none that it can use."""
        self._told.pop(address, None)
