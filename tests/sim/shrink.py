"""A failing schedule is cut down: whatever it fails without is left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.sim.runner import Outcome, run_spec
from tests.sim.spec import Chunk, Request, Spec

TRIES = 3  # other orders of events that each smaller schedule is given
MOST = 600  # runs in all


def shrink(outcome: Outcome) -> Outcome:
    """The smallest that was found of those that break the same invariant."""
    runs = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(outcome.spec):
            for shift in range(TRIES):
                runs += 1
                if runs > MOST:
                    return outcome
                tried = run_spec(replace(candidate, seed=candidate.seed + shift))
                if tried.invariant == outcome.invariant:
                    outcome, smaller = tried, True
                    break
            if smaller:
                break
    return outcome


def _smaller(spec: Spec) -> Iterator[Spec]:
    for number in range(len(spec.requests)):
        yield _without_request(spec, number)
    for number in range(len(spec.faults)):
        yield replace(spec, faults=spec.faults[:number] + spec.faults[number + 1 :])
    yield from _fewer_ranks(spec)
    for number, request in enumerate(spec.requests):
        for simpler in _simpler(request):
            if simpler != request:
                requests = list(spec.requests)
                requests[number] = simpler
                yield replace(spec, requests=tuple(requests))
    for number, fault in enumerate(spec.faults):
        if fault.count > 1:
            faults = list(spec.faults)
            faults[number] = replace(fault, count=1)
            yield replace(spec, faults=tuple(faults))


def _without_request(spec: Spec, number: int) -> Spec:
    gone = spec.requests[number].id
    rest = spec.requests[:number] + spec.requests[number + 1 :]
    return replace(
        spec,
        requests=tuple(replace(r, after=-1) if r.after == gone else r for r in rest),
    )


def _fewer_ranks(spec: Spec) -> Iterator[Spec]:
    """One server with fewer ranks, if faults and requests do without the others."""
    for number, server in enumerate(spec.servers):
        for tp, groups in ((1, server.groups), (server.tp // 2, server.groups), (server.tp, 1)):
            if not tp or (tp, groups) == (server.tp, server.groups):
                continue
            servers = list(spec.servers)
            servers[number] = replace(server, tp=tp, groups=groups)
            if _fits(spec, number, tp * groups, groups):
                yield replace(spec, servers=tuple(servers))


def _fits(spec: Spec, server: int, ranks: int, groups: int) -> bool:
    places = [where for f in spec.faults for where in (f.where, f.peer) if where is not None]
    used = [where for r in spec.requests for where in (r.prefill, r.decode)]
    return all(rank < ranks for of, rank in places if of == server) and all(
        group < groups for of, group in used if of == server
    )


def _simpler(request: Request) -> Iterator[Request]:
    rows = sum(chunk.count for chunk in request.chunks)
    yield replace(request, chunks=(Chunk(rows, False, 0.001),))
    yield replace(request, chunks=(Chunk(rows, request.chunks[0].pending, 0.01),))
    yield replace(request, abort=None)
    yield replace(request, target_fails=-1)
    yield replace(request, forward=0.0)
    yield replace(request, optimistic=False)
    yield replace(request, prefill_delay=0.0)
    yield replace(request, decode_delay=0.0)
    yield replace(request, target=0.01)
