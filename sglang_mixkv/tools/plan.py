"""``python -m sglang_mixkv plan``: whether a pair needs the plugin, and what changes with it."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from threading import Timer
from typing import Any, NamedTuple

import msgspec

from sglang_mixkv.channel.slots import share_of, slots_of
from sglang_mixkv.draft.layout import DraftFacts, readers_of
from sglang_mixkv.tools import as_json, bounded, parser, point
from sglang_mixkv.tools.plan_launch import read_row
from sglang_mixkv.tools.plan_pair import PairReport, make_plan
from sglang_mixkv.tools.plan_server import GPUS, Server, read
from sglang_mixkv.tools.plan_text import load

ROLES = ("prefill", "decode")
CHUNK = 8192  # tokens: SGLang's usual --chunked-prefill-size
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
        of = f"launch line or flags of the {role} server; or a file, FILE#/POINTER or - for stdin, "
        add(f"--{role}", metavar="LINE", required=True, help=of + "with them or with a row")
    both = "GPU to resolve both lines for (default: the first on which SGLang starts them)"
    add("--gpu", choices=GPUS, help=both)
    add("--json", action="store_true", help="print JSON")
    for role in ROLES:
        of = f"number of {role} servers, to size each rank's slots (default: 1)"
        add(f"--{role}-servers", metavar="N", type=bounded(1, 1000), default=1, help=of)
    args = vars(made.parse_args(argv))
    # Importing SGLang makes many lasting objects: garbage collection would take 40 % of the time.
    gc.disable()
    patience = Timer(1, print, ["SGLang is being asked about both lines ..."], {"file": sys.stderr})
    patience.daemon = True
    if sys.stderr.isatty():
        patience.start()
    try:
        with redirect_stdout(sys.stderr):  # SGLang may print, too
            plan = _plan(args)
    finally:
        patience.cancel()
        gc.freeze()
        gc.enable()
    if plan is None:
        return 2
    numbers = [args[f"{role}_servers"] for role in ROLES]
    print(as_json(whole(plan, *numbers)) if args["json"] else text(plan, *numbers))
    return 1 if plan.findings else 0


def _plan(args: dict[str, Any]) -> PairReport | None:
    """Read both lines and plan for them; print the errors of both instead."""
    servers, rows, errors = list[Server](), list[Server](), dict[str, str]()
    stdin = sys.stdin.read() if any(args[r].partition("#")[0] == "-" for r in ROLES) else ""
    for role in ROLES:
        try:
            args[role] = load(args[role], stdin)
            row = read_row(args[role], role)
            rows += [row] if row else []
            servers.append(row or read(role, args[role], gpu=args["gpu"]))
        except (OSError, ValueError) as error:  # an error that both lines have is printed once
            errors.setdefault(str(error).replace(f"{role}: ", ""), str(error))
        except ImportError as error:
            errors["SGLang"] = f"{error}. Run plan in the servers' image, which has SGLang."
    if not errors and len({one.gpu for one in servers} - {""}) > 1:
        # One line starts only on the last GPU, so try the other line there too.
        last = [*GPUS][-1]
        again = [s if s in rows else read(s.role, args[s.role], gpu=last) for s in servers]
        servers = servers if any(one.stock for one in again) else again
    if not errors:
        return make_plan(*servers)
    print(*(f"error: {error}" for error in errors.values()), sep="\n", file=sys.stderr)
    return None


class Descriptors(NamedTuple):
    """How many ranges a transfer engine moves for a chunk's draft KV, on a decode rank. `stock`:
    ranges that SGLang sends. `channel`: slots to read; 0 if a slot holds no token."""

    stock: int
    channel: int


def descriptors(
    facts: DraftFacts, tokens: int, page_size: int, slot_bytes: int, heads: int, sources: int = 1
) -> Descriptors:
    """Count the descriptors of a chunk of `tokens`, with `heads` from each of `sources` ranks.

    SGLang's NIXL backend has a descriptor per page and entry. Mooncake's joins neighbouring pages;
    after a long run, few pages are neighbours on both sides, so it needs almost as many. The
    channel's number does not depend on pages."""
    pages, per_slot = -(-tokens // page_size), facts.tokens_in(slot_bytes, heads)
    segments = -(-tokens // per_slot) if per_slot else 0
    return Descriptors(len(facts.head_bytes) * pages, sources * segments)


class Transfer(msgspec.Struct, frozen=True):
    """The reads of the plugin, its memory, and how ranks share that memory in the worst case, in
    which every decode rank reads from every prefill server. Two ranks share `slots`, which hold
    `tokens`. Staging of `enough_mb` makes this at least 1. `chunk`: ranges for CHUNK tokens."""

    heads: int
    bytes_per_token: int
    ranks: int
    prefill_mb: int
    decode_mb: int
    readers: int
    sources: int
    slots: int
    tokens: int
    enough_mb: int
    chunk: Descriptors


def transfer(plan: PairReport, prefills: int = 1, decodes: int = 1) -> Transfer | None:
    """Return the sizes of a plan; None if the plugin is neither needed nor requested."""
    facts, sides = plan.decode.facts, (plan.prefill, plan.decode)
    is_asked = plan.need and (plan.need.needed or any(side.enabled for side in sides))
    if not is_asked or facts is None or facts != plan.prefill.facts:
        return None
    held, needed = (max(1, facts.total_heads // side.attention_tp) for side in sides)
    heads = min(held, needed)
    ranks = needed // heads
    groups = [side.attn_dp_size * side.dp_size for side in sides]
    readers = decodes * groups[1] * readers_of(*(side.attention_tp for side in sides))
    sources = prefills * groups[0] * ranks
    counts, sizes = zip(*(slots_of(side.config.staging_mb) for side in sides), strict=True)
    slots = min(map(share_of, counts, (readers, sources)))
    return Transfer(
        heads, facts.bytes_per_token(heads), ranks, sides[0].config.staging_mb,
        sides[1].config.staging_mb, readers, sources, slots,
        slots * facts.tokens_in(min(sizes), heads),
        -(-16 * max(readers, sources) // 3),  # three quarters of the slots are shared, of 4 MiB
        descriptors(facts, CHUNK, plan.decode.page_size or 1, min(sizes), heads, ranks),
    )  # fmt: skip


def whole(plan: PairReport, prefills: int, decodes: int) -> dict[str, Any]:
    """Return the plan for JSON, with Transfer, and `head_bytes` as a count of each width."""
    found: dict[str, Any] = msgspec.to_builtins(plan)
    for side in ROLES:
        for model in filter(None, (found[side]["target"], found[side]["draft"])):
            model["facts"]["head_bytes"] = Counter(map(str, model["facts"]["head_bytes"]))
    return {**found, "transfer": transfer(plan, prefills, decodes)}


def text(plan: PairReport, prefills: int = 1, decodes: int = 1) -> str:
    """Return the printed plan for these numbers of servers."""
    lines = [*point(_answer(plan)), "", *map(_side, (plan.prefill, plan.decode))]
    lines.append(f"target   {plan.decode.target}")
    if draft := plan.decode.draft:
        size = draft.facts.bytes_per_token(draft.kv_heads)
        bytes_of = f", {size:,} bytes per token" * bool(size)
        lines.append(f"drafter  {draft}, {draft.facts.algorithm}, {draft.facts.dtype}{bytes_of}")
    if moved := transfer(plan, prefills, decodes):
        lines += _transfer(moved, prefills, decodes)
    lines += ["", "findings:" if plan.findings else "findings: none", *_list(plan.findings)]
    return "\n".join([*lines, *["notes:"] * bool(plan.notes), *_list(plan.notes)])


def _answer(plan: PairReport) -> str:
    need = plan.need
    if need is None or (need.needed and (plan.prefill.refused or plan.decode.refused)):
        return "Neither stock SGLang nor the plugin serves this pair: see the findings."
    if not need.needed:
        return f"You do not need the plugin: {need.reason}."
    answer = f"You need the plugin: {need.reason}."
    if need.wrong_share is not None:
        answer += f" Without it {need.wrong_share:.0%} of a prompt's draft KV on decode is wrong."
    if not (plan.prefill.enabled or plan.decode.enabled):
        answer += " Start both sides with --enable-mixkv (under Dynamo with SGLANG_ENABLE_MIXKV=1)."
    return answer


def _side(server: Server) -> str:
    groups = f" in {server.attn_dp_size} DP-attention groups" if server.attn_dp_size > 1 else ""
    more = (
        f"attention TP {server.attention_tp or 'uneven'}",
        f"{server.dp_size} replicas" * (server.dp_size > 1),
        f"{server.pp_size} pipeline stages" * (server.pp_size > 1),
        f"DCP {server.dcp_size}" * (server.dcp_size > 1),
    )
    return f"{server.role:<8} TP {server.tp_size}{groups}, {', '.join(filter(None, more))}"


def _transfer(moved: Transfer, prefills: int, decodes: int) -> Iterator[str]:
    where = f"from each of {moved.ranks} prefill ranks" if moved.ranks > 1 else "from one prefill "
    size = f"{moved.bytes_per_token:,} bytes per token"
    where += "rank" * (moved.ranks == 1)
    yield f"reads    {moved.heads} of the drafter's heads, {size}, {where}"
    ranges = f"{moved.chunk.channel:,} for {CHUNK:,} tokens on a decode rank"
    yield f"ranges   {ranges}; SGLang's own transfer takes up to {moved.chunk.stock:,}"
    each = f"{moved.prefill_mb:,} MiB on each prefill rank, {moved.decode_mb:,} MiB on each decode"
    yield f"staging  {each} rank, outside --mem-fraction-static"
    share = f"two ranks then share {moved.slots} slots, which hold {moved.tokens:,} tokens"
    if not moved.slots:
        share = f"then some have no slot; with --mixkv-staging-mb {moved.enough_mb} each has one"
    ranks = f"{moved.readers:,} decode ranks read" if moved.readers > 1 else "1 decode rank reads"
    busy = f"{ranks} a prefill rank, and a decode rank reads {moved.sources:,}"
    busy += f" (--prefill-servers {prefills}, --decode-servers {decodes}): {share}"
    yield from point(busy, "busy     ")


def _list(points: Iterable[str]) -> list[str]:
    return [line for text in points for line in point(text, "  - ")]
