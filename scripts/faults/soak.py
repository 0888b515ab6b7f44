"""Many requests with random faults on the protocol ring, in both directions.

Real managers, ZMQ and transfer engine, one process per rank. Exit status 0: nothing lost, nothing
leaked, no wrong byte, and no request failed without a fault of its own. `--json` writes the
figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from rig import model  # noqa: E402
from rig.load import load_sglang  # noqa: E402

load_sglang()

from rig.soak import Soak, Verdict, run  # noqa: E402

DIRECTIONS = ((2, 1), (1, 2))
OTHERS_FAULT = "failed without a fault of its own"


def direction(verdict: Verdict) -> str:
    return f"TP {verdict.soak.prefill_tp} -> TP {verdict.soak.decode_tp}"


def figures(verdict: Verdict) -> dict[str, object]:
    """One direction as a flat record."""
    warm, end = zip(*verdict.resources.values(), strict=True) if verdict.resources else ((), ())
    grown = {
        name: max(b[name] - a[name] for a, b in zip(warm, end, strict=True))
        for name in ("threads", "fds", "sockets", "rss_mib")
        if warm
    }
    return {
        "prefill -> decode": direction(verdict),
        "requests": verdict.soak.requests,
        "met a fault": verdict.soak.requests - verdict.met["none"],
        "right": verdict.counts["succeeded"],
        "of these with a cold drafter": verdict.counts["cold"],
        "failed with a reason": verdict.counts["failed"],
        "of these without a fault of their own": verdict.counts[OTHERS_FAULT],
        "uses a page": round(verdict.page_uses, 1),
        "more threads": grown.get("threads", ""),
        "more file descriptors": grown.get("fds", ""),
        "more sockets": grown.get("sockets", ""),
        "more RSS, MiB": grown.get("rss_mib", ""),
        "wrong, lost or leaked": len(verdict.problems),
        "seconds": round(verdict.seconds),
    }


def table(records: list[dict[str, object]]) -> str:
    """Directions as columns."""
    head = "".join(f" {r['prefill -> decode']} |" for r in records)
    lines = ["| |" + head, "|" + "---|" * (len(records) + 1)]
    for name in list(records[0])[1:]:
        lines.append("| " + " | ".join([name, *(f"{r[name]}" for r in records)]) + " |")
    return "\n".join(lines) + "\n"


def reasons(verdicts: list[Verdict]) -> str:
    """Why requests without a fault of their own failed: numbers of either direction, a row each."""
    every = Counter[str]()
    for verdict in verdicts:
        every.update(verdict.others)
    if not every:
        return ""
    heads = "".join(f" {direction(verdict)} |" for verdict in verdicts)
    lines = ["| the reason of those without a fault of their own |" + heads]
    lines += ["|" + "---|" * (len(verdicts) + 1)]
    for reason, _ in every.most_common():
        counts = "".join(f" {verdict.others[reason]} |" for verdict in verdicts)
        lines.append(f"| {reason.partition('): ')[2] or reason} |{counts}")
    return "\n" + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faulty", type=float, default=0.2, help="share that meets a fault")
    parser.add_argument("--backend", default="mooncake", choices=("mooncake", "nixl"))
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    model.BACKEND = arguments.backend
    records, verdicts, bad = [], [], False
    soaks = [
        Soak(arguments.requests, arguments.seed, arguments.faulty, prefill_tp, decode_tp)
        for prefill_tp, decode_tp in DIRECTIONS
    ]
    print(*(f"soak {soak}" for soak in soaks), sep="\n", file=sys.stderr, flush=True)
    for verdict in run(*soaks):
        print(f"{verdict.soak}:", file=sys.stderr)
        verdicts.append(verdict)
        records.append(figures(verdict))
        bad = bad or bool(verdict.problems or verdict.others)
        for line in verdict.problems[:50]:
            print(f"  {line}", file=sys.stderr)
        met = ", ".join(f"{name} {count}" for name, count in sorted(verdict.met.items()))
        print(f"  met: {met}", file=sys.stderr)
        print(f"  resources, warm and at the end: {verdict.resources}", file=sys.stderr)
    text = (
        f"`--requests {arguments.requests} --seed {arguments.seed} --faulty {arguments.faulty:g}`"
    )
    text += "\n\n" + table(records) + reasons(verdicts)
    print(text)
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=1) + "\n")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
