"""The plan as one page that needs nothing else: account, topologies, losses, memory, a simulated timeline."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib import resources

import numpy as np

from rollbook.ledger.account import StepAccount
from rollbook.ledger.memory import train_memory
from rollbook.ledger.step import is_colocated
from rollbook.planner.candidate import Candidate
from rollbook.planner.charts import (
    Row,
    Segment,
    change_bars,
    legend,
    size_chart,
    stacked_rows,
    timeline_chart,
    waterfall_chart,
)
from rollbook.planner.derivation import STEPS_OF_WHAT_FITS
from rollbook.planner.growth import GROWTH_HEAD
from rollbook.planner.offload import HELD
from rollbook.planner.plan import Plan
from rollbook.planner.request import PlanRequest
from rollbook.planner.scenario import scenario_of
from rollbook.planner.sim_result import SimResult
from rollbook.planner.simulate import simulate
from rollbook.planner.waterfall import BETWEEN
from rollbook.planner.words import (
    MODE_TITLES,
    capitalized,
    count,
    counted,
    device_words,
    flop_count,
    format_bytes,
    gpu_hours,
    percent,
    seconds,
    seconds_range,
    split,
    split_gpus,
)

_STAGES = (
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


def html_report(plan: Plan) -> str:
    """A self-contained HTML page. Runs one simulation of the recommended topology."""
    shown = plan.chosen or plan.base
    css = (resources.files("rollbook.planner") / "data" / "report.css").read_text()
    r = plan.request
    title = f"{r.model.name} on {r.cluster.num_gpus} {r.cluster.accelerator.name}"
    if plan.chosen is None:
        # Seconds of a step that can be run nowhere mean nothing: what it takes, and what is too large.
        title += ": nothing fits"
        parts = [_header(plan, title), _memory(plan, shown), _derivation(plan)]
        return _page(plan, title, css, parts)
    parts = [
        _header(plan, title),
        _topologies(plan),
        _waterfall(plan, shown),
        _memory(plan, shown),
        _flops_and_beside(plan),
        _publication(plan),
        _timeline(plan, simulate(scenario_of(r, shown, is_brief=True)), shown),
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
        f"<title>{_e(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n<footer>Written by <code>rollbook plan --html</code>. Predictions carry the range beside them.</footer>\n"
        "</main>\n</body>\n</html>\n"
    )


def _e(text: str) -> str:
    return html.escape(text)


def _section(title: str, lead: str, body: str) -> str:
    return f"<section>\n<h2>{_e(title)}</h2>\n<p>{_e(lead)}</p>\n{body}\n</section>"


def _header(plan: Plan, title: str) -> str:
    work, r = plan.request.workload, plan.request
    lead = (
        f"A step is {counted(work.num_prompts, 'prompt')} x {work.group_size}: {count(work.num_sequences)} "
        f"trajectories with {work.prompt_tokens:.0f} + {work.response_tokens:.0f} tokens on average, responses up to "
        f"{work.max_response_tokens:,}; {work.algorithm.upper()}, reward by {work.reward}, assumptions “"
        f"{r.assumptions.name}”."
    )
    notes = "".join(f'<p class="why">Note: {_e(note)}</p>' for note in plan.warnings)
    chosen = plan.chosen
    if chosen is None:
        changes = "".join(f"<li>{_e(change)}</li>" for change in plan.smallest_changes)
        cards = (
            '<div class="cards"><div class="card bad"><b>Nothing fits</b>'
            f"<span>{_e(plan.choice_because)}</span></div></div>"
            f'<p class="why">Any one of these would make it fit, the smallest first:</p><ul>{changes}</ul>'
        )
        return f"<header><h1>{_e(title)}</h1><p>{_e(lead)}</p></header>{notes}{cards}"
    account = chosen.account
    notes += "".join(f'<p class="why">Note: {_e(note)}.</p>' for note in plan.chosen_notes)
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
        f'<div class="card {kind}"><b>{_e(value)}</b><span>{_e(name)}</span></div>'
        for kind, value, name in numbers
    )
    why = f'<p class="why">{_e(capitalized(plan.choice_because))}.</p>'
    return (
        f'<header><h1>{_e(title)}</h1><p>{_e(lead)}</p></header>{notes}<div class="cards">{boxes}</div>{why}'
    )


# -- topologies


def _topologies(plan: Plan) -> str:
    candidates = _shown(plan)
    most = max(c.step_s for c in candidates)
    rows = [
        Row(
            name=capitalized(c.title),
            note=split_gpus(*c.split, c.mode)
            + ("" if c.fits else ", refused")
            + (", recommended" if c is plan.chosen else ""),
            lanes=_lanes(c.account),
            value=seconds(c.step_s),
            is_strong=c is plan.chosen,
        )
        for c in candidates
    ]
    used = {s.kind for row in rows for lane in row.lanes for s in lane if s.value > 0}
    body = stacked_rows(rows, most=most, label="stages of a step by topology", unit="s")
    body += legend([(kind, name) for kind, name in _STAGES if kind in used])
    refused = [c for c in candidates if not c.fits]
    body += "".join(
        f'<p class="why">Refused: {_e(MODE_TITLES[c.mode])} {split(*c.split, c.mode)}, because {_e(c.why_refused)}.</p>'
        for c in refused
    )
    lead = (
        "Seconds of one step. Shared GPUs have one lane, separated sides two: rollout above, training below. Gray "
        "is waiting."
    )
    return _section("Topologies side by side", lead, body)


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


def _lanes(account: StepAccount) -> tuple[tuple[Segment, ...], ...]:
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
    names = dict(_STAGES)
    left = total_s - sum(value for _, value in parts)
    if left > 1e-3 * total_s:
        parts = [*parts, ("waiting", left)]
    return tuple(
        Segment(kind, value, f"{names[kind]}: {seconds(value)}, {percent(value / total_s)} of the step")
        for kind, value in parts
    )


# -- losses and memory


def _waterfall(plan: Plan, shown: Candidate) -> str:
    losses = plan.chosen_waterfall or plan.base_waterfall
    visible = [loss for loss in losses if loss.frac >= 0.0005]
    columns = [(loss.loss.partition(" ")[0], loss.frac) for loss in visible]
    body = waterfall_chart([(name, name, frac) for name, frac in columns], shown.account.mfu_frac)
    rows = "".join(
        f'<tr><td>{_e(loss.loss)}</td><td class="n">{percent(loss.frac)}</td><td>{_e(loss.why)}</td></tr>'
        for loss in visible
    )
    body += (
        '<div class="scroll"><table><tr><th>loss</th><th class="n">of peak</th><th>why</th></tr>'
        + rows
        + "</table></div>"
    )
    lead = f"From the peak of all GPUs down to the whole-step MFU: {MODE_TITLES[shown.mode]}."
    return _section("Where the peak goes", lead, body)


def _memory(plan: Plan, shown: Candidate) -> str:
    r, rollout = plan.request, shown.account.rollout
    capacity = float(r.cluster.accelerator.hbm_bytes)
    generating, training = device_bytes(r, shown)
    colocated = is_colocated(shown.mode)
    names = (
        ("while training", "while generating")
        if colocated
        else (f"of {counted(shown.split[1], 'training GPU')}", f"of {counted(shown.split[0], 'rollout GPU')}")
    )
    rows = [
        _memory_row("A GPU", names[1], generating, capacity),
        _memory_row("A GPU", names[0], training, capacity),
    ]
    most = max(capacity * 1.02, *(sum(v for _, _, v in parts) for parts in (training, generating)))
    body = stacked_rows(
        rows, most=most, label="memory of a GPU", mark=(capacity, f"{format_bytes(capacity)} capacity")
    )
    named: dict[str, dict[str, None]] = {}
    for kind, name, value in (*generating, *training):
        if value:
            named.setdefault(kind, {})[name] = None
    body += legend([*((kind, " and ".join(of_kind)) for kind, of_kind in named.items()), ("free", "free")])
    pool = format_bytes(rollout.kv_pool_bytes)
    lead = (
        f"Bytes on one GPU against its capacity. The KV pool of a replica ({pool}) holds "
        f"{counted(rollout.slots_per_replica, 'running sequence')}"
        + ("; engine and trainer take turns on the same memory." if colocated else ".")
    )
    if shown.train.is_offloaded:
        lead += f" {capitalized(HELD[shown.train.offload])} stay in host memory."
    return _section("Memory", lead, body)


Owned = list[tuple[str, str, float]]
"""Kind, owner and bytes."""


def device_bytes(request: PlanRequest, shown: Candidate) -> tuple[Owned, Owned]:
    """Who owns which bytes of a GPU that generates, and of one that trains. Under the paper account the state alone
    decides what fits: a micro batch is part of its overhead, and frozen models wait their turn in host memory."""
    rollout, train = shown.account.rollout, shown.account.train
    overhead = request.cluster.accelerator.hbm_bytes * request.assumptions.memory_overhead_frac
    runtime = ("waiting", "runtime and fragmentation", overhead)
    generating = [
        ("weights", "engine weights", rollout.weights_bytes_per_gpu - rollout.judge_bytes_per_gpu),
        ("reference", "reward model", rollout.judge_bytes_per_gpu),
        ("kv", "KV pool", rollout.kv_pool_bytes / shown.rollout_layout.num_gpus),
        runtime,
    ]
    state = train.train_state_bytes_per_gpu + train.critic_state_bytes_per_gpu
    if request.assumptions.method == "paper":
        return generating, [("state", "training state", state), runtime]
    memory = train_memory(
        request.model,
        request.workload,
        shown.train.assumptions,
        num_gpus=train.num_gpus,
        layout=shown.train.layout,
    )
    return generating, [
        ("state", "training state", state + memory.whole),
        ("reference", "reference policy", train.reference_bytes_per_gpu),
        ("reference", "reward model", train.reward_model_bytes_per_gpu),
        ("activations", "activations", memory.activations),
        ("other", "logits and gathered layers", memory.logits + memory.buffers),
        runtime,
    ]


def _memory_row(name: str, note: str, parts: Owned, capacity: float) -> Row:
    used = sum(value for _, _, value in parts)
    segments = [Segment(kind, value, f"{title}: {format_bytes(value)}") for kind, title, value in parts]
    if used < capacity:
        segments.append(Segment("free", capacity - used, f"free: {format_bytes(capacity - used)}"))
    return Row(name=name, note=note, lanes=(tuple(segments),), value=format_bytes(used))


def _flops_and_beside(plan: Plan) -> str:
    flops = plan.base.account.flops
    stages = [(name.replace("_", " "), value) for name, value in flops.as_json().items() if value]
    work = "".join(
        f'<tr><td>{_e(name)}</td><td class="n">{flop_count(value)}</td>'
        f'<td class="n">{percent(value / flops.total)}</td></tr>'
        for name, value in stages
    )
    rows = "".join(
        f"<tr><td>{_e(n.strip())}</td><td>{_e(value)}</td></tr>" for n, value in plan.beside.rows()
    )
    parts = [
        _section("FLOPs of the step", "Model FLOPs, without recomputation.", _scrolled(work)),
        _section("Beside the step", "Not part of the step's seconds.", _scrolled(rows)),
    ]
    for title, lead, lines in (
        ("Memory by owner", "Of one GPU of each role, and of the host beside it.", plan.beside.owners()),
        ("Moves of the hand-overs", "Both ways of a step, on one GPU.", plan.beside.hand_over_rows()),
    ):
        if lines:
            parts.append(_section(title, lead, _scrolled("".join(_line(line) for line in lines))))
    return f'<div class="two">{"".join(parts)}</div>'


def _publication(plan: Plan) -> str:
    """Kinds of tensors, loads of the chosen route, and every route side by side."""
    p = plan.publication
    if p is None:
        return ""
    head = _head("tensors", "trainer", "engine", "bytes", "on an engine GPU")
    kinds = _scrolled(head + "".join(_line(row) for row in p.kind_rows()))
    links = _scrolled("".join(_line(row) for row in p.link_rows()))
    routes = _head("route", "over the scale-up link", "over the network", "bucket memory", "seconds")
    for route in p.mapping.routes:
        at = p.options_s.get(route.route)
        peak = max(route.sender_peak_bytes, route.receiver_peak_bytes)
        cells = (
            route.route.replace("_", " ") + (", chosen" if route.route == p.method else ""),
            *(format_bytes(route.bytes_over(link)) for link in ("scale-up", "network")),
            format_bytes(peak),
            seconds(at) if at is not None else "",
        )
        routes += _line(cells)
    lead = (
        f"{p.sides} {capitalized(p.because)}. Bytes are of the busiest GPU of its role; seconds beside them what the "
        "link alone would take."
    )
    return _section(f"Weight sync: {p.title}", lead, kinds + links + _scrolled(routes))


def _head(*names: str) -> str:
    return "<tr>" + "".join(f"<th>{_e(name)}</th>" for name in names) + "</tr>"


def _line(cells: Sequence[str]) -> str:
    *first, last = (_e(cell) for cell in cells)
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in first) + f'<td class="n">{last}</td></tr>'


def _scrolled(rows: str) -> str:
    return f'<div class="scroll"><table>{rows}</table></div>'


# -- simulation


def _timeline(plan: Plan, result: SimResult, shown: Candidate) -> str:
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
    names = [(k, n) for k, n in (*_STAGES, ("free", "waiting for groups")) if k in used]
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
        f'<div class="card"><b style="font-size:19px">{_e(value)}</b><span>{_e(name)}</span></div>'
        for name, value in cells
    )
    body += "</div>"
    lead = (
        f"An event-by-event simulation of {MODE_TITLES[shown.mode]} on {split_gpus(*shown.split, shown.mode)}: "
        f"{scenario.num_replicas} x {counted(scenario.slots_per_replica, 'slot')}, drawn lengths, "
        f"{counted(scenario.num_steps, 'step')} of which the last are shown."
    )
    return _section("A simulated timeline", lead, body)


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


# -- sizes, sensitivity, derivation, tables


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
            _section("More or fewer GPUs", lead, size_chart(points, here=plan.request.cluster.num_gpus))
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
            _section(
                "What if",
                "Change of the recommended topology's step, everything else equal.",
                change_bars(rows),
            )
        )
    page = f'<div class="two">{"".join(parts)}</div>' if parts else ""
    if plan.growth:
        moments = _head(*GROWTH_HEAD) + "".join(_line(at.cells()) for at in plan.growth)
        lead = (
            f"Responses grow by {percent(plan.request.length_growth_frac)} a step under the same limit. Seconds of a "
            "step: of this plan, and of the best split of each mode."
        )
        page += _section("As responses grow", lead, _scrolled(moments))
    return page


def _derivation(plan: Plan) -> str:
    steps = [d for d in plan.derivation if plan.chosen is not None or d.step in STEPS_OF_WHAT_FITS]
    items = "".join(f'<li value="{d.step}"><h3>{_e(d.title)}</h3><p>{_e(d.because)}</p></li>' for d in steps)
    lead = "Six steps from the workload to the topology. What does not fit is sent back, and says why."
    return _section("How the plan was derived", lead, f'<ol class="steps">{items}</ol>')


def _table(plan: Plan) -> str:
    rows = []
    for c in plan.candidates[:40]:
        idle = c.account.idle_frac
        kind = "chosen" if c is plan.chosen else "" if c.fits else "refused"
        layout = c.rollout_layout
        rows.append(
            f'<tr class="{kind}"><td>{_e(c.title)}</td><td class="n">{split(*c.split, c.mode)}</td>'
            f'<td class="n">{seconds(c.step_s)}</td><td class="n">{percent(c.account.mfu_frac)}</td>'
            f'<td class="n">{percent(idle["rollout"])} / {percent(idle["train"])}</td>'
            f"<td>TP {layout.tp_size}{f', EP {layout.ep_size}' if layout.ep_size > 1 else ''}</td>"
            f"<td>{_e(c.why_refused) if c.why_not else 'fits'}</td></tr>"
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
                f'<tr><td>{_e(name)}</td><td class="n">{entry["value"]:g}</td>'
                f"<td>{_e(str(entry.get('source', '')))}</td></tr>"
            )
    return (
        "<section><details><summary>Assumptions</summary>"
        '<div class="scroll"><table><tr><th>number</th><th class="n">value</th><th>source</th></tr>'
        f"{''.join(rows)}</table></div></details></section>"
    )
