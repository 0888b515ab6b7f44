"""This server's handshake facts, and how the decode side fetches the prefill's.

The prefill's facts travel on the bootstrap server: each rank adds them to the row that it
PUTs to /route, and GET /mixkv answers them. A stock bootstrap server ignores the one and
answers 404 to the other.
"""

from __future__ import annotations

from typing import Any

import requests
from sglang.srt.runtime_context import get_spec

from sglang_mixkv import __version__
from sglang_mixkv.compat import sglang_version
from sglang_mixkv.core.announcement import MAX_ANNOUNCEMENT, read_announcement
from sglang_mixkv.core.errors import MixKVError
from sglang_mixkv.core.facts import DraftFacts, Facts
from sglang_mixkv.managers.cold import draft_aux
from sglang_mixkv.managers.kv_args import Caches

KEY = "mixkv"
PATH = "/mixkv"
TIMEOUT_S = 5


def local_facts(kv_args: Any, caches: Caches) -> Facts:
    """The facts of this rank. Geometry from KV args, speculation from SGLang's arguments."""
    spec = get_spec()
    return Facts(
        plugin=__version__,
        engine=sglang_version(),
        page_size=kv_args.page_size,
        kv_cache_dtype=kv_args.kv_cache_dtype_str,
        aux_item_lens=tuple(kv_args.aux_item_lens),
        state_types=tuple(str(t.value) for t in kv_args.state_types),
        speculative_algorithm=spec.speculative_algorithm or "",
        topk=spec.speculative_eagle_topk or 0,
        steps=spec.speculative_num_steps or 0,
        draft=_draft_facts(kv_args, caches),
        draft_aux=draft_aux(),
        extents=True,
    )


def _draft_facts(kv_args: Any, caches: Caches) -> DraftFacts | None:
    if caches.draft is None:
        return None
    spread = caches.draft.component.spread
    return DraftFacts(
        kind=spread.kind.value,
        architecture=getattr(kv_args, "draft_architecture", ""),
        total_heads=spread.total_heads,
        head_bytes=caches.draft.head_bytes,
        window=getattr(kv_args, "draft_window", 0),
    )


def fetch(bootstrap_addr: str) -> Facts | None:
    """The prefill server's facts; None when it cannot be asked now.

    Raises MixKVError when it answered and does not fit this plugin.
    """
    try:
        url = f"http://{bootstrap_addr}{PATH}"
        with requests.get(url, timeout=TIMEOUT_S, stream=True) as response:
            body = _read(response)
    except requests.RequestException:
        return None
    if response.status_code == requests.codes.not_found:
        raise MixKVError(
            f"the prefill server at {bootstrap_addr} does not run sglang-mixkv, this decode server "
            "does: its draft KV could land in other requests' pages. Start both with "
            "--enable-mixkv, or both without.",
            "no_plugin",
        )
    if response.status_code == requests.codes.conflict:
        said = body[:1024].decode(errors="replace")
        raise MixKVError(f"prefill server at {bootstrap_addr}: {said}", "facts")
    if response.status_code != requests.codes.ok:
        return None
    return read_announcement(body, bootstrap_addr)


def _read(response: requests.Response) -> bytes:
    """The body, and of one that is too long no more than shows it."""
    body = b""
    for part in response.iter_content(16 << 10):
        body += part
        if len(body) > MAX_ANNOUNCEMENT:
            break
    return body
