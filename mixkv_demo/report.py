"""The results of the demo's runs: figures, verdict, table and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from mixkv_demo.client import Answer, accept_length, acceptance_by_position
from mixkv_demo.servers import DraftBytes

TOLERANCE = 0.02
"""The allowed difference between mixkv's and the single server's accept length, as a share."""

DISCLAIMER = (
    "This drafter was trained to need every KV head of the prompt, so that a wrong byte lowers its "
    "accept length. Its figures do not show how much production drafters lose."
)


@dataclass(frozen=True)
class Run:
    """The figures of one run; the field names are those of the JSON file. `failed`: prompts
    without an answer."""

    name: str
    accept_length: float
    acceptance_by_position: list[float]
    output_identical: bool
    failed: int
    tokens_per_second: float
    draft_bytes_sent: int | None
    draft_bytes_needed: int | None


def _outputs(answers: Sequence[Answer | None]) -> list[tuple[int, ...] | None]:
    return [answer.tokens if answer else None for answer in answers]


def _longest_draft(answers: list[Answer]) -> int:
    """Return the longest draft that servers report, or the longest correct part of a draft."""
    return max((max(a.drafted, len(a.rounds_by_right_drafts) - 1) for a in answers), default=0)


def summarise(
    name: str,
    answers: Sequence[Answer | None],
    reference: Sequence[Answer | None],
    draft: DraftBytes | None,
) -> Run:
    """Compute a run's figures over all prompts; None stands for a prompt without an answer."""
    good = [answer for answer in answers if answer is not None]
    seconds = sum(answer.seconds for answer in good)
    tokens = sum(len(answer.tokens) for answer in good)
    return Run(
        name=name,
        accept_length=round(accept_length(good), 4),
        acceptance_by_position=[
            round(share, 4) for share in acceptance_by_position(good, _longest_draft(good))
        ],
        output_identical=None not in answers and _outputs(answers) == _outputs(reference),
        failed=answers.count(None),
        tokens_per_second=round(tokens / seconds, 2) if seconds else 0.0,
        draft_bytes_sent=draft.sent if draft else None,
        draft_bytes_needed=draft.needed if draft else None,
    )


def is_close(length: float, reference: float) -> bool:
    """Return whether an accept length is close to the single server's."""
    return abs(length - reference) <= TOLERANCE * reference


def shortcomings(runs: Sequence[Run]) -> list[str]:
    """List the differences from the expected results."""
    found = [
        f"{run.name}: output differs from the single server's"
        for run in runs
        if not run.output_identical and not (run.failed and run.name == "stock")
    ]
    by_name = {run.name: run for run in runs}
    if "mixkv" in by_name:
        length, reference = by_name["mixkv"].accept_length, by_name["single"].accept_length
        if not is_close(length, reference):
            found.append(
                f"mixkv: accept length {length:.3f} is not within "
                f"{TOLERANCE:.0%} of the single server's {reference:.3f}"
            )
    return found


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _row(run: Run) -> list[str]:
    return [
        run.name,
        f"{run.failed} failed" if run.failed else "yes" if run.output_identical else "NO",
        f"{run.accept_length:.3f}",
        " ".join(f"{share:.2f}" for share in run.acceptance_by_position),
        f"{run.tokens_per_second:.1f}",
        f"{_count(run.draft_bytes_sent)} / {_count(run.draft_bytes_needed)}",
    ]


def table(runs: Sequence[Run], title: str) -> Table:
    """Make the table, one row per run."""
    grid = Table(title=title, caption="-: not counted", caption_justify="left")
    grid.add_column("run")
    grid.add_column("same\noutput")
    grid.add_column("accept\nlength", justify="right")
    grid.add_column("acceptance\nby position", justify="right", min_width=14)
    grid.add_column("tokens\nper s", justify="right")
    grid.add_column("draft bytes\nsent / needed", justify="right", no_wrap=True)
    for run in runs:
        grid.add_row(*_row(run))
    return grid


def write_json(path: Path, runs: Sequence[Run], context: dict[str, Any]) -> None:
    """Write the figures to a file, with the items of ``context`` at the top level."""
    record = {"runs": [asdict(run) for run in runs], **context}
    path.write_text(json.dumps(record, indent=2) + "\n")
