"""Simulate the draft channel: whole clusters on a virtual clock, many schedules a second.

    python scripts/simulate.py --seed 1 --schedules 10000
    python scripts/simulate.py --replay 1234

If an invariant is broken, log the calls of the smallest failing schedule, and exit with 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.sim.draw import Draw
from tests.sim.runner import Outcome, describe, run_many, run_spec, summary


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the first schedule")
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1e9, help="time limit")
    parser.add_argument(
        "--replay", metavar="SEED", type=int, help="log one schedule, and shrink it"
    )
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.replay is not None:
        outcome = run_spec(Draw(args.replay).spec(), logged=True)
        if outcome.invariant:
            return failed(outcome)
        print("\n".join([*outcome.spec.lines(), *outcome.log, "no finding"]))
        return 0
    seeds = range(args.seed, args.seed + args.schedules)
    result = run_many(seeds, args.seconds)
    print(summary(result))
    return failed(result.failed) if result.failed else 0


def failed(outcome: Outcome) -> int:
    print(describe(outcome), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
