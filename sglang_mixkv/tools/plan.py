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

from sglang_mixkv.tools import table
from sglang_mixkv.tools.plan_line import GPUS
from sglang_mixkv.tools.plan_pair import Plan, Read, make_plan, model_text
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
            servers.append(read(role, args[role], gpu=args["gpu"]))
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


# ---------------------------------------------------------------- as text, the answer first


def text(plan: Plan) -> str:
    lines = [_answer(plan), "", *map(_side, (plan.prefill, plan.decode)), *_models(plan)]
    if plan.reads:
        lines += ["", *table([_COLUMNS, *map(_row, plan.reads)])]
    lines += ["", *_list("findings", plan.findings or ["nothing is refused or goes wrong"])]
    return "\n".join([*lines, *_list("notes", plan.notes)])


def _answer(plan: Plan) -> str:
    need = plan.need
    if need is None:
        return "Whether you need the plugin is open: see the findings."
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
        yield f"drafter  {model_text(draft)}, {plan.decode.speculative_algorithm}, {draft.dtype}"
    if plan.draft_bytes:
        sizes = (
            "{prefill_rank:,} on a prefill rank, {decode_rank:,} on a decode rank, {all:,} in all"
        )
        yield f"         bytes per token: {sizes.format(**plan.draft_bytes)}"


_COLUMNS = (
    "decode rank", "reads from prefill rank", "draft heads", "bytes per token", "tokens per slot",
    "tokens at once",
)  # fmt: skip


def _row(read: Read) -> tuple[str, ...]:
    ranks = str(read.decode_rank), str(read.prefill_rank)
    if not read.heads:
        return *ranks, "-", "-", "-", "-"
    first, last = read.heads[0], read.heads[-1]
    figures = (read.bytes_per_token, read.tokens_per_slot, read.tokens_at_once)
    heads = str(first) if first == last else f"{first}..{last}"
    return *ranks, heads, *(f"{figure:,}" for figure in figures)


def _list(title: str, points: Iterable[str]) -> Iterator[str]:
    lines = [fill(point, WIDTH, initial_indent="  - ", subsequent_indent="    ",
                  break_long_words=False, break_on_hyphens=False) for point in points]  # fmt: skip
    yield from [f"{title}:", *lines] if lines else []
