"""The one error of the pure part."""


class MixKVError(ValueError):
    """Something does not fit. The text says expected, got, consequence and remedy."""


def refuse(expected: str, got: str, consequence: str, remedy: str) -> MixKVError:
    """Build the error every check raises, so that each message has all four parts."""
    return MixKVError(f"expected {expected}; got {got}. Otherwise {consequence}. {remedy}.")
