"""Which pages of a chunk are sent, per component.

A request's destination pages come from the decode side, without its cached prefix; chunks
cover them from the front:

    prompt      | prefix cached on decode |            transferred            | lookahead |
    dst_pages                             | 0 .................... total - 1  |
    chunk k                                        [start, start + count)

Surplus at the front is never offered: prefill starts behind the decode side's prefix.
Surplus at the back is lookahead: with speculation an allocation can hold pages beyond the
last computed token; it shows as more pages than the chunk's tokens fill, and is cut.
Anything else that does not line up is refused before SGLang would cut it silently
(mooncake/conn.py transfer_worker).

With decode context parallelism (DCP) a page of decode holds `parts` pages of prefill. Pages here
are then prefill's, and the last page of a request can have parts that it does not fill.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_mixkv.errors import refuse

# A query at the last prompt position reads `window` tokens before itself, and SGLang counts
# a window without the query's own token (llama_eagle3.py, sliding_window_size).
WINDOW_MARGIN = 2


def in_parts(pages: npt.NDArray[np.int64], parts: int) -> npt.NDArray[np.int64]:
    """The parts of these pages, in order, when each is so many."""
    if parts == 1:
        return pages
    return (pages[:, None] * parts + np.arange(parts)).ravel()


def pages_to_send(
    offered: int, tokens: int | None, page_size: int, start: int, total: int, *, last: bool,
    parts: int = 1,
) -> int:  # fmt: skip
    """How many of the `offered` pages of a chunk are sent, counted from its front.

    `tokens`: computed tokens in the chunk, None where the caller does not know; `start`:
    pages sent before; `total`: destination pages, so many `parts` in each of decode's own.
    Raises MixKVError for a mismatch.
    """
    filled = offered if tokens is None else -(-tokens // page_size)
    if filled > offered or (filled < offered and not last):
        raise refuse(
            "MIXKV-SEND-01",
            f"{filled} pages for {tokens} tokens",
            f"{offered} pages, not the last chunk" if not last else f"{offered} pages",
            "pages after this chunk would shift",
            "Report this; it is not expected from a supported SGLang",
        )
    end = start + filled
    if end > total or (last and end <= total - parts):
        raise refuse(
            "MIXKV-SEND-01",
            f"chunks that fill the {total} pages that the decode side allocated",
            f"the chunk at page {start} ends at page {end}",
            "pages would be cut or stay unwritten without an error",
            "Report this; it is not expected from a supported SGLang",
        )
    return filled


def window_start(total: int, page_size: int, window: int, parts: int = 1) -> int:
    """First transferred page that a drafter with this window can reach; 0 without a window."""
    if window <= 0:
        return 0
    oldest = (total - parts) * page_size + 1 - window - WINDOW_MARGIN
    return max(0, oldest // page_size)
