"""A diagnosis as one page: the report, and small pictures of the series around each change. No scripts, no network."""

from __future__ import annotations

import html
from collections.abc import Iterable

import numpy as np

from rollbook.diagnose.finding import Diagnosis, Evidence, Finding
from rollbook.diagnose.report import AREA_NAMES, headline, other_run
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import in_full, num

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1f23; --paper: #ffffff; --faint: #6a7178; --line: #d5d9de;
  --series: #2563a8; --mark: #b4441c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #16181b; --faint: #9aa1a8; --line: #3a3f45;
  --series: #7ab0e8; --mark: #f0936b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 46rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
p, dd { margin: .2rem 0; } .faint { color: var(--faint); } code { font-size: .9em; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; } td { border-top: 1px solid var(--line); padding: .3rem .6rem .3rem 0;
  vertical-align: top; } svg { display: block; width: 100%; height: auto; margin: .2rem 0 .8rem; }
.line { fill: none; stroke: var(--series); stroke-width: 1.5; } .at { stroke: var(--mark); stroke-dasharray: 4 3; }
.frame { fill: none; stroke: var(--line); } text { font: 11px system-ui, sans-serif; fill: var(--faint); }
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 110, 62, 18
MAX_DRAWN = 400
"""Points of a picture; a longer series is drawn by the medians of its blocks."""


def to_html(diagnosis: Diagnosis, view: View) -> str:
    """The page as a string."""
    parts = [
        f"<p class=faint>{_e(diagnosis.source)} · {_e(diagnosis.format)} · steps {diagnosis.first_step} to "
    ]
    parts.append(f"{diagnosis.last_step}</p>")
    for i, finding in enumerate(diagnosis.findings):
        parts.append(_finding(finding, view, "h1" if i == 0 else "h2"))
    if diagnosis.is_well:
        words = headline(diagnosis)[1]
        parts.append(f"<h1>{_e(words[:1].upper() + words[1:])}</h1>")
    if diagnosis.other_runs:
        parts.append("<h2>Beside it</h2><table>")
        parts += [
            f"<tr><td>{_e(label)}<td>{_e(says)}" for label, says in map(other_run, diagnosis.other_runs)
        ]
        parts.append("</table>")
    parts.append("<h2>The four signals</h2><table>")
    parts += [f"<tr><td>{_e(s.name)}<td>{_e(s.verdict)}<td>{_e(s.says)}" for s in diagnosis.signals]
    parts.append("</table>")
    for state in diagnosis.states:
        parts.append(f"<h2>{_e(state.title)}</h2><p class=faint>since step {state.step}</p>")
        parts.append(_evidence(state.evidence, view))
        parts.append(f"<p>{_e(state.advice)}</p>")
    if diagnosis.consequences:
        parts.append("<h2>What follows from it</h2><table>")
        parts += [f"<tr><td>step {f.step}<td>{_e(f.title)}" for f in diagnosis.consequences]
        parts.append("</table>")
    if diagnosis.not_judged:
        parts.append("<h2>Could not be judged</h2><table>")
        parts += [f"<tr><td><code>{_e(n.rule)}</code><td>{_e(n.collect)}" for n in diagnosis.not_judged]
        parts.append("</table>")
    if diagnosis.notes:
        parts.append("<h2>About the log</h2>" + "".join(f"<p>{_e(note)}</p>" for note in diagnosis.notes))
    title = diagnosis.findings[0].title if diagnosis.findings else headline(diagnosis)[1]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{_e(title)}</title><style>{_STYLE}</style><body>" + "\n".join(parts) + "</body></html>\n"
    )


def _finding(finding: Finding, view: View, tag: str) -> str:
    until = f" until step {finding.until_step}" if finding.until_step is not None else ""
    about = f"{finding.rule} · since step {finding.step}{until} · confidence {finding.confidence:.2f}"
    about += f" · {AREA_NAMES[finding.area]}"
    if finding.cost_s:
        about += f" · {num(finding.cost_s)} s lost so far"
    if finding.cost_reward:
        about += f" · {num(finding.cost_reward)} of mean reward lost"
    return (
        f"<{tag}>{_e(finding.title)}</{tag}><p class=faint>{_e(about)}</p>"
        f"<p><b>Do:</b> {_e(finding.action)}</p><p><b>Next check:</b> {_e(finding.next_check)}</p>"
        + _evidence(finding.evidence, view)
    )


def _evidence(evidence: Iterable[Evidence], view: View) -> str:
    return "".join(
        f"<p><code>{_e(label)}</code> {_e(says)}</p>{_picture(view, item)}"
        for item, (label, says) in ((item, in_full(item)) for item in evidence)
    )


def _picture(view: View, item: Evidence) -> str:
    """The series as an inline drawing, with a mark at the step of the evidence."""
    values = view.values.get(item.metric)
    if values is None:
        return ""
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < 3:
        return ""
    steps, shown = view.steps[known], values[known]
    block = -(-len(known) // MAX_DRAWN)
    if block > 1:
        whole = len(known) // block * block
        steps, shown = steps[:whole:block], np.median(shown[:whole].reshape(-1, block), axis=1)
    low, high = float(shown.min()), float(shown.max())
    span, length = (high - low) or 1.0, (float(steps[-1] - steps[0])) or 1.0
    x = _LEFT + (steps - steps[0]) / length * (_WIDTH - _LEFT - 6)
    y = 6 + (high - shown) / span * (_HEIGHT - _BOTTOM - 8)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    at = _LEFT + (min(max(item.step, steps[0]), steps[-1]) - steps[0]) / length * (_WIDTH - _LEFT - 6)
    label = _e(f"{item.in_log or item.metric}: {item.says}")
    return (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img aria-label='{label}'>"
        f"<rect class=frame x={_LEFT} y=2 width={_WIDTH - _LEFT - 2} height={_HEIGHT - _BOTTOM} />"
        f"<line class=at x1={at:.1f} x2={at:.1f} y1=2 y2={_HEIGHT - _BOTTOM + 2} />"
        f"<polyline class=line points='{points}' />"
        f"<text x={_LEFT - 6} y=13 text-anchor=end>{num(high)}</text>"
        f"<text x={_LEFT - 6} y={_HEIGHT - _BOTTOM} text-anchor=end>{num(low)}</text>"
        f"<text x={_LEFT} y={_HEIGHT - 3}>step {int(steps[0])}</text>"
        f"<text x={_WIDTH - 4} y={_HEIGHT - 3} text-anchor=end>{int(steps[-1])}</text>"
        f"<text x={at + 4:.1f} y={_HEIGHT - 3}>{item.step}</text></svg>"
    )


def _e(text: str) -> str:
    return html.escape(text, quote=True)
