"""``python -m sglang_mixkv plan``: whether a pair needs the plugin, and what it would do.

Exit status: 0 when nothing is refused or goes wrong, 1 when there are findings, 2 for launch lines
or models that cannot be read, with all that is wrong with either line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from textwrap import fill

import msgspec

from sglang_mixkv.tools import table, waiting
from sglang_mixkv.tools.plan_line import GPUS
from sglang_mixkv.tools.plan_pair import Fleet, Plan, Read, make_plan, model_text
from sglang_mixkv.tools.plan_server import Server, read

ROLES = ("prefill", "decode")
WIDTH = 100


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
        parser.add_argument(f"--{role}", metavar="LINE", required=True, help=line)
    parser.add_argument(
        "--gpu", choices=GPUS,
        help="what both lines are resolved for (default: the first on which SGLang starts them)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    for role in ROLES:
        parser.add_argument(
            f"--{role}-servers", metavar="N", type=int, default=1, choices=range(1, 1001),
            help=f"how many {role} servers there are, for the slots of each rank (default: 1)",
        )  # fmt: skip
    return parser


def main(argv: list[str]) -> int:
    """Parse, plan, print."""
    args = vars(_parser().parse_args(argv))
    servers, errors = [], []
    for role in ROLES:
        try:
            with waiting(f"SGLang resolves the {role} line"):
                servers.append(read(role, args[role], gpu=args["gpu"]))
        except ValueError as error:
            errors.append(str(error))
        except ImportError as error:
            why = f": {error}" if find_spec("sglang") else " is not installed here"
            errors.append(f"SGLang{why}. Run the plan in the servers' image.")
    if errors:
        print(*(f"error: {error}" for error in dict.fromkeys(errors)), sep="\n", file=sys.stderr)
        return 2
    prefill, decode = servers
    plan = make_plan(prefill, decode, (args["prefill_servers"], args["decode_servers"]))
    print(msgspec.json.format(msgspec.json.encode(plan)).decode() if args["json"] else text(plan))
    return 1 if plan.findings else 0


# ---------------------------------------------------------------- as text, the answer first


def text(plan: Plan) -> str:
    lines = [_answer(plan), "", *map(_side, (plan.prefill, plan.decode)), *_models(plan)]
    transfers = plan.prefill.enabled or plan.decode.enabled or (plan.need and plan.need.needed)
    if plan.fleet and transfers:
        rows = (_row(read, plan) for read in plan.reads)
        lines += ["", *table([_COLUMNS, *rows]), "", *_staging(plan, plan.fleet)]
    lines += ["", *_list("findings", plan.findings or ["nothing is refused or goes wrong"])]
    return "\n".join([*lines, *_list("notes", plan.notes)])


def _answer(plan: Plan) -> str:
    need = plan.need
    if need is None:
        return "Neither stock SGLang nor the plugin serves this pair: see the findings."
    answer = "You need the plugin" if need.needed else "You do not need the plugin"
    share = ""
    if need.needed and need.wrong_share is not None:
        share = f" Without it {need.wrong_share:.0%} of a prompt's draft KV on decode is wrong."
    if need.needed and not (plan.prefill.enabled or plan.decode.enabled):
        share += " Start both sides with --enable-mixkv."
    return fill(f"{answer}: {need.reason}.{share}", WIDTH)


def _side(server: Server) -> str:
    groups = f" in {server.attn_dp_size} DP-attention groups" if server.attn_dp_size > 1 else ""
    more = (
        f"attention TP {server.attention_tp or 'uneven'}",
        f"{server.dp_size} replicas" * (server.dp_size > 1),
        f"{server.pp_size} pipeline stages" * (server.pp_size > 1),
        f"DCP {server.dcp_size}" * (server.dcp_size > 1),
    )
    return f"{server.role:<8} TP {server.tp_size}{groups}, {', '.join(filter(None, more))}"


def _models(plan: Plan) -> Iterator[str]:
    yield f"target   {model_text(plan.decode.target)}"
    draft = plan.decode.draft
    if draft is not None:
        size = (
            f", {draft.kv_heads * sum(draft.head_bytes):,} bytes per token"
            if draft.kv_heads
            else ""
        )
        algorithm = plan.decode.speculative_algorithm
        yield f"drafter  {model_text(draft)}, {algorithm}, {draft.dtype}{size}"


_COLUMNS = "decode rank", "reads from prefill rank", "draft heads", "bytes per token"


def _row(read: Read, plan: Plan) -> tuple[str, ...]:
    ranks = (
        f"{read.decode_rank}{_of_groups('of each of', plan.decode.groups)}",
        f"{read.prefill_rank}{_of_groups('of one of', plan.prefill.groups)}",
    )
    if not read.heads:
        return *ranks, "-", "-"
    first, last = read.heads[0], read.heads[-1]
    heads = str(first) if first == last else f"{first}..{last}"
    return *ranks, heads, f"{read.bytes_per_token:,}"


def _of_groups(which: str, groups: int) -> str:
    return f" {which} {groups} groups" if groups > 1 else ""


def _staging(plan: Plan, fleet: Fleet) -> Iterator[str]:
    here, there = plan.prefill.config.staging_mb, plan.decode.config.staging_mb
    yield fill(
        f"staging  {here:,} MiB on each prefill rank, {there:,} MiB on each decode rank, outside "
        "--mem-fraction-static", WIDTH, subsequent_indent=" " * 9)  # fmt: skip
    yield fill(
        f"busy     {fleet.readers:,} decode ranks read a prefill rank, and a decode rank reads "
        f"{fleet.sources:,} (--prefill-servers {fleet.prefill_servers}, --decode-servers "
        f"{fleet.decode_servers}): two ranks then share {fleet.slots} slots, which hold "
        f"{fleet.tokens:,} tokens", WIDTH, subsequent_indent=" " * 9)  # fmt: skip


def _list(title: str, points: Iterable[str]) -> Iterator[str]:
    lines = [fill(point, WIDTH, initial_indent="  - ", subsequent_indent="    ",
                  break_long_words=False, break_on_hyphens=False) for point in points]  # fmt: skip
    yield from [f"{title}:", *lines] if lines else []
