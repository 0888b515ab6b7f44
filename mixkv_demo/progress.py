"""Show servers while they start: one line each, with the time, on a terminal or in a log."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

QUIET_S = 30.0
"""Without a terminal, seconds between two lines with the same state of a server."""


class StartDisplay:
    """A context manager; its ``update`` is a progress callback for :mod:`mixkv_demo.servers`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, tuple[str, float]] = {}
        self._begin = time.monotonic()
        self._bars = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description:<8} {task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def update(self, name: str, state: str) -> None:
        """Show a server's state: live on a terminal, or in a line per change and per QUIET_S."""
        if self._console.is_terminal:
            self._update_bar(name, state)
        else:
            self._say(name, state)

    def _update_bar(self, name: str, state: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=1, state=state)
        done = state in ("healthy", "ready")
        self._bars.update(self._tasks[name], state=state, completed=done)

    def _say(self, name: str, state: str) -> None:
        now = time.monotonic()
        last, at = self._said.get(name, ("", 0.0))
        if state != last or now - at > QUIET_S:
            self._said[name] = (state, now)
            self._console.print(f"  {name} {state} ({now - self._begin:.0f} s)")
