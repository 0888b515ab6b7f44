"""Collect a rank's log lines for a test."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rig.ring.rank import Rank


class _Kept(logging.Handler):
    def __init__(self, rank: Rank, words: str) -> None:
        super().__init__()
        self._rank, self._words = rank, words

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            line = f"{self._rank.side} {self._rank.rank}: {record.levelname} {record.getMessage()}"
            self._rank.report.reasons.append(line)


def keep_lines(words: str) -> Callable[[Rank], None]:
    """Return a `Special.before` that adds the plugin's log lines with these words to the rank's
    reasons."""

    def keep(rank: Rank) -> None:
        log = logging.getLogger("sglang.sglang_mixkv")
        log.setLevel(logging.DEBUG)
        log.addHandler(_Kept(rank, words))

    return keep
