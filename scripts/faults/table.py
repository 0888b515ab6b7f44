"""Inject each fault on the protocol ring for real, and write what happened as a table.

    table.py [WORD...] [--json FILE]

Words select faults by name. Exit status 0: every fault ended as it should.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from rig.load import load_sglang  # noqa: E402

load_sglang()

from rig.channel_faults import FAULTS  # noqa: E402
from rig.faults import TIMEOUTS, Fault, problems, short_timeouts  # noqa: E402
from rig.memory import RankReport  # noqa: E402
from rig.ring import Outcome, run  # noqa: E402

Row = dict[str, str]
LONGEST = 230


def shown(text: str) -> str:
    """A reason in one cell: addresses and ports, which differ every time, as names."""
    text = re.sub(r"127\.0\.0\.1:\d+", "HOST:PORT", text).replace("|", "\\|")
    text = re.sub(r"^\w+ \d+: KVTransferError\(bootstrap_room=\d+\): ", "", text)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def side(reports: list[RankReport], fault: Fault) -> tuple[str, str]:
    """What the user of one side sees of the request that met the fault, and after how long.

    Of several ranks: the first that knows more than that the other side gave up, and the time
    of the last.
    """
    seen = [(r.status[0], r.seconds[0], r) for r in reports if len(r.status) > 1]
    if not seen:
        return "ended by the fault", ""
    failed = [one for one in seen if one[0] == "failed"]
    seconds = max(one[1] for one in failed or seen)
    reasons = [report.reasons[0] for _, _, report in failed]
    telling = [reason for reason in reasons if "gave it up" not in reason]
    text = shown((telling or reasons)[0]) if failed else "nothing: served"
    return text, f"{seconds:.2f} s"


def row(fault: Fault, outcome: Outcome, found: list[str]) -> Row:
    prefill, prefill_s = side(outcome.prefill, fault)
    decode, decode_s = side(outcome.decode, fault)
    after = "refused as well" if fault.next_too and fault.group == "handshake" else "right"
    if fault.next_too and fault.group != "handshake":
        after = "fails as well"
    return {
        "fault": fault.name,
        "injected": fault.how,
        "decode's user sees": decode,
        "after": decode_s,
        "prefill's user sees": prefill,
        "after ": prefill_s,
        "bytes, tables, threads": "right" if not found else "**wrong**",
        "next request": after if not found else "**see the log**",
    }


def markdown(rows: list[tuple[str, Row]]) -> str:
    """A table per group."""
    parts = []
    for group, members in groupby(rows, key=lambda one: one[0]):
        lines = [row for _, row in members]
        names = list(lines[0])
        parts.append(f"### {group.capitalize()}\n")
        parts.append("| " + " | ".join(name.strip() for name in names) + " |")
        parts.append("|" + "---|" * len(names))
        parts += ["| " + " | ".join(line[name] for name in names) + " |" for line in lines]
        parts.append("")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only faults whose name has one of these")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    chosen = [f for f in FAULTS if not arguments.words or any(w in str(f) for w in arguments.words)]
    rows, bad = [], 0
    with short_timeouts():
        for fault in chosen:
            print(fault, file=sys.stderr, flush=True)
            outcome = run(fault.case())
            found = problems(fault, outcome)
            bad += bool(found)
            for line in found:
                print(f"  {line}", file=sys.stderr)
            rows.append((fault.group, row(fault, outcome, found)))
    limits = ", ".join(f"`{name}={value}`" for name, value in TIMEOUTS.items())
    print(f"{len(rows)} faults; {limits}.\n\n{markdown(rows)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
