"""The figures of one run of bench_pd.py, from what bench_serving and the servers report.

A row is one JSON object: ``label``, ``workload`` (what was sent), ``figures``, ``machine``.
Times are in milliseconds, as bench_serving has them. A figure that nobody reported is None.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang_mixkv.tools import pages

Record = dict[str, Any]
LATENCIES = ("ttft", "tpot", "itl")
STATISTICS = ("mean", "median", "p99")

TOLERANCE = 0.02
"""How far an accept length may be from the baseline's, as a share of it."""


def acceptance(replies: Sequence[Record]) -> Record:
    """Sums over the replies' ``meta_info``; None where there was no speculation."""
    rounds = sum(reply["spec_verify_ct"] or 0 for reply in replies)
    names = "verify_rounds", "drafts", "accepted", "accept_rate", "accept_length", "by_position"
    if not rounds:
        return dict.fromkeys(names)
    drafts = sum(reply["spec_num_proposed_drafts"] or 0 for reply in replies)
    accepted = sum(reply["spec_num_correct_drafts"] or 0 for reply in replies)
    values = (
        rounds,
        drafts,
        accepted,
        accepted / drafts if drafts else 0.0,
        sum(reply["completion_tokens"] for reply in replies) / rounds,
        by_position(
            [reply["spec_correct_drafts_histogram"] or [] for reply in replies], drafts // rounds
        ),
    )
    return dict(zip(names, values, strict=True))


def by_position(histograms: Sequence[Sequence[int]], drafts: int) -> list[float]:
    """For i = 1 to ``drafts`` a round: the share of verify rounds with at least i right ones.

    A histogram counts rounds by their number of right drafts, from none to the most there were.
    """
    rounds = sum(map(sum, histograms))
    if not rounds:
        return []
    return [sum(sum(h[i:]) for h in histograms) / rounds for i in range(1, drafts + 1)]


def transfer(before: str | None, after: str | None, ttft_ms: float) -> Record:
    """Mean wait for the transfer between two looks at the metrics, and its share of the TTFT."""
    begin, end = (pages.read([page or ""]) for page in (before, after))
    mean = (end - begin).mean_s
    if mean is None:
        return {"transfer_ms": None, "transfer_share": None}
    return {"transfer_ms": mean * 1e3, "transfer_share": mean * 1e3 / ttft_ms if ttft_ms else None}


def figures(
    result: Record, replies: Sequence[Record], before: str | None, after: str | None
) -> Record:
    """Everything of one run. ``result``: the line that bench_serving wrote, with its details."""
    latencies = {f"{s}_{n}_ms": result[f"{s}_{n}_ms"] for n in LATENCIES for s in STATISTICS}
    return {
        "completed": result["completed"],
        "failed": sum(bool(error) for error in result["errors"]),
        "duration_s": result["duration"],
        "request_throughput": result["request_throughput"],
        "input_throughput": result["input_throughput"],
        "output_throughput": result["output_throughput"],
        **latencies,
        **transfer(before, after, result["mean_ttft_ms"]),
        **acceptance(replies),
        "output_digest": digest(result["generated_texts"]),
    }


def digest(texts: Iterable[str]) -> str:
    """Equal for runs that got the same texts in the same order."""
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()[:16]


def append(path: Path, row: Record) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def load(path: Path) -> list[Record]:
    """The rows of a file in order of first appearance; the last of each label counts."""
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return list({row["label"]: row for row in rows}.values())


def verdict(row: Record, baseline: Record) -> tuple[bool, str]:
    """Whether a run drafts as well as the baseline, and both in words."""
    mine, base = row["figures"], baseline["figures"]
    length, reference = (each["accept_length"] or 0.0 for each in (mine, base))
    same = mine["output_digest"] == base["output_digest"]
    close = reference > 0 and abs(length - reference) <= TOLERANCE * reference
    return same and close and not mine["failed"], (
        f"{row['label']}: {mine['verify_rounds']} verify rounds, accept length {length:.3f}, "
        f"{'same' if same else 'OTHER'} output, {mine['failed']} failed; "
        f"{baseline['label']}: {base['verify_rounds']} and {reference:.3f}"
    )
