"""Errors of the plugin: a code that stays, and a text that can be reworded.

docs/troubleshooting.md has an entry for each code: what it means, and what to do. Two texts share a
code if the operator would do the same about both.
"""

from __future__ import annotations

from argparse import ArgumentTypeError

REASON_OF = {
    "MIXKV-PAIR-01": "no_plugin",
    "MIXKV-PAIR-02": "protocol",
    "MIXKV-PAIR-03": "facts",
    "MIXKV-PAIR-04": "topology",  # sizes or routes that do not fit
}
"""The reason under which a refused peer is counted, by code; `other` for all others."""
REASONS = (*REASON_OF.values(), "other")


class MixKVError(ArgumentTypeError, ValueError):
    """Something does not fit. The text begins with the code, and says expected, got, consequence
    and remedy where these are not plain. argparse shows it whole."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"[{code}] {text}")
        self.code = code
        self.text = text

    def about(self, whom: str) -> MixKVError:
        """Return the same error with the name of whom it is about."""
        return MixKVError(self.code, f"{whom}: {self.text}")

    @property
    def reason(self) -> str:
        """The reason to count it under, one of REASONS."""
        return REASON_OF.get(self.code, "other")


def refuse(code: str, expected: str, got: str, consequence: str, remedy: str) -> MixKVError:
    """Make an error with all four parts."""
    text = f"expected {expected}; got {got}. As it is, {consequence}. {remedy}."
    return MixKVError(code, text)
