"""Parse the documents for the tests: fenced blocks, commands, links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [
    *(ROOT / n for n in NAMES),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "findings/README.md",
]
IDS = [str(path.relative_to(ROOT)) for path in PAGES]

_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_ASSIGNMENT = re.compile(r"(export )?[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Block:
    """A fenced block. `shown`: its expected output, the text block that follows immediately."""

    language: str
    text: str
    shown: str | None = None

    def commands(self) -> Iterator[str]:
        """Yield the commands of a bash block. Continued lines are joined; comments and bare
        assignments are omitted."""
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if not words or all(_ASSIGNMENT.match(word) or word == "export" for word in words):
                continue
            yield " ".join(line.partition("  #")[0].split())


def blocks(page: Path) -> list[Block]:
    """Return all fenced blocks of a page, each with the text block right after it."""
    text = page.read_text()
    found = list(_FENCE.finditer(text))
    made = []
    for this, following in zip(found, [*found[1:], None], strict=False):
        shown = None
        if (
            following
            and following[1] == "text"
            and not text[this.end() : following.start()].strip()
        ):
            shown = following[2]
        made.append(Block(this[1], this[2], shown))
    return made


def bash(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "bash"]


def readme_flags() -> str:
    """Return the value of FLAGS in README.md."""
    (found,) = re.findall(r'FLAGS="(.*?)"', (ROOT / "README.md").read_text(), re.DOTALL)
    return found.replace("\\\n", "")


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def words(command: str, variables: dict[str, str]) -> list[str]:
    """Split a command into words, with its variables filled in."""
    found = re.sub(r"\$(\w+)", lambda name: variables[name[1]], command)
    return shlex.split(found)
