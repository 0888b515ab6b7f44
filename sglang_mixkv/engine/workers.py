"""Loads plugins in SGLang's --tokenizer-worker-num workers, which take requests and load none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins import load_plugins


class _Loading(dict[str, Any]):
    """A dict that loads plugins where it is unpickled, as a dict."""

    def __reduce__(self) -> Any:
        return _loaded, (dict(self),)


def _loaded(info: dict[str, Any]) -> dict[str, Any]:
    load_plugins()  # does nothing after the first call
    return info


def around_write(original: Callable[..., Any], ports: Any, server_args: Any, info: Any) -> Any:
    """Wrap write_data_for_multi_tokenizer, from which they read their arguments before all else."""
    return original(ports, server_args, _Loading(info))
