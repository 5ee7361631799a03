"""The plan as a person reads it in a terminal of 80 columns: the answer first, then the reasons."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollbook.ledger.account import StepAccount
from rollbook.planner.candidate import Candidate
from rollbook.planner.derivation import STEPS_OF_WHAT_FITS
from rollbook.planner.growth import GROWTH_HEAD, Grown
from rollbook.planner.idling import sharing_words
from rollbook.planner.offload import HELD
from rollbook.planner.plan import Plan, Size
from rollbook.planner.publication import Publication
from rollbook.planner.sensitivity import Shift
from rollbook.planner.waterfall import BETWEEN, Loss
from rollbook.planner.words import (
    MODE_TITLES,
    capitalized,
    counted,
    device_words,
    flop_count,
    gpu_hours,
    percent,
    seconds,
    seconds_range,
    split,
    split_gpus,
)

_BAR_WIDTH = 24


def show_plan(plan: Plan, console: Console, *, num_topologies: int = 6) -> None:
    """Print the whole plan."""
    with console.capture() as captured:
        _print_plan(plan, console, num_topologies)
    text = device_words(captured.get(), is_cpu=plan.request.cluster.accelerator.is_cpu)
    console.file.write(text)


def _print_plan(plan: Plan, console: Console, num_topologies: int) -> None:
    r = plan.request
    work, cluster = r.workload, r.cluster
    measured = f" of {len(work.length_samples)} measured lengths" if work.length_samples else ""
    console.print(
        Text.assemble(
            (f"{r.model.name} on {cluster.num_gpus} {cluster.accelerator.name}", "bold"),
            f", {counted(cluster.num_nodes, 'node')}; a step is "
            f"{counted(work.num_prompts, 'prompt')} x {work.group_size}, {work.prompt_tokens:.0f} + "
            f"{work.response_tokens:.0f} tokens on average{measured}, responses up to {work.max_response_tokens}; "
            f"{work.algorithm}, assumptions "
            f"`{r.assumptions.name}`",
        )
    )
    for note in plan.warnings:
        console.print(Text(f"note: {note}", style="yellow"))
    _section(console, "Recommendation", _recommendation(plan))
    if plan.chosen is None:
        for reasoned in plan.derivation:
            if reasoned.step in STEPS_OF_WHAT_FITS:
                _section(console, f"{reasoned.step}  {reasoned.title}", Text(reasoned.because))
        return
    _section(
        console, "One step, colocated and synchronous", _step_table(plan.base.account, plan.base_waterfall)
    )
    _section(console, "FLOPs of the step", _flops_table(plan.base.account))
    _section(console, "Topologies, fastest first", _topology_table(plan, num_topologies))
    for reasoned in plan.derivation:
        _section(console, f"{reasoned.step}  {reasoned.title}", Text(reasoned.because))
    _section(console, "Beside the step", _plain_table(plan.beside.rows()))
    if plan.beside.memory:
        _section(console, "Memory by owner, of one GPU", _plain_table(plan.beside.owners()))
    if plan.beside.moves:
        _section(
            console, "Moves of a step's hand-overs, of one GPU", _plain_table(plan.beside.hand_over_rows())
        )
    if plan.publication is not None:
        _section(console, f"Weight sync: {plan.publication.title}", _publication_tables(plan.publication))
    shown = plan.chosen or plan.base
    losses = plan.chosen_waterfall or plan.base_waterfall
    title = f"Where the peak goes: {MODE_TITLES[shown.mode]}, {split(*shown.split, shown.mode)}"
    _section(console, title, _waterfall_bars(losses, shown.account.mfu_frac))
    if plan.sizes:
        _section(console, "Other cluster sizes", _sizes_table(plan.sizes, cluster.num_gpus))
    if plan.growth:
        _section(console, "As responses grow", _growth_table(plan.growth))
    if plan.shifts:
        _section(console, "What if", _shifts_table(plan.shifts))


def _section(console: Console, title: str, body: RenderableType) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    console.print(Padding(body, (0, 0, 0, 2)))


def _recommendation(plan: Plan) -> RenderableType:
    chosen = plan.chosen
    if chosen is None:
        lines = [Text(f"Nothing fits: {plan.choice_because.removeprefix('no topology fits: ')}", style="red")]
        lines += [Text(f"- {change}") for change in plan.smallest_changes]
        if not plan.smallest_changes:
            lines.append(Text("No single change was found that would make it fit."))
        else:
            lines.insert(1, Text("Any one of these would make it fit, the smallest first:"))
        return Group(*lines)
    account = chosen.account
    low, high = account.step_s.low, account.step_s.high
    span = f" ({seconds_range(low, high)})" if high > low * 1.001 else ""
    head = Text.assemble(
        (capitalized(MODE_TITLES[chosen.mode]), "bold green"),
        f", {split_gpus(*chosen.split, chosen.mode)}: a step takes ",
        (seconds(chosen.step_s), "bold"),
        f"{span}, whole-step MFU {percent(account.mfu_frac)}"
        + (f", with {HELD[chosen.train.offload]} in host memory." if chosen.train.is_offloaded else "."),
    )
    lines = [head, Text(f"{capitalized(plan.choice_because)}.")]
    if plan.request.assumptions.method != "paper" and not plan.request.cluster.accelerator.is_cpu:
        lines.append(Text(f"{chosen.software}."))
    if sharing := sharing_words(chosen):
        lines.append(Text(f"{capitalized(sharing)}."))
    return Group(*lines, *(Text(f"Note: {note}.", style="yellow") for note in plan.chosen_notes))


def _step_table(account: StepAccount, losses: tuple[Loss, ...]) -> Table:
    s, f = account.seconds, account.flops
    peak_per_s = f.total / (account.mfu_frac * s.total)  # of all GPUs
    decode_s = s.generate_throughput + s.generate_tail
    rows: list[tuple[str, float, float]] = [
        ("decode, slots full", s.generate_throughput, f.generate),
        ("decode, tail", s.generate_tail, 0.0),
        ("prefill", s.prefill, f.prefill),
        (
            "forward passes",
            s.forward,
            f.reference + f.proximal + f.critic_values + (0.0 if s.reward else f.reward_model),
        ),
        ("reward model", s.reward, f.reward_model),
        ("training", s.train, f.train + f.critic - f.critic_values),
        ("hand-over", s.switch, 0.0),
        ("weight sync", s.sync, 0.0),
        ("environments", s.env, 0.0),
        (BETWEEN, s.other, 0.0),
    ]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("stage")
    for name in ("seconds", "share", "FLOPs", "of peak"):
        table.add_column(name, justify="right")
    for name, value_s, flops in rows:
        if value_s <= 0:
            continue
        # The last responses' tokens are among those of decoding, and their seconds beside them.
        over_s = decode_s if name.startswith("decode") else value_s
        of_peak = percent(flops / (over_s * peak_per_s)) if flops else ""
        table.add_row(
            name, seconds(value_s), percent(value_s / s.total), flop_count(flops) if flops else "", of_peak
        )
    table.add_row("step", seconds(s.total), "", flop_count(f.total), percent(account.mfu_frac), style="bold")
    return table


def _flops_table(account: StepAccount) -> Table:
    """One row for each key of "flops", in the order of `plan --json`."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(style="dim")
    flops = account.flops
    for key, value in {**flops.as_json(), "recomputed": flops.recomputed}.items():
        if value:
            style = "bold" if key == "total" else None
            note = _FLOPS_NOTES.get(key, "")
            table.add_row(
                key.replace("_", " "), flop_count(value), percent(value / flops.total), note, style=style
            )
    return table


_FLOPS_NOTES = {
    "critic": "values with the forward passes, the rest with training",
    "recomputed": "of layers for their backward; no part of the total",
}


def _plain_table(rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def _publication_tables(publication: Publication) -> RenderableType:
    """How each kind of tensor is cut on both sides, and what the chosen route loads on which link."""
    kinds = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("tensors", "trainer", "engine"):
        kinds.add_column(name)
    for name in ("bytes", "a GPU"):
        kinds.add_column(name, justify="right", no_wrap=True)
    for row in publication.kind_rows():
        kinds.add_row(*row)
    return Group(Text(publication.sides), kinds, Text(), _plain_table(publication.link_rows()))


def _topology_table(plan: Plan, num_topologies: int) -> RenderableType:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("mode")
    for name in ("GPUs", "step", "MFU", "idle r/t", "replica"):
        table.add_column(name, justify="right", no_wrap=True)
    fitting = [c for c in plan.candidates if c.fits]
    refused = [c for c in plan.candidates if not c.fits and c.split[0] >= c.rollout_layout.num_gpus]
    asked = plan.request.split
    shown = _with_every_mode(fitting, num_topologies, asked)
    for candidate in shown:
        style = "bold green" if candidate is plan.chosen else None
        mark = "→" if candidate is plan.chosen else ""
        table.add_row(mark, *_cells(candidate), style=style)
    notes: list[RenderableType] = [table]
    if plan.chosen is not None and fitting[0] is not plan.chosen:
        notes.append(Text(f"→ recommended before faster ones: {plan.choice_because}", style="green"))
    if len(fitting) > len(shown):
        notes.append(Text(f"and {len(fitting) - len(shown)} more that fit", style="dim"))
    for candidate in sorted(refused, key=lambda c: c.split != asked)[:3]:
        notes.append(
            Text(
                f"refused: {MODE_TITLES[candidate.mode]} {split(*candidate.split, candidate.mode)}, "
                f"{seconds(candidate.step_s)}: {candidate.why_refused}",
                style="yellow",
            )
        )
    return Group(*notes)


def _with_every_mode(fitting: list[Candidate], most: int, asked: tuple[int, int] | None) -> list[Candidate]:
    """The fastest few, with at least the best of each mode and the split that was asked for, by step time."""
    shown = fitting[:most]
    for mode in MODE_TITLES:
        if not any(c.mode == mode for c in shown):
            shown += [c for c in fitting if c.mode == mode][:1]
    shown += [c for c in fitting if c.split == asked and c not in shown and c.mode.startswith("separate")]
    return sorted(shown, key=lambda c: c.step_s)


def _cells(candidate: Candidate) -> list[str]:
    idle, layout = candidate.account.idle_frac, candidate.rollout_layout
    replica = f"TP {layout.tp_size}" + (f" EP {layout.ep_size}" if layout.ep_size > 1 else "")
    if layout.weight_dtype != "bfloat16":
        replica += f" {layout.weight_dtype}"
    return [
        candidate.title,
        split(*candidate.split, candidate.mode),
        seconds(candidate.step_s),
        percent(candidate.account.mfu_frac),
        f"{100 * idle['rollout']:.0f}/{100 * idle['train']:.0f} %",
        replica,
    ]


def _waterfall_bars(losses: tuple[Loss, ...], mfu_frac: float) -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, width=_BAR_WIDTH)
    table.add_column(style="dim")
    left = 1.0
    for loss in losses:
        if loss.frac < 0.0005:
            continue
        before = round(_BAR_WIDTH * (left - loss.frac))
        width = max(round(_BAR_WIDTH * left) - before, 1)
        bar = Text("·" * before) + Text("█" * width, style="red")
        table.add_row(loss.loss, percent(loss.frac), bar, loss.why)
        left -= loss.frac
    useful = max(round(_BAR_WIDTH * mfu_frac), 1)
    table.add_row("useful", percent(mfu_frac), Text("█" * useful, style="green"), "the whole-step MFU")
    return table


def _sizes_table(sizes: tuple[Size, ...], num_gpus: int) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("GPUs", justify="right")
    table.add_column("best topology")
    table.add_column("split", justify="right")
    table.add_column("step", justify="right")
    table.add_column("GPU hours a step", justify="right")
    for size in sizes:
        style = "bold" if size.num_gpus == num_gpus else None
        best = size.best
        if best is None:
            table.add_row(str(size.num_gpus), "does not fit", "", "", "", style="dim")
            continue
        table.add_row(
            str(size.num_gpus),
            MODE_TITLES[best.mode],
            split(*best.split, best.mode),
            seconds(best.step_s),
            gpu_hours(best.step_s * size.num_gpus),
            style=style,
        )
    return table


def _growth_table(growth: tuple[Grown, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in GROWTH_HEAD[:-1]:
        table.add_column(name, justify="right")
    table.add_column(GROWTH_HEAD[-1])
    for at in growth:
        table.add_row(*at.cells())
    return table


def _shifts_table(shifts: tuple[Shift, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("if")
    table.add_column("this step", justify="right")
    table.add_column("change", justify="right")
    table.add_column("then recommended")
    for shift in shifts:
        best = "the same"
        if shift.best is None:
            best = "nothing fits"
        elif shift.moves:
            best = f"{shift.best.title} {split(*shift.best.split, shift.best.mode)}"
            best += f", {seconds(shift.best.step_s)}"
        step = seconds(shift.step_s) if shift.step_s is not None else "does not fit"
        change = f"{100 * shift.change_frac:+.0f} %" if shift.change_frac is not None else ""
        table.add_row(shift.change, step, change, best)
    return table
