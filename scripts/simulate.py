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
from tests.sim.runner import describe, run_many, run_spec, summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed of the first schedule")
    add("--schedules", type=int, default=1000)
    add("--seconds", type=float, default=1e9, help="time limit")
    add("--replay", metavar="SEED", type=int, help="log one schedule, and shrink it")
    args = parser.parse_args()
    if args.replay is None:
        result = run_many(range(args.seed, args.seed + args.schedules), args.seconds)
        print(summary(result))
        failed = result.failed
    else:
        outcome = run_spec(Draw(args.replay).spec(), logged=True)
        failed = outcome if outcome.invariant else None
        if not failed:
            print("\n".join([*outcome.spec.lines(), *outcome.log, "no finding"]))
    if failed:
        print(describe(failed), file=sys.stderr)
    return int(failed is not None)


if __name__ == "__main__":
    sys.exit(main())
