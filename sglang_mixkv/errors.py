"""The plugin's errors. An error's code never changes; its text may be reworded.

docs/troubleshooting.md explains each code and its remedy. Texts with the same remedy share a code.
"""

from __future__ import annotations

from argparse import ArgumentTypeError

REASON_OF = {
    "MIXKV-PAIR-01": "no_plugin",
    "MIXKV-PAIR-02": "protocol",
    "MIXKV-PAIR-03": "facts",
    "MIXKV-PAIR-04": "topology",  # no routes between these sizes
}
"""Maps a code to the reason under which metrics count a refused peer; all others are `other`."""
REASONS = (*REASON_OF.values(), "other")


class MixKVError(ArgumentTypeError, ValueError):
    """A refusal. Its message is the code and the text: expected and actual value, consequence and
    remedy, where these are not obvious. argparse prints it in full."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"[{code}] {text}")
        self.code = code
        self.text = text

    def about(self, whom: str) -> MixKVError:
        """Return this error with the server or rank that it concerns before its text."""
        return MixKVError(self.code, f"{whom}: {self.text}")

    @property
    def reason(self) -> str:
        """Return the reason under which metrics count the error: one of REASONS."""
        return REASON_OF.get(self.code, "other")


def refuse(code: str, expected: str, got: str, consequence: str, remedy: str) -> MixKVError:
    text = f"expected {expected}; got {got}. As it is, {consequence}. {remedy}."
    return MixKVError(code, text)
