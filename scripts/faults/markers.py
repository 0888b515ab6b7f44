"""Generated parts of a document stand between <!-- NAME:begin --> and <!-- NAME:end -->."""

from __future__ import annotations

import re
from pathlib import Path


def fill(document: Path, name: str, text: str) -> None:
    """Replace what stands between the markers. Raises KeyError if there are none."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    block = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    before = document.read_text()
    if not block.search(before):
        raise KeyError(f"{document} has no markers for {name}")
    document.write_text(block.sub(lambda _: f"{begin}\n{text}{end}", before))
