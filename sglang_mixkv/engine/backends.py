"""The classes that stand in for SGLang's, by transfer backend."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache

from sglang_mixkv.engine.releases import here


@cache
def classes(backend: str) -> Mapping[str, type]:
    """By SGLang's name of the kind of class; none for a backend that is not served here."""
    if backend not in here().framings:
        return {}
    found: Mapping[str, type] = importlib.import_module(f"sglang_mixkv.engine.{backend}").CLASSES
    return {kind: _shimmed(made) for kind, made in found.items()}


def _shimmed(made: type) -> type:
    """With those of the installed release's shims that are over SGLang's class in it."""
    shims = [_shim(name) for name in here().shims]
    mine = [shim for shim in shims if issubclass(made, shim.__bases__)]
    if not mine:
        return made
    return type(made)(made.__name__, (made, *mine), {"__module__": made.__module__})


def _shim(name: str) -> type:
    found: type = getattr(importlib.import_module("sglang_mixkv.engine.shims"), name)
    return found
