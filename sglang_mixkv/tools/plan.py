"""``python -m sglang_mixkv plan``: whether a pair needs the plugin, and what it would do.

Exit status: 0 when nothing is refused or goes wrong, 1 when there are findings, 2 for launch lines,
models or URLs that cannot be read, with all that is wrong with either line.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

import msgspec

from sglang_mixkv.tools.plan_gpu import GPUS
from sglang_mixkv.tools.plan_pair import make_plan
from sglang_mixkv.tools.plan_server import read
from sglang_mixkv.tools.plan_text import text

ROLES = ("prefill", "decode")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_mixkv plan",
        description="Print whether a prefill and a decode server need the plugin, what decode "
        "would read from prefill, and what would be refused. SGLang, which has to be installed, "
        "resolves the launch lines. Needs no GPU; of a model its config.json is read.",
        epilog="Exit status: 0 without findings, 1 with findings, 2 when something cannot be read.",
    )
    for role in ROLES:
        line = f"launch line of the {role} server, or its flags"
        parser.add_argument(f"--{role}", metavar="LINE", help=line)
        url = f"a running {role} server (reads /server_info); flags of --{role} win over it"
        parser.add_argument(f"--{role}-url", metavar="URL", help=url)
    gpu, *_ = GPUS
    parser.add_argument(
        "--gpu", choices=GPUS, default=gpu,
        help=f"what lines are resolved for on a host without a GPU (default: {gpu})",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: list[str]) -> int:
    """Parse, plan, print."""
    args = vars(_parser().parse_args(argv))
    servers, errors = [], []
    for role in ROLES:
        try:
            servers.append(read(role, args[role], args[f"{role}_url"], gpu=args["gpu"]))
        except ValueError as error:
            errors.append(str(error))
        except ImportError as error:
            why = f": {error}" if find_spec("sglang") else " is not installed here"
            errors.append(f"SGLang{why}. Run the plan in the servers' image.")
    if errors:
        print(*(f"error: {error}" for error in dict.fromkeys(errors)), sep="\n", file=sys.stderr)
        return 2
    plan = make_plan(*servers)
    print(msgspec.json.format(msgspec.json.encode(plan)).decode() if args["json"] else text(plan))
    return 1 if plan.findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
