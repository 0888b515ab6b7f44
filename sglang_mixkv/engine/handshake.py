"""This server's handshake facts, and how the decode side fetches the prefill's.

The prefill's facts travel on the bootstrap server: each rank adds them to the row that it
PUTs to /route, and GET /mixkv answers them. A stock bootstrap server ignores the one and
answers 404 to the other.
"""

from __future__ import annotations

import logging
from typing import Any

import requests
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel, get_spec

from sglang_mixkv import __version__
from sglang_mixkv.engine.releases import sglang_version
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.kv.layout import Caches
from sglang_mixkv.protocol.announcement import MAX_ANNOUNCEMENT, read_announcement
from sglang_mixkv.protocol.facts import DraftFacts, Facts, compared_window

logger = logging.getLogger(__name__)

KEY = "mixkv"
PATH = "/mixkv"
TIMEOUT_S = 5

# disaggregation/utils.py MetadataBuffers.get_buf_infos: rows before the drafter's three
# (top-k p, top-k index, hidden states), and those of a sampling mask.
AUX_BEFORE_DRAFT = 6
AUX_OF_SAMPLING_MASK = 3


def local_facts(kv_args: Any, caches: Caches, backend: str, memory: str) -> Facts:
    """The facts of this rank, its KV in such `memory`. Geometry from KV args, speculation from
    SGLang's arguments."""
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
        draft=_draft_facts(kv_args, caches, spec.speculative_algorithm or ""),
        draft_aux=draft_aux(),
        extents=True,
        backend=backend,
        dcp=get_parallel().attn_dcp_size or 1,
        memory=memory,
    )


def draft_aux() -> tuple[int, ...]:
    """Numbers of the metadata rows that only the drafter reads."""
    mask = AUX_OF_SAMPLING_MASK if envs.SGLANG_ENABLE_DISAGG_SAMPLING_MASK.get() else 0
    first = AUX_BEFORE_DRAFT + mask
    return (first, first + 1, first + 2)


def _draft_facts(kv_args: Any, caches: Caches, algorithm: str) -> DraftFacts | None:
    if caches.draft is None:
        return None
    spread = caches.draft.component.spread
    return DraftFacts(
        kind=spread.kind.value,
        architecture=getattr(kv_args, "draft_architecture", ""),
        total_heads=spread.total_heads,
        head_bytes=caches.draft.head_bytes,
        window=compared_window(algorithm, getattr(kv_args, "draft_window", 0)),
    )


def check_is_kept(url: str) -> None:
    """Raise RuntimeError where the bootstrap server, whose /route this is, is SGLang's own."""
    try:
        answer = requests.get(url.removesuffix("/route") + PATH, timeout=TIMEOUT_S)
    except requests.RequestException:
        return  # SGLang has logged that the bootstrap server is away
    if answer.status_code == requests.codes.not_found:
        raise RuntimeError(
            f"[MIXKV-PAIR-01] sglang-mixkv: the bootstrap server at {url} is SGLang's own, not "
            "the plugin's, so decode servers could not see this prefill's drafter. Start every "
            "process of the prefill server with --enable-mixkv and without SGLANG_PLUGINS "
            "excluding it."
        )


def fetch(bootstrap_addr: str) -> Facts | None:
    """The prefill server's facts; None when it cannot be asked now.

    Raises MixKVError when it answered and does not fit this plugin.
    """
    url = f"http://{bootstrap_addr}{PATH}"
    try:
        with requests.get(url, timeout=TIMEOUT_S, stream=True) as response:
            body = _read(response)
    except requests.RequestException as error:
        logger.warning("[MIXKV-MSG-02] sglang-mixkv: no answer from %s: %s", url, error)
        return None
    if response.status_code == requests.codes.not_found:
        raise MixKVError(
            "MIXKV-PAIR-01",
            f"the prefill server at {bootstrap_addr} does not run sglang-mixkv, this decode server "
            "does: its draft KV could land in other requests' pages. Start both with "
            "--enable-mixkv, or both without.",
        )
    if response.status_code == requests.codes.conflict:
        said = body[:1024].decode(errors="replace")
        raise MixKVError("MIXKV-PAIR-03", f"prefill server at {bootstrap_addr}: {said}")
    if response.status_code != requests.codes.ok:
        said = body[:1024].decode(errors="replace")
        status = response.status_code
        logger.warning("[MIXKV-MSG-02] sglang-mixkv: %s answers %d: %s", url, status, said)
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
