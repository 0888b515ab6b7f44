"""The plan as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sglang_mixkv.tools.plan_figures import TOKENS, Load, Model, Plan, RankPlan, Sender, Side

_HEADER = (
    "decode rank", "prefill rank", "target", "draft heads", "aux", "state",
    "target B/token", "draft B/token", f"descriptors/{TOKENS:,} tokens",
)  # fmt: skip


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns, two spaces between; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ruled = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in ruled
    ]


def heads_text(heads: Sequence[int]) -> str:
    """Neighbouring head numbers: 3, or 0..3; a dash for none."""
    if not heads:
        return "-"
    return str(heads[0]) if len(heads) == 1 else f"{heads[0]}..{heads[-1]}"


def text(plan: Plan) -> str:
    """All of the plan: sides, models, who sends what, figures, refusals, what is not known."""
    lines = [*_sides(plan), *_models(plan), ""]
    if plan.ranks:
        lines += [*table(_rows(plan)), "", *_totals(plan), ""]
    lines += _list("refused", plan.refused) or ["refused: nothing that can be seen from here"]
    return "\n".join([*lines, *_list("not known from here", plan.unknown)])


def _list(title: str, points: Iterable[str]) -> list[str]:
    lines = [f"  - {point}" for point in points]
    return [f"{title}:", *lines] if lines else []


def _sides(plan: Plan) -> list[str]:
    return [
        f"{name:<8} {_side(side)}"
        for name, side in (("prefill", plan.prefill), ("decode", plan.decode))
        if side is not None
    ]


def _side(side: Side) -> str:
    groups = f" in {side.dp_groups} DP-attention groups" if side.dp_groups > 1 else ""
    stages = f", {side.pp} pipeline stages" if side.pp > 1 else ""
    page = side.page_size or "not given"
    dcp = f", DCP {side.dcp}" if side.dcp > 1 else ""
    return f"TP {side.tp}{groups}: attention TP {side.attention_tp}{stages}{dcp}, page size {page}"


def _models(plan: Plan) -> list[str]:
    lines = [
        f"{name:<8} {_model(model)}"
        for name, model in (("target", plan.target), ("drafter", plan.draft))
        if model is not None
    ]
    return [*lines, f"figures  for pages of {plan.page_size} tokens"]


def _model(model: Model) -> str:
    kind = "MLA" if model.kind == "mla" else f"{model.kv_heads} KV heads"
    return (
        f"{model.architecture}: {kind}, {model.layers} layer{'s' * (model.layers > 1)}, "
        f"{model.dtype}, {model.row_bytes:,} B/token"
    )


def _rows(plan: Plan) -> list[Sequence[str]]:
    stages = plan.prefill is not None and plan.prefill.pp > 1
    rows: list[Sequence[str]] = [_HEADER]
    for rank in plan.ranks:
        rows += [_row(plan, rank, sender, stages) for sender in rank.senders]
    return rows


def _row(plan: Plan, rank: RankPlan, sender: Sender, stages: bool) -> Sequence[str]:
    where = f"{sender.prefill_rank}" + f" stage {sender.stage}" * stages
    own = f"{rank.decode_rank}" + f" stage {rank.decode_stage}" * _staged(plan)
    if sender.dummy:
        return (own, where, "dummy", "-", "-", "-", "0", "0", "0")
    mla = plan.target.kind == "mla"
    whole = "latent" if sender.target_heads else "-"
    return (
        own, where, whole if mla else heads_text(sender.target_heads), _draft(plan, sender),
        "yes" if sender.aux else "-", "yes" if sender.state else "-", *_load(sender.load),
    )  # fmt: skip


def _staged(plan: Plan) -> bool:
    return plan.decode is not None and plan.decode.pp > 1


def _draft(plan: Plan, sender: Sender) -> str:
    mla = plan.draft is not None and plan.draft.kind == "mla"
    return "latent" if mla and sender.draft_heads else heads_text(sender.draft_heads)


def _load(load: Load) -> tuple[str, str, str]:
    few, many = load.descriptors_one_run, load.descriptors_scattered
    count = f"{few:,}" if few == many else f"{few:,} to {many:,}"
    return f"{load.target_bytes:,}", f"{load.draft_bytes:,}", count


def _totals(plan: Plan) -> list[str]:
    rows: list[Sequence[str]] = [
        ("decode rank", "answers expected", "target B/token", "draft B/token",
         f"descriptors/{TOKENS:,} tokens")
    ]  # fmt: skip
    for rank in plan.ranks:
        name = f"{rank.decode_rank}" + f" stage {rank.decode_stage}" * _staged(plan)
        rows.append((name, str(rank.expected_responses), *_load(rank.load)))
    answers = sum(rank.expected_responses for rank in plan.ranks)
    return table([*rows, ("one request", str(answers), *_load(plan.total))])
