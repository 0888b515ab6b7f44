"""The scripts in findings/ follow the rules that make them safe to run anywhere.

scripts/findings.sh runs them, which needs a network and several minutes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from .pages import ROOT

FOLDER = ROOT / "findings"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
INSTALL = re.compile(r"""\b(?:pip"?|npm) install (.*?)(?: \|\| |$)""", re.MULTILINE)
OPTIONS = {"-q", "--no-deps", "--no-save", "--target", "--prefix", "--force-reinstall"}
PINNED = re.compile(r"@?[\w./-]+(?:\[\w+\])?(?:==|@)\d[\w.+]*")


def header_and_body(script: Path) -> tuple[str, str]:
    first, *lines = script.read_text().splitlines()
    assert first == "#!/usr/bin/env bash"
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.lstrip("# ") for line in lines[:end]), "\n".join(lines[end:])


def faults(script: Path) -> list[str]:
    """Return the rules that a script violates."""
    header, body = header_and_body(script)
    words = [word for line in INSTALL.findall(body.replace("\\\n", " ")) for word in line.split()]
    packages = [w.strip('"') for w in words if w not in OPTIONS and not w.startswith('"$work')]
    versions = {re.split(r"==|(?<=.)@", package)[-1] for package in packages}
    title = header.split("\n\n")[0]
    checks = {
        "the title lacks the package and its version": any(v in title for v in versions),
        "lacks the behaviour, the guess or the output": all(
            f"\n{word}: " in header for word in ("Behaviour", "Guess", "Seen")
        ),
        "continues after an error": body.startswith("set -euo pipefail\n"),
        "has no temporary folder": 'work="$(mktemp -d)"\ntrap \'' in body,
        "leaves its folder": bool(re.search(r"""^trap '[^']*rm -rf "\$work"' EXIT$""", body, re.M)),
        "installs nothing": bool(packages),
        f"not pinned: {packages}": all(map(PINNED.fullmatch, packages)),
        "has no exit status for hosts where it cannot run": "exit 77" in body,
        "does not report a changed behaviour": "changed: " in body,
        "uses the product": not re.search(r"mixkv", body),
        "names a host": not re.search(r"://(?!127\.0\.0\.1|localhost|\{|\$)", body),
        "not executable": os.access(script, os.X_OK),
    }  # fmt: skip
    return [what for what, right in checks.items() if not right]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_follows_the_rules(script: Path) -> None:
    assert faults(script) == []


def test_a_script_that_violates_a_rule_is_detected(tmp_path: Path) -> None:
    """Removing any required line from a valid script is detected."""
    good = SCRIPTS[0].read_text()
    for pattern in (
        r"(?<=bash\n)# .*\n", r"^# Guess:", r"^set -e.*\n", r"^trap .*\n", r"==[\d.]+", r"exit 77",
        r"changed: ", r"(?s)^work=.*?\n",
    ):  # fmt: skip
        script = tmp_path / "one.sh"
        script.write_text(re.sub(pattern, "", good, flags=re.MULTILINE))
        script.chmod(0o755)
        assert faults(script), pattern
    script.chmod(0o644)
    script.write_text(good)
    assert faults(script) == ["not executable"]


def test_the_table_lists_each_script_once() -> None:
    rows = re.findall(r"^\| \[(\S+)\]\((\S+)\) \|", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(rows) == [(script.stem, script.name) for script in SCRIPTS]


def test_the_runner_prints_one_line_per_script(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "findings").mkdir()
    (tmp_path / "scripts" / "findings.sh").write_text((ROOT / "scripts/findings.sh").read_text())
    for name, code, says in (
        ("holds", 0, "a"), ("holds-no-more", 1, "changed: why; echo a log line"),
        ("is-not-for-this-host", 77, "a; echo why"),
    ):  # fmt: skip
        (tmp_path / "findings" / f"{name}.sh").write_text(f"echo {says}\nexit {code}\n")

    def run(*names: str) -> tuple[int, list[str]]:
        done = subprocess.run(
            ["bash", tmp_path / "scripts" / "findings.sh", *names], text=True, capture_output=True
        )
        return done.returncode, [" ".join(line.split()) for line in done.stdout.splitlines()]

    lines = ["changed holds-no-more: why", "same holds",
             "cannot run here is-not-for-this-host: why"]  # fmt: skip
    assert run() == (1, lines)
    assert run("findings/holds.sh", "is-not-for-this-host") == (0, lines[1:])
    assert run("none")[0] == 2
