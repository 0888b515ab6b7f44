"""``python -m sglang_mixkv plan``: whether a pair needs the plugin, and what it would do."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from sglang_mixkv.channel.slots import share_of, slots_of
from sglang_mixkv.draft.layout import readers_of
from sglang_mixkv.tools import as_json, bounded, parser, point
from sglang_mixkv.tools.plan_pair import Plan, make_plan
from sglang_mixkv.tools.plan_server import GPUS, Server, read

ROLES = ("prefill", "decode")
ABOUT = """\
Print whether a prefill and a decode server need the plugin, what decode would read from prefill,
and what would be refused. SGLang, which must be installed, resolves the launch lines. No GPU is
needed; of each model, only config.json is read.

Exit status: 0 without findings, 1 with findings, 2 if a line or a model cannot be read; the errors
of both lines are printed."""


def main(argv: list[str]) -> int:
    """Plan for both lines, print the plan, and return the exit status."""
    made = parser("plan", ABOUT)
    add = made.add_argument
    for role in ROLES:
        of = f"launch line or flags of the {role} server, or a file (- for stdin) with them"
        add(f"--{role}", metavar="LINE", required=True, help=of)
    both = "GPU to resolve both lines for (default: the first on which SGLang starts them)"
    add("--gpu", choices=GPUS, help=both)
    add("--json", action="store_true", help="print JSON")
    for role in ROLES:
        of = f"number of {role} servers, to size each rank's slots (default: 1)"
        add(f"--{role}-servers", metavar="N", type=bounded(1, 1000), default=1, help=of)
    args = vars(made.parse_args(argv))
    servers, errors = [], dict[str, str]()
    stdin = sys.stdin.read() if "-" in (args["prefill"], args["decode"]) else ""
    for role in ROLES:
        try:
            args[role] = _text(args[role], stdin)
            servers.append(read(role, args[role], gpu=args["gpu"]))
        except (OSError, ValueError) as error:  # an error that both lines have is printed once
            errors.setdefault(str(error).replace(f"{role}: ", ""), str(error))
        except ImportError as error:
            errors["SGLang"] = f"{error}. Run plan in the servers' image, which has SGLang."
    if errors:
        print(*(f"error: {error}" for error in errors.values()), sep="\n", file=sys.stderr)
        return 2
    if len({one.gpu for one in servers} - {""}) > 1:  # one starts only on the last: perhaps both do
        again = [read(one.role, args[one.role], gpu=[*GPUS][-1]) for one in servers]
        servers = servers if any(one.stock for one in again) else again
    plan = make_plan(*servers)
    print(as_json(plan) if args["json"] else text(plan, *(args[f"{r}_servers"] for r in ROLES)))
    return 1 if plan.findings else 0


def _text(given: str, stdin: str) -> str:
    """Return the text of the file or stdin that `given` names, else `given`. Raises OSError."""
    if not os.path.isfile(given):
        return stdin if given == "-" else given
    return Path(given).read_text(encoding="utf-8-sig", errors="replace")


def text(plan: Plan, prefills: int = 1, decodes: int = 1) -> str:
    """Return the answer for so many servers of each role."""
    lines = [*point(_answer(plan)), "", *map(_side, (plan.prefill, plan.decode)), *_models(plan)]
    if plan.need and (plan.need.needed or plan.prefill.enabled or plan.decode.enabled):
        lines += _transfer(plan, prefills, decodes)
    lines += ["", "findings:" if plan.findings else "findings: none", *_list(plan.findings)]
    return "\n".join([*lines, *["notes:"] * bool(plan.notes), *_list(plan.notes)])


def _answer(plan: Plan) -> str:
    need = plan.need
    if need is None:
        return "Neither stock SGLang nor the plugin serves this pair: see the findings."
    if not need.needed:
        return f"You do not need the plugin: {need.reason}."
    answer = f"You need the plugin: {need.reason}."
    if need.wrong_share is not None:
        answer += f" Without it {need.wrong_share:.0%} of a prompt's draft KV on decode is wrong."
    is_on = plan.prefill.enabled or plan.decode.enabled
    how = " Start both sides with --enable-mixkv (under Dynamo with SGLANG_ENABLE_MIXKV=1)."
    return answer + how * (not is_on)


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
    yield f"target   {plan.decode.target}"
    if draft := plan.decode.draft:
        size = draft.facts.bytes_per_token(draft.kv_heads)
        bytes_of = f", {size:,} bytes per token" * bool(size)
        yield f"drafter  {draft}, {draft.facts.algorithm}, {draft.facts.dtype}{bytes_of}"


def _transfer(plan: Plan, prefills: int, decodes: int) -> Iterator[str]:
    """Say what the plugin would move, how much memory it takes, and how ranks share that at worst:
    when every decode rank reads from every server."""
    facts, sides = plan.decode.facts, (plan.prefill, plan.decode)
    if facts is None or facts != plan.prefill.facts:
        return
    held, needed = (max(1, facts.total_heads // side.attention_tp) for side in sides)
    heads = min(held, needed)
    size, ranks = facts.bytes_per_token(heads), needed // heads
    where = f"from each of {ranks} prefill ranks" if ranks > 1 else "from one prefill rank"
    yield f"reads    {heads} of the drafter's heads, {size:,} bytes per token, {where}"
    each = (f"{side.config.staging_mb:,} MiB on each {side.role} rank" for side in sides)
    yield f"staging  {', '.join(each)}, outside --mem-fraction-static"
    groups = [side.attn_dp_size * side.dp_size for side in sides]
    readers = decodes * groups[1] * readers_of(*(side.attention_tp for side in sides))
    sources = prefills * groups[0] * ranks
    counts, sizes = zip(*(slots_of(side.config.staging_mb) for side in sides), strict=True)
    if slots := min(map(share_of, counts, (readers, sources))):
        tokens = slots * facts.tokens_in(min(sizes), heads)
        share = f"two ranks then share {slots} slots, which hold {tokens:,} tokens"
    else:  # three quarters of the slots are shared, of 4 MiB each
        enough = -(-16 * max(readers, sources) // 3)
        share = f"then some have no slot; with --mixkv-staging-mb {enough} each has one"
    busy = f"{readers:,} decode ranks read a prefill rank, and a decode rank reads {sources:,}"
    busy += f" (--prefill-servers {prefills}, --decode-servers {decodes}): {share}"
    yield from point(busy, "busy     ")


def _list(points: Iterable[str]) -> list[str]:
    return [line for text in points for line in point(text, "  - ")]
