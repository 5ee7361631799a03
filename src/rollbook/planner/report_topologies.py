"""Sections of the page about time: topologies side by side, and a simulated timeline."""

from __future__ import annotations

import numpy as np

from rollbook.ledger.account import StepAccount
from rollbook.ledger.step import is_colocated
from rollbook.planner.candidate import Candidate
from rollbook.planner.charts import Row, Segment, legend, stacked_rows, timeline_chart
from rollbook.planner.plan import Plan
from rollbook.planner.report_html import esc, section
from rollbook.planner.sim_result import SimResult
from rollbook.planner.waterfall import BETWEEN
from rollbook.planner.words import (
    MODE_TITLES,
    capitalized,
    counted,
    percent,
    seconds,
    seconds_range,
    split,
    split_gpus,
)

STAGES = (
    ("decode", "decode, slots full"),
    ("tail", "decode, tail"),
    ("prefill", "prefill"),
    ("forward", "forward passes"),
    ("train", "training"),
    ("switch", "hand-over"),
    ("sync", "weight sync"),
    ("environment", "environments"),
    ("reward", "rewards by a model"),
    ("between", BETWEEN),
    ("bound", "held by the staleness bound"),
    ("waiting", "waiting"),
)


_MOST_TOPOLOGIES = 7


def topologies_section(plan: Plan) -> str:
    """The fastest topologies, stage by stage, and what was refused."""
    candidates = _shown(plan)
    most = max(c.step_s for c in candidates)
    rows = [
        Row(
            name=capitalized(c.title),
            note=split_gpus(*c.split, c.mode)
            + ("" if c.fits else ", refused")
            + (", recommended" if c is plan.chosen else ""),
            lanes=lanes(c.account),
            value=seconds(c.step_s),
            is_strong=c is plan.chosen,
        )
        for c in candidates
    ]
    used = {s.kind for row in rows for lane in row.lanes for s in lane if s.value > 0}
    body = stacked_rows(rows, most=most, label="stages of a step by topology", unit="s")
    body += legend([(kind, name) for kind, name in STAGES if kind in used])
    refused = [c for c in candidates if not c.fits]
    body += "".join(
        f'<p class="why">Refused: {esc(MODE_TITLES[c.mode])} {split(*c.split, c.mode)}, because '
        f"{esc(c.why_refused)}.</p>"
        for c in refused
    )
    lead = (
        "Seconds of one step. Shared GPUs have one lane, separated sides two: rollout above, training below. Gray "
        "is waiting."
    )
    return section("Topologies side by side", lead, body)


def _shown(plan: Plan) -> list[Candidate]:
    """The best of each mode, the fastest that fit, and the two fastest that were refused."""
    fitting = [c for c in plan.candidates if c.fits]
    best = [next((c for c in fitting if c.mode == mode), None) for mode in MODE_TITLES]
    kept = [c for c in best if c is not None]
    kept += [c for c in fitting if c not in kept][: max(_MOST_TOPOLOGIES - len(kept), 0)]
    possible = [c for c in plan.candidates if not c.fits and c.split[0] >= c.rollout_layout.num_gpus]
    slowest = max((c.step_s for c in kept), default=float("inf"))
    kept += [c for c in possible if c.step_s <= slowest][:2]
    return sorted(kept or list(plan.candidates[:_MOST_TOPOLOGIES]), key=lambda c: (not c.fits, c.step_s))


def lanes(account: StepAccount) -> tuple[tuple[Segment, ...], ...]:
    s = account.seconds
    rollout = [
        ("prefill", s.prefill),
        ("decode", s.generate_throughput),
        ("tail", s.generate_tail),
        ("environment", s.env if account.mode != "separate_async" else 0.0),
        ("reward", s.reward),
    ]
    train = [("forward", s.forward), ("train", s.train)]
    ends = [("sync", 0.0 if account.overlaps_sync else s.sync), ("between", s.other)]
    if is_colocated(account.mode):
        bound = ("bound", account.bound_s)
        return (_segments([*rollout, bound, ("switch", s.switch), *train, *ends], s.total),)
    rollout_s, train_s = (sum(value for _, value in side) for side in (rollout, train))
    if account.mode == "separate_sync":
        return (
            _segments([*rollout, ("waiting", train_s), *ends], s.total),
            _segments([("waiting", rollout_s), *train, *ends], s.total),
        )
    side = account.rollout
    held_s = (1 - account.idle_frac["rollout"]) * s.total * side.num_gpus / side.used_gpus
    rollout.append(("tail", max(held_s - rollout_s, 0.0)))  # engines ahead run few sequences
    return _segments([*rollout, *ends], s.total), _segments([*train, *ends], s.total)


def _segments(parts: list[tuple[str, float]], total_s: float) -> tuple[Segment, ...]:
    names = dict(STAGES)
    left = total_s - sum(value for _, value in parts)
    if left > 1e-3 * total_s:
        parts = [*parts, ("waiting", left)]
    return tuple(
        Segment(kind, value, f"{names[kind]}: {seconds(value)}, {percent(value / total_s)} of the step")
        for kind, value in parts
    )


def timeline_section(plan: Plan, result: SimResult, shown: Candidate) -> str:
    """Slots and the trainer in the last steps of a simulation."""
    scenario = result.scenario
    cycle = scenario.staleness_bound + 1
    steps = result.steps[-max(2, cycle) :]
    start_s, end_s = steps[0].start_s, steps[-1].end_s
    at, share = _live_share(result, start_s, end_s)
    kinds = {"gather": "between", "drain": "waiting", "wait": "free"}
    bars = [
        (kinds.get(i.name, i.name), i.name, i.start_s, i.end_s)
        for i in result.intervals
        if i.lane == "trainer" and i.end_s > start_s
    ]
    body = timeline_chart(
        at, share, bars, [(f"step {s.step}", s.start_s) for s in steps], start_s=start_s, end_s=end_s
    )
    used = {kind for kind, *_ in bars}
    names = [(k, n) for k, n in (*STAGES, ("free", "waiting for groups")) if k in used]
    body += legend([("decode", "slots that decode"), *names])
    span = result.step_range(shown.account.step_s)
    cells = [
        ("step, simulated", seconds(result.step_s)),
        ("its range", seconds_range(span.low, span.high)),
        ("step, closed form", seconds(shown.step_s)),
        ("rollout GPUs idle", percent(result.rollout_idle_frac)),
        ("training GPUs idle", percent(result.train_idle_frac)),
        ("slots decoding while busy", percent(result.occupancy_frac)),
        ("tail", seconds(result.tail_s)),
    ]
    ages = ", ".join(
        f"{age}: {percent(n / sum(result.staleness.values()))}" for age, n in result.staleness.items()
    )
    if scenario.staleness_bound:
        cells.append(("staleness in versions", ages))
    body += '<div class="cards">' + "".join(
        f'<div class="card"><b style="font-size:19px">{esc(value)}</b><span>{esc(name)}</span></div>'
        for name, value in cells
    )
    body += "</div>"
    lead = (
        f"An event-by-event simulation of {MODE_TITLES[shown.mode]} on {split_gpus(*shown.split, shown.mode)}: "
        f"{scenario.num_replicas} x {counted(scenario.slots_per_replica, 'slot')}, drawn lengths, "
        f"{counted(scenario.num_steps, 'step')} of which the last are shown."
    )
    return section("A simulated timeline", lead, body)


def _live_share(
    result: SimResult, start_s: float, end_s: float
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Share of slots that decode at 400 times; 0 while a colocated trainer holds the GPUs."""
    scenario = result.scenario
    at = np.linspace(start_s, end_s, 400)
    index = np.clip(np.searchsorted(result.curve_at_s, at, side="right") - 1, 0, len(result.curve_at_s) - 1)
    share = result.curve_live[index] / (scenario.num_replicas * scenario.slots_per_replica)
    if is_colocated(scenario.mode):
        for interval in result.intervals:
            if interval.lane == "trainer" and interval.name != "wait":
                share = np.where((at >= interval.start_s) & (at < interval.end_s), 0.0, share)
    return at, np.clip(share, 0.0, 1.0)
