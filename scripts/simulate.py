"""Simulate the draft channel: whole clusters on a virtual clock, many schedules a second.

    python scripts/simulate.py --seed 1 --schedules 10000
    python scripts/simulate.py --replay 1234 --large
    python scripts/simulate.py --schedules 20000 --cover 100

Exit code 1, and the smallest failing schedule as a log of events, where an invariant is broken.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tests.sim.mutations  # noqa: F401  which fill MUTATIONS
from tests.sim.cover import Cover, vary
from tests.sim.draw import Draw
from tests.sim.mutating import MUTATIONS, mutated
from tests.sim.report import describe, summary
from tests.sim.runner import Outcome, Result, run_many, run_spec


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1e9, help="at most")
    parser.add_argument("--large", action="store_true", help="up to 16 ranks a server")
    parser.add_argument("--replay", metavar="SEED", help="log one schedule, and shrink it")
    parser.add_argument("--mutation", choices=MUTATIONS, help="with this defect in the code")
    parser.add_argument("--check-every", type=int, default=1, help="events between book checks")
    parser.add_argument(
        "--cover", type=int, default=0, metavar="N",
        help="then go on until each transition was met N times under each kind of fault",
    )  # fmt: skip
    return parser.parse_args()


def main() -> int:
    args = arguments()
    with mutated(args.mutation) if args.mutation else nullcontext():
        return replay(args) if args.replay else run(args)


def replay(args: argparse.Namespace) -> int:
    """`SEED`, or one of --cover."""
    if "~" in args.replay:
        seed, number, kind = args.replay.split("~")
        spec = vary(int(seed), int(number), kind, args.large)
    else:
        spec = Draw(int(args.replay), args.large).spec()
    outcome = run_spec(spec, logged=True)
    if outcome.invariant:
        outcome.name = args.replay
        return failed(outcome, args)
    print("\n".join([*outcome.spec.lines(), *outcome.log, "no finding"]))
    return 0


def run(args: argparse.Namespace) -> int:
    seeds = range(args.seed, args.seed + args.schedules)
    cover = Cover(Result(), args.large, args.cover)
    result = cover.result = run_many(
        seeds, args.large, args.seconds, check_every=args.check_every, covered=bool(args.cover),
        seen=cover.note,
    )  # fmt: skip
    if args.cover:
        cover.run()
    print(summary(result))
    for (transition, fault), count in cover.unmet.items():
        print("not met so often:", *transition, fault, count)
    return failed(result.found[0], args) if result.found else 0


def failed(outcome: Outcome, args: argparse.Namespace) -> int:
    print(describe(outcome, args.large, args.mutation or ""), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
