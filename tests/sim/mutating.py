"""The real code with a defect, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.sim import plans

Patch = Callable[[object, str, object], None]
MUTATIONS: dict[str, Callable[[Patch], None]] = {}


def mutation(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTATIONS[function.__name__] = function
    return function


@contextmanager
def mutated(name: str) -> Iterator[None]:
    undo: list[Callable[[], object]] = []

    def patch(owner: object, name: str, value: object) -> None:
        if isinstance(owner, dict):
            undo.append(lambda former=owner[name]: owner.__setitem__(name, former))
            owner[name] = value
        else:
            undo.append(lambda former=owner.__dict__[name]: setattr(owner, name, former))
            setattr(owner, name, value)

    plans.PLANS.clear()
    try:
        MUTATIONS[name](patch)
        yield
    finally:
        for again in reversed(undo):
            again()
        plans.PLANS.clear()
