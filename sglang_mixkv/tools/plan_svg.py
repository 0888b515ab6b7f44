"""The plan as a picture: prefill ranks above, decode ranks below, an arrow for each sender.

Neutral colours on a transparent ground; the text follows the reader's light or dark theme.
"""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from sglang_mixkv.tools.plan_figures import Plan, RankPlan, Sender
from sglang_mixkv.tools.plan_text import heads_text

COLUMN, BOX_W, BOX_H, MARGIN = 132, 108, 46, 16  # pixels
TOP, GAP, LINE = 34, 150, 14

_STYLE = """
  text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: #24292f; text-anchor: middle }
  .title { font-weight: 600 } .small { font-size: 11px }
  .start { text-anchor: start }
  .on-line { font-size: 11px; paint-order: stroke; stroke: #ffffff; stroke-width: 5px }
  rect { fill: #8b949e22; stroke: #6e7781; }
  line { stroke: #2f81c7; stroke-width: 1.6; marker-end: url(#head) }
  #head path { fill: #2f81c7 }
  .dummy line { stroke: #8b949e; stroke-width: 1; stroke-dasharray: 3 4; marker-end: none }
  .dummy text { fill: #8b949e }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } rect { stroke: #8b949e } .on-line { stroke: #0d1117 }
    .dummy text { fill: #8b949e }
  }
""".strip()


class _Box(NamedTuple):
    """Middle of a box's edge where arrows end, in pixels."""

    x: float
    y: float


def svg(plan: Plan) -> str:
    """The picture; a sentence in its place when nothing would be sent."""
    sources = sorted({(s.prefill_rank, s.stage) for rank in plan.ranks for s in rank.senders})
    columns = max(len(sources), len(plan.ranks), 4)
    width, height = columns * COLUMN + 2 * MARGIN, TOP + 2 * BOX_H + GAP + 58
    body = _body(plan, sources, width) if plan.ranks else [_refused(plan)]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        f"<title>{escape(_title(plan))}</title>",
        f"<style>{_STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>',
        _text(MARGIN, 20, _title(plan), "title start"),
        *body,
        "</svg>",
        "",
    ])  # fmt: skip


def _title(plan: Plan) -> str:
    if plan.prefill is None or plan.decode is None:
        return "sglang-mixkv plan"
    return f"prefill attention TP {plan.prefill.attention_tp} → decode attention TP " + str(
        plan.decode.attention_tp
    )


def _refused(plan: Plan) -> str:
    reason = plan.refused[0] if plan.refused else "no ranks"
    return _text(MARGIN, 60, f"refused: {reason[:90]}", "start")


def _body(plan: Plan, sources: list[tuple[int, int]], width: int) -> list[str]:
    staged = plan.prefill is not None and plan.prefill.pp > 1
    above = {key: _Box(x, TOP + BOX_H) for key, x in _spread(sources, width).items()}
    places = _spread([(r.decode_rank, r.decode_stage) for r in plan.ranks], width)
    below = {key: _Box(x, TOP + BOX_H + GAP) for key, x in places.items()}
    parts = [_box(box.x, TOP, *_source_words(plan, key, staged)) for key, box in above.items()]
    near_top = len(sources) >= len(plan.ranks)
    for rank in plan.ranks:
        end = below[rank.decode_rank, rank.decode_stage]
        parts.append(_box(end.x, end.y, f"decode {rank.decode_rank}", _needs(rank)))
        parts += [
            _arrow(above[s.prefill_rank, s.stage], end, _words(plan, s), s.dummy, near_top)
            for s in rank.senders
        ]
    return [*parts, _text(MARGIN, TOP + 2 * BOX_H + GAP + 32, _legend(plan), "small start")]


def _spread(keys: list[tuple[int, int]], width: int) -> dict[tuple[int, int], float]:
    """Middles of evenly spread columns."""
    step = (width - 2 * MARGIN) / len(keys)
    return {key: MARGIN + step * (i + 0.5) for i, key in enumerate(keys)}


def _source_words(plan: Plan, key: tuple[int, int], staged: bool) -> tuple[str, str]:
    mine = [s for r in plan.ranks for s in r.senders if (s.prefill_rank, s.stage) == key]
    sent = sum(s.load.target_bytes + s.load.draft_bytes for s in mine)
    return f"prefill {key[0]}" + f" stage {key[1]}" * staged, f"{sent:,} B/token"


def _needs(rank: RankPlan) -> str:
    return f"{rank.expected_responses} answer{'s' * (rank.expected_responses > 1)}"


def _words(plan: Plan, sender: Sender) -> list[str]:
    """What one arrow carries, a word a line."""
    if sender.dummy:
        return ["dummy"]
    mla = plan.target.kind == "mla"
    target = "target" if mla else f"target {heads_text(sender.target_heads)}"
    latent = plan.draft is not None and plan.draft.kind == "mla"
    draft = "draft" if latent else f"draft {heads_text(sender.draft_heads)}"
    words = [target] * bool(sender.target_heads) + [draft] * bool(sender.draft_heads)
    return words + ["aux"] * sender.aux + ["state"] * sender.state


def _legend(plan: Plan) -> str:
    count = plan.draft.kv_heads if plan.draft else 0
    heads = f"drafter: {count} KV heads; " if count else ""
    return (
        f"{heads}a request: {plan.total.target_bytes:,} target and "
        f"{plan.total.draft_bytes:,} draft bytes per token"
    )


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{escape(words)}</text>'


def _box(x: float, y: float, title: str, note: str) -> str:
    corner = f'x="{x - BOX_W / 2:.0f}" y="{y:.0f}"'
    return (
        f'<rect {corner} width="{BOX_W}" height="{BOX_H}" rx="6"/>'
        + _text(x, y + 20, title, "title")
        + _text(x, y + 36, note, "small")
    )


def _arrow(start: _Box, end: _Box, words: list[str], dummy: bool, near_top: bool) -> str:
    """A line with its words on it, near the side that has more boxes."""
    share = 0.32 if near_top else 0.68
    x = start.x + (end.x - start.x) * share
    middle = start.y + (end.y - start.y) * share - LINE * (len(words) - 1) / 2
    labels = [_text(x, middle + LINE * i + 4, word, "on-line") for i, word in enumerate(words)]
    line = f'<line x1="{start.x:.0f}" y1="{start.y}" x2="{end.x:.0f}" y2="{end.y}"/>'
    return f'<g class="{"dummy" if dummy else "sent"}">{line}{"".join(labels)}</g>'
