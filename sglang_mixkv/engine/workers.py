"""Load plugins in tokenizer workers (--tokenizer-worker-num), where SGLang itself loads none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins import load_plugins


class _Loading(dict[str, Any]):
    """A dict that loads plugins in a process that unpickles it."""

    def __reduce__(self) -> Any:
        return _loaded, (dict(self),)


def _loaded(info: dict[str, Any]) -> dict[str, Any]:
    load_plugins()  # does nothing after the first call
    return info


def around_write(original: Callable[..., Any], ports: Any, server_args: Any, info: Any) -> Any:
    """Wrap write_data_for_multi_tokenizer, whose data a worker reads before anything else."""
    return original(ports, server_args, _Loading(info))
