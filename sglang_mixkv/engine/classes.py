"""The classes that get_kv_class hands out: SGLang's of any backend, each with its mixin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
_made: dict[type, type] = {}


def mixed(original: Callable[..., type], backend: Any, kind: Any) -> type:
    """SGLang asks with each request: each class is made once."""
    stock = original(backend, kind)
    mixin = _MIXINS.get(kind.value)
    if mixin is None or backend.value == "fake":
        return stock
    made = _made.get(stock)
    if made is None:
        body = {"__module__": mixin.__module__}
        if mixin is DraftManager:
            body["backend"] = backend.value
        made = _made[stock] = type(f"Draft{stock.__name__}", (mixin, stock), body)
    return made
