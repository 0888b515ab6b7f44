"""Lines and bars as one SVG, in colours that those who do not see red and green can tell apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 430, 290  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 34, 78  # of it, around what is drawn
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#666666"
DASHED = "5 4"
SPACE = "http://www.w3.org/2000/svg"
FONT = 'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222222"'
MONO = 'font-family="Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="12" fill="#222222"'

Tick = tuple[float, str]


@dataclass(frozen=True)
class Line:
    """`points`: x and y; None breaks it. `dashes`: as SVG's stroke-dasharray."""

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: str
    dashes: str = ""
    dots: bool = True


@dataclass(frozen=True)
class Lines:
    """A panel. `xs`, `ys`: where its axes have numbers. `shade`: from which x on, and a word.
    `marks`: upright lines with a word each."""

    title: str
    x: str
    xs: Sequence[Tick]
    ys: Sequence[float]
    lines: Sequence[Line]
    shade: Tick | None = None
    marks: Sequence[Tick] = ()

    def draw(self) -> Iterator[str]:
        wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        (low, _), *_, (most, _) = self.xs

        def across(x: float) -> float:
            return round(LEFT + wide * (x - low) / (most - low), 1)

        def up(y: float) -> float:
            return round(TOP + high * (1 - (y - self.ys[0]) / (self.ys[-1] - self.ys[0])), 1)

        if self.shade:
            at, words = across(self.shade[0]), self.shade[1]
            yield _box(at, TOP, LEFT + wide - at, high, "#eeeeee")
            yield _text(LEFT + wide, TOP - 4, words, "end", GREY)
        yield _text(LEFT, 18, self.title, bold=True)
        for y in self.ys:
            yield _path([(LEFT, up(y)), (LEFT + wide, up(y))], "#cccccc", 1)
            yield _text(LEFT - 7, up(y) + 4, f"{y:g}", "end")
        for x, label in self.xs:
            yield _text(across(x), TOP + high + 17, label, "middle")
        yield _text(LEFT + wide / 2, TOP + high + 34, self.x, "middle")
        for number, (x, word) in enumerate(self.marks):
            yield _path([(across(x), TOP), (across(x), TOP + high)], GREY, 1)
            yield _text(across(x) + 4, TOP + 24 + 14 * number, word, colour=GREY)
        for number, line in enumerate(self.lines):
            for part in _unbroken(line.points):
                places = [(across(x), up(y)) for x, y in part]
                yield _path(places, line.colour, 2, line.dashes)
                yield from (_dot(*place, line.colour) for place in places if line.dots)
            at, row = LEFT + number % 2 * wide / 2, HEIGHT - 26 + number // 2 * 17
            yield _path([(at, row - 4), (at + 22, row - 4)], line.colour, 2, line.dashes)
            yield _text(at + 27, row, line.name)


@dataclass(frozen=True)
class Bars:
    """A panel of shares, each with its name and its value. `ours`: those in another colour."""

    title: str
    bars: Sequence[tuple[str, float]]
    ours: frozenset[str] = frozenset()

    def draw(self) -> Iterator[str]:
        yield _text(LEFT, 18, self.title, bold=True)
        wide, high = WIDTH - LEFT - RIGHT - 44, (HEIGHT - TOP) / len(self.bars)
        for number, (name, value) in enumerate(self.bars):
            row, colour = TOP + number * high, ORANGE if name in self.ours else GREY
            yield _text(LEFT, row + 14, name)
            yield _box(LEFT, row + 20, round(wide * value, 1), high - 32, colour)
            yield _text(LEFT + wide * value + 6, row + 10 + high / 2, f"{value:.0%}")


def svg(panels: Sequence[Lines | Bars], columns: int = 2) -> str:
    rows = -(-len(panels) // columns)
    wide, high = WIDTH * min(columns, len(panels)), (HEIGHT + 14) * rows
    lines = [
        f'<svg xmlns="{SPACE}" viewBox="0 0 {wide} {high}" width="{wide}" {FONT}>',
        _box(0, 0, wide, high, "#ffffff"),
    ]
    for number, panel in enumerate(panels):
        at = number % columns * WIDTH, number // columns * (HEIGHT + 14)
        lines += [f'<g transform="translate({at[0]} {at[1]})">', *panel.draw(), "</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


def screen(text: str) -> str:
    """A terminal's. XML would join spaces."""
    rows = text.replace(" ", "\u00a0").splitlines()
    wide, high = 20 + round(7.3 * max(map(len, rows))), 20 + 16 * len(rows)
    lines = [
        f'<svg xmlns="{SPACE}" viewBox="0 0 {wide} {high}" width="{wide}" {MONO}>',
        _box(0, 0, wide, high, "#f6f8fa"),
        *(_text(10, 22 + 16 * number, row) for number, row in enumerate(rows) if row),
    ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _unbroken(
    points: Sequence[tuple[float, float | None]],
) -> Iterator[list[tuple[float, float]]]:
    part: list[tuple[float, float]] = []
    for x, y in [*points, (0.0, None)]:
        if y is not None:
            part.append((x, y))
        elif part:
            yield part
            part = []


def _text(
    x: float, y: float, words: str, anchor: str = "start", colour: str = "", bold: bool = False
) -> str:
    more = f' fill="{colour}"' * bool(colour) + ' font-weight="bold"' * bold
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def _box(x: float, y: float, wide: float, high: float, colour: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" fill="{colour}"/>'


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="3" fill="{colour}"/>'


def _path(places: Sequence[tuple[float, float]], colour: str, wide: int, dashes: str = "") -> str:
    points = " ".join(f"{x:g},{y:g}" for x, y in places)
    dashed = f' stroke-dasharray="{dashes}"' * bool(dashes)
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{wide}"{dashed}/>'
    )
