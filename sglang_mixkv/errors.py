"""Errors of the plugin: a code that stays, and a text that can be reworded.

An operator looks a code up in docs/troubleshooting.md, which has an entry for each: what it
means, and what to do. Two texts share a code where the operator would do the same about both.
"""

from __future__ import annotations

# What a refused peer is counted under: it lacks the plugin, has another protocol, differs in the
# handshake's facts, has sizes or routes that do not fit, or sent what cannot be read.
CODES = {
    "MIXKV-START-01": "other",
    "MIXKV-START-02": "other",
    "MIXKV-START-03": "other",
    "MIXKV-START-04": "other",
    "MIXKV-START-05": "other",
    "MIXKV-START-06": "other",
    "MIXKV-PAIR-01": "no_plugin",
    "MIXKV-PAIR-02": "protocol",
    "MIXKV-PAIR-03": "facts",
    "MIXKV-PAIR-04": "topology",
    "MIXKV-PAIR-06": "other",
    "MIXKV-PAIR-09": "other",
    "MIXKV-MSG-01": "malformed",
    "MIXKV-MSG-02": "other",
    "MIXKV-SELF-01": "other",
}
"""All codes, with the reason that a refusal is counted under."""
REASONS = tuple(dict.fromkeys(sorted(CODES.values(), key="other".__eq__)))


class MixKVError(ValueError):
    """Something does not fit. The text begins with its code, and says expected, got,
    consequence and remedy where these are not plain."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"[{code}] {text}")
        self.code = code
        self.text = text

    def about(self, whom: str) -> MixKVError:
        """The same error, saying whom it is about."""
        return MixKVError(self.code, f"{whom}: {self.text}")

    @property
    def reason(self) -> str:
        """One of REASONS, for counting."""
        return CODES.get(self.code, "other")


def refuse(code: str, expected: str, got: str, consequence: str, remedy: str) -> MixKVError:
    """The error with all four parts."""
    text = f"expected {expected}; got {got}. Otherwise {consequence}. {remedy}."
    return MixKVError(code, text)
