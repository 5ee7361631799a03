"""Sections of the page about what a step costs: losses, memory, FLOPs, the publication."""

from __future__ import annotations

from rollbook.ledger.step import is_colocated
from rollbook.planner.candidate import Candidate
from rollbook.planner.charts import Row, Segment, legend, stacked_rows, waterfall_chart
from rollbook.planner.idling import has_choice, memory_of, sharing_words
from rollbook.planner.offload import HELD
from rollbook.planner.plan import Plan
from rollbook.planner.report_html import esc, head_row, scrolled, section, table_row
from rollbook.planner.request import PlanRequest
from rollbook.planner.words import (
    MODE_TITLES,
    capitalized,
    counted,
    flop_count,
    format_bytes,
    percent,
    seconds,
)


def waterfall_section(plan: Plan, shown: Candidate) -> str:
    """From the peak down to the whole-step MFU."""
    losses = plan.chosen_waterfall or plan.base_waterfall
    visible = [loss for loss in losses if loss.frac >= 0.0005]
    columns = [(loss.loss.partition(" ")[0], loss.frac) for loss in visible]
    body = waterfall_chart([(name, name, frac) for name, frac in columns], shown.account.mfu_frac)
    rows = "".join(
        f'<tr><td>{esc(loss.loss)}</td><td class="n">{percent(loss.frac)}</td><td>{esc(loss.why)}</td></tr>'
        for loss in visible
    )
    body += (
        '<div class="scroll"><table><tr><th>loss</th><th class="n">of peak</th><th>why</th></tr>'
        + rows
        + "</table></div>"
    )
    lead = f"From the peak of all GPUs down to the whole-step MFU: {MODE_TITLES[shown.mode]}."
    return section("Where the peak goes", lead, body)


def memory_section(plan: Plan, shown: Candidate) -> str:
    """Bytes on one GPU of each role."""
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
    pool, sharing = format_bytes(rollout.kv_pool_bytes), sharing_words(shown)
    lead = (
        f"Bytes on one GPU against its capacity. The KV pool of a replica ({pool}) holds "
        f"{counted(rollout.slots_per_replica, 'running sequence')}"
        + ("; engine and trainer take turns on the same memory." if colocated and not sharing else ".")
        + (f" {capitalized(sharing)}." if sharing else "")
    )
    if shown.train.is_offloaded:
        lead += f" {capitalized(HELD[shown.train.offload])} stay in host memory."
    return section("Memory", lead, body)


Owned = list[tuple[str, str, float]]
"""Kind, owner and bytes."""


def device_bytes(request: PlanRequest, shown: Candidate) -> tuple[Owned, Owned]:
    """Who owns which bytes of a GPU that generates, and of one that trains. Under the paper account the state alone
    decides what fits: a micro batch is part of its overhead, and frozen models wait their turn in host memory."""
    rollout, train = shown.account.rollout, shown.account.train
    is_shared = is_colocated(shown.mode) and has_choice(request)
    overhead = request.cluster.accelerator.hbm_bytes * request.assumptions.memory_overhead_frac
    runtime = ("waiting", "runtime and fragmentation", overhead)
    engine = [
        ("weights", "engine weights", rollout.weights_bytes_per_gpu - rollout.judge_bytes_per_gpu),
        ("reference", "reward model", rollout.judge_bytes_per_gpu),
        ("kv", "KV pool", rollout.kv_pool_bytes / shown.rollout_layout.num_gpus),
    ]
    state = train.train_state_bytes_per_gpu + train.critic_state_bytes_per_gpu
    if request.assumptions.method == "paper":
        return [*engine, runtime], [("state", "training state", state), runtime]
    memory = memory_of(request, shown.train)
    held = [
        ("state", "training state", state + memory.whole),
        ("reference", "reference policy", train.reference_bytes_per_gpu),
        ("reference", "reward model", train.reward_model_bytes_per_gpu),
    ]
    work = [
        ("activations", "activations", memory.activations),
        ("other", "logits and gathered layers", memory.logits + memory.buffers),
    ]
    stays, is_awake = is_shared and not shown.sleep.moves_state, is_shared and shown.sleep.sleep_level == 0
    generating = [*engine, *(held if stays else []), runtime]
    return generating, [*held, *work, *(engine if is_awake else []), runtime]


def _memory_row(name: str, note: str, parts: Owned, capacity: float) -> Row:
    used = sum(value for _, _, value in parts)
    segments = [Segment(kind, value, f"{title}: {format_bytes(value)}") for kind, title, value in parts]
    if used < capacity:
        segments.append(Segment("free", capacity - used, f"free: {format_bytes(capacity - used)}"))
    return Row(name=name, note=note, lanes=(tuple(segments),), value=format_bytes(used))


def flops_and_beside(plan: Plan) -> str:
    """FLOPs of the step, and what stands beside its seconds."""
    flops = plan.base.account.flops
    stages = [(name.replace("_", " "), value) for name, value in flops.as_json().items() if value]
    work = "".join(
        f'<tr><td>{esc(name)}</td><td class="n">{flop_count(value)}</td>'
        f'<td class="n">{percent(value / flops.total)}</td></tr>'
        for name, value in stages
    )
    rows = "".join(
        f"<tr><td>{esc(n.strip())}</td><td>{esc(value)}</td></tr>" for n, value in plan.beside.rows()
    )
    parts = [
        section("FLOPs of the step", "Model FLOPs, without recomputation.", scrolled(work)),
        section("Beside the step", "Not part of the step's seconds.", scrolled(rows)),
    ]
    for title, lead, lines in (
        ("Memory by owner", "Of one GPU of each role, and of the host beside it.", plan.beside.owners()),
        ("Moves of the hand-overs", "Both ways of a step, on one GPU.", plan.beside.hand_over_rows()),
    ):
        if lines:
            parts.append(section(title, lead, scrolled("".join(table_row(line) for line in lines))))
    return f'<div class="two">{"".join(parts)}</div>'


def publication_section(plan: Plan) -> str:
    """Kinds of tensors, loads of the chosen route, and every route side by side."""
    p = plan.publication
    if p is None:
        return ""
    head = head_row("tensors", "trainer", "engine", "bytes", "on an engine GPU")
    kinds = scrolled(head + "".join(table_row(row) for row in p.kind_rows()))
    links = scrolled("".join(table_row(row) for row in p.link_rows()))
    routes = head_row("route", "over the scale-up link", "over the network", "bucket memory", "seconds")
    for route in p.mapping.routes:
        at = p.options_s.get(route.route)
        peak = max(route.sender_peak_bytes, route.receiver_peak_bytes)
        cells = (
            route.route.replace("_", " ") + (", chosen" if route.route == p.method else ""),
            *(format_bytes(route.bytes_over(link)) for link in ("scale-up", "network")),
            format_bytes(peak),
            seconds(at) if at is not None else "",
        )
        routes += table_row(cells)
    lead = (
        f"{p.sides} {capitalized(p.because)}. Bytes are of the busiest GPU of its role; seconds beside them what the "
        "link alone would take."
    )
    return section(f"Weight sync: {p.title}", lead, kinds + links + scrolled(routes))
