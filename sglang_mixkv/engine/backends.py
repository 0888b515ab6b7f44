"""The classes that stand in for SGLang's, by transfer backend."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from sglang_mixkv.refusals import BACKENDS


def classes(backend: str) -> Mapping[str, type]:
    """By SGLang's name of the kind of class; none for a backend that is not known here."""
    if backend not in BACKENDS:
        return {}
    found: Mapping[str, type] = importlib.import_module(f"sglang_mixkv.engine.{backend}").CLASSES
    return found
