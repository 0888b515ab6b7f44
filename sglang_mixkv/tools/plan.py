"""``python -m sglang_mixkv plan``: who sends what to whom, before anything is started.

Exit status: 0 when nothing that can be seen is refused, 1 otherwise, 2 for unusable arguments.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.tools.plan_figures import Plan, make_plan
from sglang_mixkv.tools.plan_flags import Server, from_line
from sglang_mixkv.tools.plan_svg import svg
from sglang_mixkv.tools.plan_text import text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_mixkv plan",
        description="Print what a prefill and a decode server would send to each other, from "
        "their launch lines or from two running servers. Model folders must be local; only "
        "their config.json is read.",
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", metavar="LINE", help=f"launch line of the {role} server, or its flags"
        )
        parser.add_argument(
            f"--{role}-url",
            metavar="URL",
            help=f"a running {role} server (reads /server_info); flags of --{role} win over it",
        )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="also draw the plan")
    return parser


def _server(role: str, line: str | None, url: str | None) -> Server:
    if line is None and url is None:
        raise MixKVError("MIXKV-START-04", f"give --{role}, --{role}-url, or both.")
    if url is None:
        return from_line(role, line or "")
    from sglang_mixkv.tools.plan_url import from_url  # requests, which lines do without

    return from_url(role, url, line or "")


def _from_arguments(args: argparse.Namespace) -> Plan:
    return make_plan(
        _server("prefill", args.prefill, args.prefill_url),
        _server("decode", args.decode, args.decode_url),
    )


def main(argv: list[str]) -> int:
    """Parse, plan, print."""
    args = _parser().parse_args(_joined(argv))
    try:
        plan = _from_arguments(args)
        if args.svg is not None:
            args.svg.write_text(svg(plan), encoding="utf-8")
    except (MixKVError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.format(msgspec.json.encode(plan)).decode() if args.json else text(plan))
    return 1 if plan.refused else 0


def _joined(argv: list[str]) -> list[str]:
    """`--prefill "--tp 8"` as one word: argparse takes a value that begins with a dash no
    other way."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] in ("--prefill", "--decode"):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
