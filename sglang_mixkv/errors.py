"""The plugin's errors: each has a code that never changes, and a text that may be reworded.

docs/troubleshooting.md says what each code means and what to do. Two texts share a code if they
call for the same action.
"""

from __future__ import annotations

from argparse import ArgumentTypeError

REASON_OF = {
    "MIXKV-PAIR-01": "no_plugin",
    "MIXKV-PAIR-02": "protocol",
    "MIXKV-PAIR-03": "facts",
    "MIXKV-PAIR-04": "topology",  # no routes between these sizes
}
"""By code: the reason under which a refused peer is counted; any other code counts as `other`."""
REASONS = (*REASON_OF.values(), "other")


class MixKVError(ArgumentTypeError, ValueError):
    """A refusal. Its message is the code and the text: what was expected, what was found, the
    consequence and the remedy, where these are not obvious. argparse prints it in full."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"[{code}] {text}")
        self.code = code
        self.text = text

    def about(self, whom: str) -> MixKVError:
        """Return this error with `whom`, the server or rank it is about, before its text."""
        return MixKVError(self.code, f"{whom}: {self.text}")

    @property
    def reason(self) -> str:
        """The reason to count it under: one of REASONS."""
        return REASON_OF.get(self.code, "other")


def refuse(code: str, expected: str, got: str, consequence: str, remedy: str) -> MixKVError:
    text = f"expected {expected}; got {got}. As it is, {consequence}. {remedy}."
    return MixKVError(code, text)
