"""The plugin's series on a /metrics page, by name and labels."""

from __future__ import annotations

from collections import Counter

from sglang_mixkv.series import PREFIX, SERIES
from sglang_mixkv.tools.status import samples


def totals(text: str, without: str = "") -> Counter[tuple[str, ...]]:
    """Sum each series over ranks. A key is the name without the prefix, then the values of the
    labels in SERIES, except empty values and that of the label `without`. A histogram's value is
    its number of observations. Raises ValueError."""
    own = {PREFIX.replace(":", "_") + one.name: one for one in SERIES}
    found: Counter[tuple[str, ...]] = Counter()
    for sample in samples(text):
        if one := own.get(sample.name.removesuffix("_count")):
            labels = (sample.labels.get(name) for name in one.labels if name != without)
            found[one.name, *filter(None, labels)] += sample.value  # type: ignore[assignment]
    return found
