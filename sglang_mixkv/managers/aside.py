"""Overrides that stand aside: what is not wholly ours behaves as SGLang's own.

SGLang's unit tests, and tools, build managers, senders and receivers piecemeal (`__new__`,
mocks, namespaces). An override marked with `override(Stock)` runs only where the manager was
built by MixKVManager's constructor; everywhere else stock's method of the same name runs. Its
signature and source, as `inspect` shows them, are stock's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVManager


def is_ours(manager: Any) -> bool:
    """Whether MixKVManager's constructor has built this; False for stand-ins of any kind."""
    return getattr(manager, "mixkv_ready", False) is True


def override(stock: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a method as an override of `stock`'s method of the same name."""

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(stock, method.__name__)

        def of_manager(self: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self, "mixkv_ready", False) is True:
                return method(self, *args, **kwargs)
            return original(self, *args, **kwargs)

        def of_request(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_ours(getattr(self, "kv_mgr", None)):
                return method(self, *args, **kwargs)
            return original(self, *args, **kwargs)

        standing_aside = of_manager if issubclass(stock, BaseKVManager) else of_request
        functools.update_wrapper(standing_aside, original, assigned=("__name__", "__qualname__"))
        standing_aside.__doc__ = method.__doc__
        return standing_aside

    return mark
