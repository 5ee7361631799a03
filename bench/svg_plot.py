"""Line charts as small SVG files that read well on light and dark pages. Numbers in, text out."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 62, 190, 34, 46
COLORS = ("#2f6fde", "#d9642c", "#2f9e63", "#9a54c8", "#b38600", "#c43d63", "#4f8fa8", "#7a7a7a")
INK, GRID = "#808080", "#80808040"


@dataclass(frozen=True)
class Line:
    """One series; `low` and `high` draw a band (the spread over seeds)."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    color: int = 0
    is_dashed: bool = False


def line_chart(title: str, x_label: str, y_label: str, lines: Sequence[Line], *, y_from: float = 0.0) -> str:
    """The chart as SVG text; the y axis runs from `y_from` to a round number above the largest value."""
    x_low, x_high = min(min(one.xs) for one in lines), max(max(one.xs) for one in lines)
    top = max(max([*one.ys, *one.high]) for one in lines)
    ticks = _ticks(y_from, top)
    x_span, y_span = (x_high - x_low) or 1.0, (ticks[-1] - y_from) or 1.0

    def point(x: float, y: float) -> tuple[float, float]:
        inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + (x - x_low) / x_span * inner_width, HEIGHT - BOTTOM - (
            y - y_from
        ) / y_span * inner_height

    def path(xs: Sequence[float], ys: Sequence[float]) -> str:
        return " ".join(f"{px:.1f},{py:.1f}" for px, py in (point(x, y) for x, y in zip(xs, ys)))

    parts = [_text(LEFT, 20, title, weight="bold")]
    for tick in ticks:
        _, y = point(x_low, tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{tick:g}", anchor="end"))
    for tick in _ticks(x_low, x_high):
        if tick <= x_high:
            parts.append(_text(point(tick, y_from)[0], HEIGHT - BOTTOM + 18, f"{tick:g}", anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, anchor="middle"))
    parts.append(_text(LEFT, TOP - 2 + 10, y_label) if y_label else "")
    for row, one in enumerate(lines):
        color = COLORS[one.color % len(COLORS)]
        if one.low:
            band = path(one.xs, one.high) + " " + path(list(one.xs)[::-1], list(one.low)[::-1])
            parts.append(f'<polygon points="{band}" fill="{color}" opacity="0.15"/>')
        dash = ' stroke-dasharray="5 4"' if one.is_dashed else ""
        parts.append(
            f'<polyline points="{path(one.xs, one.ys)}" fill="none" stroke="{color}" stroke-width="2"{dash}/>'
        )
        y = TOP + 14 + row * 18
        x = WIDTH - RIGHT + 12
        parts.append(
            f'<line x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}" stroke="{color}" stroke-width="2"{dash}/>'
        )
        parts.append(_text(x + 28, y, one.name))
    body = "\n".join(part for part in parts if part)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{INK}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{html.escape(text)}</text>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from `low` to the first at or above `high`."""
    raw = max(high - low, 1e-9) / 5
    size = 10.0 ** (len(f"{int(raw)}") - 1) if raw >= 1 else 1.0
    while size > raw:
        size /= 10
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    count = 0
    while low + count * step < high - 1e-9:
        count += 1
    return [round(low + i * step, 10) for i in range(count + 1)]
