"""The plan as one page that needs nothing else: account, topologies, losses, memory, a simulated timeline."""

from __future__ import annotations

from importlib import resources

from rollbook.planner.charts import change_bars, size_chart
from rollbook.planner.derivation import STEPS_OF_WHAT_FITS
from rollbook.planner.growth import GROWTH_HEAD
from rollbook.planner.plan import Plan
from rollbook.planner.report_costs import (
    flops_and_beside,
    memory_section,
    publication_section,
    waterfall_section,
)
from rollbook.planner.report_html import esc, head_row, scrolled, section, table_row
from rollbook.planner.report_topologies import timeline_section, topologies_section
from rollbook.planner.scenario import scenario_of
from rollbook.planner.simulate import simulate
from rollbook.planner.words import (
    MODE_TITLES,
    capitalized,
    count,
    counted,
    device_words,
    gpu_hours,
    percent,
    seconds,
    seconds_range,
    split,
    split_gpus,
)


def html_report(plan: Plan) -> str:
    """A self-contained HTML page. Runs one simulation of the recommended topology."""
    shown = plan.chosen or plan.base
    css = (resources.files("rollbook.planner") / "data" / "report.css").read_text()
    r = plan.request
    title = f"{r.model.name} on {r.cluster.num_gpus} {r.cluster.accelerator.name}"
    if plan.chosen is None:
        # Seconds of a step that can be run nowhere mean nothing: what it takes, and what is too large.
        title += ": nothing fits"
        parts = [_header(plan, title), memory_section(plan, shown), _derivation(plan)]
        return _page(plan, title, css, parts)
    parts = [
        _header(plan, title),
        topologies_section(plan),
        waterfall_section(plan, shown),
        memory_section(plan, shown),
        flops_and_beside(plan),
        publication_section(plan),
        timeline_section(plan, simulate(scenario_of(r, shown, is_brief=True)), shown),
        _sizes_and_shifts(plan),
        _derivation(plan),
        _table(plan),
    ]
    return _page(plan, title, css, parts)


def _page(plan: Plan, title: str, css: str, parts: list[str]) -> str:
    is_cpu = plan.request.cluster.accelerator.is_cpu
    parts = [device_words(part, is_cpu=is_cpu) for part in parts] + [_assumptions(plan)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{esc(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n<footer>Written by <code>rollbook plan --html</code>. Predictions carry the range beside them.</footer>\n"
        "</main>\n</body>\n</html>\n"
    )


def _header(plan: Plan, title: str) -> str:
    work, r = plan.request.workload, plan.request
    lead = (
        f"A step is {counted(work.num_prompts, 'prompt')} x {work.group_size}: {count(work.num_sequences)} "
        f"trajectories with {work.prompt_tokens:.0f} + {work.response_tokens:.0f} tokens on average, responses up to "
        f"{work.max_response_tokens:,}; {work.algorithm.upper()}, reward by {work.reward}, assumptions “"
        f"{r.assumptions.name}”."
    )
    notes = "".join(f'<p class="why">Note: {esc(note)}</p>' for note in plan.warnings)
    chosen = plan.chosen
    if chosen is None:
        changes = "".join(f"<li>{esc(change)}</li>" for change in plan.smallest_changes)
        cards = (
            '<div class="cards"><div class="card bad"><b>Nothing fits</b>'
            f"<span>{esc(plan.choice_because)}</span></div></div>"
            f'<p class="why">Any one of these would make it fit, the smallest first:</p><ul>{changes}</ul>'
        )
        return f"<header><h1>{esc(title)}</h1><p>{esc(lead)}</p></header>{notes}{cards}"
    account = chosen.account
    notes += "".join(f'<p class="why">Note: {esc(note)}.</p>' for note in plan.chosen_notes)
    low, high = account.step_s.low, account.step_s.high
    span = seconds_range(low, high) if high > 1.001 * low else "a step"
    tokens_per_s = work.trained_tokens / chosen.step_s / r.cluster.num_gpus
    sides, gpus = split_gpus(*chosen.split, chosen.mode).rsplit(" ", 1)
    numbers = [
        ("main", seconds(chosen.step_s), f"a step ({span})" if span != "a step" else span),
        ("", capitalized(sides), f"{gpus}, {MODE_TITLES[chosen.mode]}"),
        ("", percent(account.mfu_frac), "whole-step MFU of the bfloat16 peak"),
        ("", count(tokens_per_s), "tokens a second and GPU, prompts included"),
        ("", gpu_hours(chosen.step_s * r.cluster.num_gpus), "GPU hours a step"),
    ]
    boxes = "".join(
        f'<div class="card {kind}"><b>{esc(value)}</b><span>{esc(name)}</span></div>'
        for kind, value, name in numbers
    )
    why = f'<p class="why">{esc(capitalized(plan.choice_because))}.</p>'
    return f'<header><h1>{esc(title)}</h1><p>{esc(lead)}</p></header>{notes}<div class="cards">{boxes}</div>{why}'


def _sizes_and_shifts(plan: Plan) -> str:
    parts = []
    fitting = [(s.num_gpus, s.best) for s in plan.sizes if s.best is not None]
    if len(fitting) > 1:
        points = [
            (
                n,
                best.step_s,
                f"{counted(n, 'GPU')}, {MODE_TITLES[best.mode]} {split(*best.split, best.mode)}: "
                f"{seconds(best.step_s)}, "
                f"{gpu_hours(best.step_s * n)} GPU hours",
            )
            for n, best in fitting
        ]
        small = [s.num_gpus for s in plan.sizes if s.best is None]
        lead = "Best step time on other numbers of GPUs, both axes logarithmic."
        if small:
            lead += f" Does not fit on {', '.join(map(str, small))}."
        parts.append(
            section("More or fewer GPUs", lead, size_chart(points, here=plan.request.cluster.num_gpus))
        )
    if plan.shifts:
        rows = []
        for shift in plan.shifts:
            note = seconds(shift.step_s) if shift.step_s is not None else ""
            if shift.moves and shift.best is not None:
                best = split(*shift.best.split, shift.best.mode)
                note += f"; then better: {MODE_TITLES[shift.best.mode]} {best}, {seconds(shift.best.step_s)}"
            rows.append((capitalized(shift.change), shift.change_frac, note))
        parts.append(
            section(
                "What if",
                "Change of the recommended topology's step, everything else equal.",
                change_bars(rows),
            )
        )
    page = f'<div class="two">{"".join(parts)}</div>' if parts else ""
    if plan.growth:
        moments = head_row(*GROWTH_HEAD) + "".join(table_row(at.cells()) for at in plan.growth)
        lead = (
            f"Responses grow by {percent(plan.request.length_growth_frac)} a step under the same limit. Seconds of a "
            "step: of this plan, and of the best split of each mode."
        )
        page += section("As responses grow", lead, scrolled(moments))
    return page


def _derivation(plan: Plan) -> str:
    steps = [d for d in plan.derivation if plan.chosen is not None or d.step in STEPS_OF_WHAT_FITS]
    items = "".join(
        f'<li value="{d.step}"><h3>{esc(d.title)}</h3><p>{esc(d.because)}</p></li>' for d in steps
    )
    lead = "Six steps from the workload to the topology. What does not fit is sent back, and says why."
    return section("How the plan was derived", lead, f'<ol class="steps">{items}</ol>')


def _table(plan: Plan) -> str:
    rows = []
    for c in plan.candidates[:40]:
        idle = c.account.idle_frac
        kind = "chosen" if c is plan.chosen else "" if c.fits else "refused"
        layout = c.rollout_layout
        rows.append(
            f'<tr class="{kind}"><td>{esc(c.title)}</td><td class="n">{split(*c.split, c.mode)}</td>'
            f'<td class="n">{seconds(c.step_s)}</td><td class="n">{percent(c.account.mfu_frac)}</td>'
            f'<td class="n">{percent(idle["rollout"])} / {percent(idle["train"])}</td>'
            f"<td>TP {layout.tp_size}{f', EP {layout.ep_size}' if layout.ep_size > 1 else ''}</td>"
            f"<td>{esc(c.why_refused) if c.why_not else 'fits'}</td></tr>"
        )
    head = (
        '<tr><th>mode</th><th class="n">GPUs</th><th class="n">step</th><th class="n">MFU</th>'
        '<th class="n">idle, rollout / training</th><th>replica</th><th></th></tr>'
    )
    more = len(plan.candidates) - len(rows)
    note = f'<p class="why">And {more} more.</p>' if more > 0 else ""
    return (
        "<section><details><summary>All topologies</summary>"
        f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>{note}</details></section>'
    )


def _assumptions(plan: Plan) -> str:
    rows = []
    for name, entry in plan.request.assumptions.as_json().items():
        if isinstance(entry, dict) and isinstance(entry.get("value"), int | float):
            rows.append(
                f'<tr><td>{esc(name)}</td><td class="n">{entry["value"]:g}</td>'
                f"<td>{esc(str(entry.get('source', '')))}</td></tr>"
            )
    return (
        "<section><details><summary>Assumptions</summary>"
        '<div class="scroll"><table><tr><th>number</th><th class="n">value</th><th>source</th></tr>'
        f"{''.join(rows)}</table></div></details></section>"
    )
