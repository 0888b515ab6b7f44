"""The one error of the pure part."""

REASONS = ("no_plugin", "protocol", "malformed", "facts", "topology", "other")
"""What a refusal is counted under: the peer lacks the plugin, speaks another protocol, sent
what cannot be read, differs in the handshake's facts, or has sizes or routes that do not fit."""


class MixKVError(ValueError):
    """Something does not fit. The text says expected, got, consequence and remedy.

    `reason`: one of REASONS, for counting.
    """

    def __init__(self, text: str, reason: str = "other") -> None:
        super().__init__(text)
        self.reason = reason


def refuse(
    expected: str, got: str, consequence: str, remedy: str, reason: str = "other"
) -> MixKVError:
    """Build the error every check raises, so that each message has all four parts."""
    return MixKVError(f"expected {expected}; got {got}. Otherwise {consequence}. {remedy}.", reason)
