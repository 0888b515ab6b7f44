"""What the plugin refuses, fails or warns with: a code, and a text that can be reworded.

An operator looks a code up in docs/troubleshooting.md, which has an entry for each: what it
means, and what to do. Two texts share a code where the operator would do the same about both.
"""

from __future__ import annotations

CODES = {
    "MIXKV-START-01": "the installed SGLang was not tested, or is not as expected",
    "MIXKV-START-02": "the plugin was not loaded, or SGLang did not apply its hooks",
    "MIXKV-START-03": "a flag or variable that does not go with the plugin",
    "MIXKV-START-04": "a setting or a launch line that cannot be read",
    "MIXKV-START-05": "a drafter's KV that cannot be cut into heads, or not as a whole",
    "MIXKV-START-06": "draft KV cannot be read from this rank, or by it",
    "MIXKV-PAIR-01": "the plugin runs on one side only, or not in every process",
    "MIXKV-PAIR-02": "the two sides have no protocol of the plugin in common",
    "MIXKV-PAIR-03": "the two servers differ in models, flags or releases",
    "MIXKV-PAIR-04": "there is no route between servers of these sizes",
    "MIXKV-PAIR-05": "SGLang and the plugin count the ranks of a request differently",
    "MIXKV-PAIR-06": "requests are served without draft KV, and their drafters start cold",
    "MIXKV-MSG-01": "a message of another process cannot be read",
    "MIXKV-MSG-02": "a peer takes no messages, or does not answer",
    "MIXKV-SELF-01": "something unexpected inside the plugin",
}
"""Code -> symptom."""

REASONS = ("no_plugin", "protocol", "malformed", "facts", "topology", "other")
"""What a refusal is counted under: the peer lacks the plugin, has another protocol, sent
what cannot be read, differs in the handshake's facts, or has sizes or routes that do not fit."""

_REASON_OF = {
    "MIXKV-PAIR-01": "no_plugin",
    "MIXKV-PAIR-02": "protocol",
    "MIXKV-PAIR-03": "facts",
    "MIXKV-PAIR-04": "topology",
    "MIXKV-PAIR-05": "topology",
    "MIXKV-MSG-01": "malformed",
}


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
        return _REASON_OF.get(self.code, "other")


def refuse(code: str, expected: str, got: str, consequence: str, remedy: str) -> MixKVError:
    """The error with all four parts."""
    text = f"expected {expected}; got {got}. Otherwise {consequence}. {remedy}."
    return MixKVError(code, text)
