"""The plan as plain text: the answer first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from textwrap import fill

from sglang_mixkv.channel.slots import quota_of
from sglang_mixkv.tools.plan_pair import Plan, Read, model_text
from sglang_mixkv.tools.plan_server import Server
from sglang_mixkv.tools.table import table

WIDTH = 100


def text(plan: Plan) -> str:
    lines = [_answer(plan), "", *map(_side, (plan.prefill, plan.decode)), *_models(plan)]
    if plan.prompts:
        lines += ["", *table(_reads(plan.reads)), "", *_staging(plan), "", *table(_prompts(plan))]
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


def _reads(reads: Sequence[Read]) -> Iterator[Sequence[str]]:
    yield ("decode rank", "reads from prefill rank", "draft heads", "bytes per token",
           "tokens per slot", "tokens at once")  # fmt: skip
    for read in reads:
        figures = (read.bytes_per_token, read.tokens_per_slot, read.tokens_at_once)
        cells = (f"{figure:,}" if read.heads else "-" for figure in figures)
        yield str(read.decode_rank), str(read.prefill_rank), heads_text(read.heads), *cells


def heads_text(heads: Sequence[int]) -> str:
    """Neighbouring head numbers: 3, or 0..3; a dash for none."""
    if len(heads) < 2:
        return str(heads[0]) if heads else "-"
    return f"{heads[0]}..{heads[-1]}"


def _staging(plan: Plan) -> Iterator[str]:
    for server in (plan.prefill, plan.decode):
        ranks = server.tp_size * server.dp_size
        size = _mib(server.config.staging_mb << 20)
        yield f"staging  {server.role}: {size} on each of {ranks} rank{'s' * (ranks > 1)}"
    chunk = f"chunks of {plan.prefill.chunk:,} tokens" if plan.prefill.chunk else "one chunk"
    yield (
        f"         {plan.slots} slots of {_mib(plan.slot_bytes)}, at most {quota_of(plan.slots)} "
        f"for one reader; {chunk} on prefill"
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.4g} MiB"


def _prompts(plan: Plan) -> Iterator[Sequence[str]]:
    yield ("prompt tokens", "to a decode rank", "segments", "messages", "slots")
    for one in plan.prompts:
        slots = "all at once" if one.at_once else "used in turns"
        counts = (f"{one.segments:,}", f"{one.messages:,}")
        yield f"{one.tokens:,}", _mib(one.bytes), *counts, slots


def _list(title: str, points: Iterable[str]) -> Iterator[str]:
    lines = [fill(point, WIDTH, initial_indent="  - ", subsequent_indent="    ",
                  break_long_words=False, break_on_hyphens=False) for point in points]  # fmt: skip
    yield from [f"{title}:", *lines] if lines else []
