"""``python -m sglang_mixkv COMMAND``: finds a tool by name and runs its ``main(argv) -> int``.

A tool is a module, imported only when asked for, so that the help text needs neither SGLang nor
torch.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable

COMMANDS: dict[str, tuple[str, str]] = {
    "plan": (
        "tools.plan",
        "whether two launch lines need the plugin, who reads what, and what would be refused",
    ),
    "doctor": (
        "tools.doctor",
        "versions, seams, configuration, a real read: what to paste into an issue",
    ),
    "status": (
        "tools.status",
        "running servers on one screen: drafters, transfers, what is wrong and what to do",
    ),
    "accept": (
        "tools.accept",
        "acceptance of your own pair of servers against a single one, on your prompts",
    ),
}
"""Name -> the tool's module in this package, and its line in the help text."""

DEMO = "the demo is in the repository, not in the package: run `bash scripts/demo.sh` in a clone"


def usage() -> str:
    """The help text: one line per command."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: python -m sglang_mixkv COMMAND [options]", "", "commands:", *lines])


def main(argv: list[str] | None = None) -> int:
    """Dispatch to one tool; 2 for a command that does not exist."""
    args = sys.argv[1:] if argv is None else argv
    if args and args[0] in COMMANDS:
        tool = importlib.import_module(f"sglang_mixkv.{COMMANDS[args[0]][0]}")
        return int(tool.main(args[1:]))
    if args and args[0] in ("-h", "--help"):
        print(usage())  # noqa: T201
        return 0
    wrong = f"unknown command: {args[0]}" if args else "no command given"
    text = DEMO if args[:1] == ["demo"] else f"{wrong}\n\n{usage()}"
    print(text, file=sys.stderr)  # noqa: T201
    return 2


def run(tool: Callable[[], int] = main) -> int:
    """A `main`, which ends without a word where its reader has gone, as `head` does."""
    try:
        try:
            return tool()
        finally:
            print(end="", flush=True)  # noqa: T201
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the flush at exit fails as well
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(run())
