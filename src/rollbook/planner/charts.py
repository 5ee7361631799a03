"""Charts as inline SVG: plain functions from numbers to text, colored by classes of the page's style sheet.

Every chart is `WIDTH` units wide and scales with the page. A mark carries its number in a tooltip.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.planner.words import percent, seconds

WIDTH = 1000
_LABEL = 250
"""Left margin with the names of rows."""
_RIGHT = 110
"""Right margin with the values of rows."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a stacked bar; `kind` is a color of the style sheet."""

    kind: str
    value: float
    title: str


@dataclass(frozen=True, slots=True)
class Row:
    """A named bar of segments, in the order they are drawn."""

    name: str
    note: str
    lanes: tuple[tuple[Segment, ...], ...]
    """One lane, or one for each side."""
    value: str
    is_strong: bool = False


def _svg(height: float, body: str, label: str) -> str:
    name = html.escape(label, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{name}">{body}</svg>'


def _text(x: float, y: float, text: str, classes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}">{html.escape(text)}</text>'


def _rect(
    x: float, y: float, width: float, height: float, kind: str, title: str, *, radius: float = 2
) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.8):.1f}" height="{height:.1f}" rx="{radius:g}" '
        f'style="fill:var(--{kind})"><title>{html.escape(title)}</title></rect>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, classes: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{classes}"/>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(color, name) pairs below a chart."""
    items = "".join(
        f'<li><i style="background:var(--{kind})"></i>{html.escape(name)}</li>' for kind, name in entries
    )
    return f'<ul class="legend">{items}</ul>'


def nice_ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from 0 up to `most`.

    >>> nice_ticks(870.0)
    [0.0, 200.0, 400.0, 600.0, 800.0]
    """
    if most <= 0:
        return [0.0]
    raw = most / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw)
    return [float(step * i) for i in range(math.floor(most / step) + 1)]


def stacked_rows(
    rows: Sequence[Row], *, most: float, label: str, unit: str = "", mark: tuple[float, str] | None = None
) -> str:
    """Rows of stacked bars on a common scale. One lane fills the row, two lanes share it.

    Args:
        most: value at the right end.
        unit: of the scale below; empty: no scale.
        mark: a dashed line at this value, with its name.
    """
    top, row, gap, lane_gap = 24.0, 38.0, 16.0, 3.0
    span = WIDTH - _LABEL - _RIGHT
    bottom = top + len(rows) * (row + gap) - gap
    body = ""
    for tick in nice_ticks(most) if unit else ():
        x = _LABEL + span * tick / most
        body += _line(x, top - 8, x, bottom + 8, "grid")
        body += _text(x, bottom + 26, f"{tick:,.0f} {unit}" if tick else "0", "soft mid")
    for i, entry in enumerate(rows):
        y = top + i * (row + gap)
        strong = " strong" if entry.is_strong else ""
        body += _text(0, y + row / 2 - 3, entry.name, strong.strip()) + _text(
            0, y + row / 2 + 15, entry.note, "soft"
        )
        height = (row - lane_gap * (len(entry.lanes) - 1)) / len(entry.lanes)
        for k, segments in enumerate(entry.lanes):
            x = float(_LABEL)
            for segment in segments:
                width = span * segment.value / most
                if segment.value > 0:
                    lane_y = y + k * (height + lane_gap)
                    body += _rect(x, lane_y, width - 0.8, height, segment.kind, segment.title)
                x += width
        body += _text(WIDTH, y + row / 2 + 5, entry.value, "end" + strong)
    if mark is not None:
        x = _LABEL + span * mark[0] / most
        body += _line(x, 12, x, bottom + 8, "mark") + _text(x - 6, 12, mark[1], "soft end")
    return _svg(bottom + (34 if unit else 12), body, label)


def waterfall_chart(losses: Sequence[tuple[str, str, float]], useful_frac: float) -> str:
    """Columns from the whole peak down to what is useful: (kind, name, share of the peak)."""
    columns = [("waiting", "peak", 1.0), *losses, ("useful", "useful", useful_frac)]
    height, top, bottom = 330.0, 28.0, 44.0
    plot = height - top - bottom
    slot = (WIDTH - 50) / len(columns)
    width = min(slot * 0.68, 92)
    body, level = "", 1.0
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = top + plot * (1 - tick)
        body += _line(46, y, WIDTH, y, "grid") + _text(40, y + 4, f"{100 * tick:.0f} %", "soft end")
    for i, (kind, name, frac) in enumerate(columns):
        x = 50 + slot * (i + 0.5)
        is_end = i in (0, len(columns) - 1)
        high = frac if is_end else level
        y = top + plot * (1 - high)
        body += _rect(
            x - width / 2, y, width, max(plot * frac, 1.2), kind, f"{name}: {percent(frac)}", radius=3
        )
        body += _text(x, y - 7, percent(frac), "mid strong" if is_end else "mid")
        body += _text(x, height - 22, name, "mid" + (" strong" if is_end else ""))
        if not is_end:
            level -= frac
        if i < len(columns) - 1:
            y = top + plot * (1 - level)
            body += _line(x + width / 2, y, x + slot - width / 2, y, "axis")
    return _svg(height, body, "shares of the peak lost by stage")


def timeline_chart(
    at_s: NDArray[np.float64],
    share: NDArray[np.float64],
    bars: Sequence[tuple[str, str, float, float]],
    steps: Sequence[tuple[str, float]],
    *,
    start_s: float,
    end_s: float,
) -> str:
    """Live sequences over time as an area, and the trainer's work below it.

    Args:
        at_s, share: [n] times and the share of slots in use.
        bars: (kind, name, start, end) of the trainer.
        steps: (name, start) of each step.
    """
    left, top, plot, lane = 132.0, 26.0, 150.0, 30.0
    span = WIDTH - left

    def x_of(t: float) -> float:
        return left + span * (t - start_s) / (end_s - start_s)

    points = " ".join(f"{x_of(t):.1f},{top + plot * (1 - v):.1f}" for t, v in zip(at_s, share, strict=True))
    body = ""
    for tick in (0.0, 0.5, 1.0):
        y = top + plot * (1 - tick)
        body += _line(left, y, WIDTH, y, "grid") + _text(left - 8, y + 4, f"{100 * tick:.0f} %", "soft end")
    body += f'<polygon class="area" points="{left:.1f},{top + plot:.1f} {points} {WIDTH},{top + plot:.1f}"/>'
    body += _text(0, top + plot / 2 + 5, "engines")
    y = top + plot + 16
    body += _text(0, y + lane / 2 + 5, "trainer")
    for kind, name, from_s, to_s in bars:
        x, to = x_of(max(from_s, start_s)), x_of(min(to_s, end_s))
        if to > x:
            body += _rect(x, y, to - x - 0.5, lane, kind, f"{name}: {seconds(to_s - from_s)}")
    for name, t in steps:
        x = x_of(t)
        body += _line(x, top - 12, x, y + lane + 6, "axis") + _text(x + 5, top - 6, name, "soft")
    ticks = nice_ticks(end_s - start_s, 6)
    for tick in ticks:
        x = x_of(start_s + tick)
        body += _text(
            x, y + lane + 24, f"{tick:,.0f} s" if tick >= 10 or tick == 0 else f"{tick:g} s", "soft mid"
        )
    return _svg(y + lane + 32, body, "live sequences and the trainer over simulated steps")


def size_chart(points: Sequence[tuple[int, float, str]], *, here: int) -> str:
    """Step time against GPUs, both logarithmic: (GPUs, step seconds, tooltip)."""
    width, left, right, top, height = 480.0, 58.0, 34.0, 26.0, 280.0
    plot = height - top - 40
    logs = [(math.log2(n), math.log10(s)) for n, s, _ in points]
    low_x, high_x = min(x for x, _ in logs), max(x for x, _ in logs)
    low_y, high_y = min(y for _, y in logs), max(y for _, y in logs)
    span_x, span_y = max(high_x - low_x, 1e-9), max(high_y - low_y, 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (width - left - right) * (x - low_x) / span_x,
            top + 14 + (plot - 14) * (1 - (y - low_y) / span_y),
        )

    placed = [place(x, y) for x, y in logs]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    body = _line(left, top + plot + 8, width, top + plot + 8, "axis")
    body += f'<polyline class="curve" points="{path}"/>'
    for (x, y), (num_gpus, step_s, tip) in zip(placed, points, strict=True):
        is_here = num_gpus == here
        body += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" class="dot{" here" * is_here}">'
        body += f"<title>{html.escape(tip)}</title></circle>"
        body += _text(x, y - 12, seconds(step_s), "mid strong" if is_here else "soft mid")
        body += _text(x, top + plot + 26, str(num_gpus), "mid strong" if is_here else "soft mid")
    name = "step time against GPUs"
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{name}">{body}</svg>'


def change_bars(rows: Sequence[tuple[str, float | None, str]]) -> str:
    """Changes of the step as bars from zero: (name, relative change, note)."""
    width, lane = 480.0, 82.0
    most = max([0.25, *(abs(change) for _, change, _ in rows if change is not None)])
    zero = 62.0
    span = width - zero
    body = ""
    for i, (name, change, note) in enumerate(rows):
        y = i * lane
        body += _text(0, y + 16, name)
        if change is None:
            body += _text(0, y + 40, "no longer fits", "bad")
            continue
        kind = "tail" if change > 0 else "useful"
        body += _rect(zero, y + 26, span * abs(change) / most, 17, kind, f"{100 * change:+.1f} %")
        body += _text(zero - 8, y + 40, f"{100 * change:+.0f} %", "end")
        body += _text(zero, y + 61, note, "soft")
    height = lane * len(rows)
    name = "change of the step under changed assumptions"
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{name}">{body}</svg>'
