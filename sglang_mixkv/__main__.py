"""The command line ``sglang-mixkv`` or ``python -m sglang_mixkv``. It runs a tool's ``main(argv)``.

Only the requested tool's module is imported, so the help text needs neither SGLang nor torch.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable

from sglang_mixkv import __version__

COMMANDS = {
    "plan": "check two launch lines: do they need the plugin, what would it move or refuse?",
    "doctor": "check this host: versions, SGLang's functions, settings, a test read (for issues)",
    "status": "show running servers on one screen: drafters, transfers, problems and remedies",
    "accept": "compare your pair's accept length with a single server's, on your prompts",
}
"""Maps a module in `tools` to its line in the help text."""

USAGE = "usage: python -m sglang_mixkv COMMAND [options]\n\ncommands:\n" + "\n".join(
    f"  {name:<8}{text}" for name, text in COMMANDS.items()
)


def main() -> int:
    """Run the requested tool, and return its exit status; 2 for an unknown command."""
    command, *rest = sys.argv[1:] or [""]
    if command in COMMANDS:
        return int(importlib.import_module(f"sglang_mixkv.tools.{command}").main(rest))
    texts = {"--version": f"sglang-mixkv {__version__}", "--help": USAGE, "-h": USAGE}
    if command in texts:
        print(texts[command])  # noqa: T201
        return 0
    print(f"unknown command: {command or 'none'}\n\n{USAGE}", file=sys.stderr)  # noqa: T201
    return 2


def run(tool: Callable[[], int] = main) -> int:
    """Run `tool`. Exit silently on Ctrl-C, or when its output is closed (as by `head`)."""
    try:
        try:
            return tool()
        finally:
            print(end="", flush=True)  # noqa: T201
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise the flush at exit fails
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(run())
