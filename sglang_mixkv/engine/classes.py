"""The classes that get_kv_class hands out: SGLang's of any backend, each with its mixin."""

from __future__ import annotations

from sglang_mixkv.engine.bootstrap import DraftBootstrapServer
from sglang_mixkv.engine.manager import DraftManager
from sglang_mixkv.engine.receiver import DraftReceiver
from sglang_mixkv.engine.sender import DraftSender

_MIXINS = {
    "manager": DraftManager,
    "sender": DraftSender,
    "receiver": DraftReceiver,
    "bootstrap_server": DraftBootstrapServer,
}


def mixed(stock: type, backend: str, kind: str) -> type:
    """SGLang's own for what has no mixin, and for its warm-up requests' backend."""
    mixin = _MIXINS.get(kind)
    if mixin is None or backend == "fake":
        return stock
    body = {"__module__": mixin.__module__, "backend": backend}
    return type(f"Draft{stock.__name__}", (mixin, stock), body)
