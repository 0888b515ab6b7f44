"""The exception that a broken invariant raises."""

from __future__ import annotations


class Finding(Exception):
    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant, self.detail = invariant, detail
