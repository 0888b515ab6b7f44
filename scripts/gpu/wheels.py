"""Packages that lie in a folder, for the time of the check: nothing is fetched, nothing installed
into the interpreter's own environment."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

PIP = (
    sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
    "--no-index", "--no-deps", "--no-compile", "--no-cache-dir",
)  # fmt: skip
PIP_S = 300.0


class Wheels:
    """What the folders of --wheels give. `paths`: for PYTHONPATH; `notes`: what did not work."""

    def __init__(self, folders: list[Path], into: Path, limit_s: float = PIP_S) -> None:
        """`limit_s`: for all that pip does."""
        self.paths: list[str] = []
        self.notes: list[str] = []
        self._into, self._limit_s = into, limit_s
        self._deadline = time.monotonic() + limit_s
        for folder in folders:
            self._add(folder.resolve())

    def _add(self, folder: Path) -> None:
        """Its wheels, or the folder itself, where packages lie unpacked."""
        wheels = sorted(folder.glob("*.whl"))
        if not wheels:
            self.paths.append(str(folder))
            return
        if str(self._into) not in self.paths:
            self.paths.append(str(self._into))
        if self._install(folder, wheels):
            for wheel in wheels:
                if problem := self._install(folder, [wheel]):
                    self.notes.append(f"{wheel.name} was not installed: {problem}")

    def _install(self, folder: Path, wheels: list[Path]) -> str:
        """Why pip did not install all of these; empty if it did."""
        place = ("--find-links", str(folder), "--target", str(self._into), "--upgrade")
        left = max(0.0, self._deadline - time.monotonic())
        try:
            done = subprocess.run(
                [*PIP, *place, *map(str, wheels)], stdin=subprocess.DEVNULL, capture_output=True,
                text=True, timeout=left,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"pip did not end within {self._limit_s:g} s"
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return (lines or ["pip said nothing"])[-1] if done.returncode else ""
