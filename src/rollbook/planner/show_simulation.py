"""A simulated job in a terminal: averages beside the closed form, staleness, and the timeline of some steps."""

from __future__ import annotations

import math

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollbook.ledger.step import is_colocated
from rollbook.observe.numbers import counted
from rollbook.planner.candidate import Candidate
from rollbook.planner.sim_result import SimResult
from rollbook.planner.words import MODE_TITLES, capitalized, count, percent, seconds, seconds_range, split

_WIDTH = 68
_LEVELS = " ▁▂▃▄▅▆▇█"
_LETTERS = {
    "wait": "·",
    "train": "T",
    "forward": "F",
    "sync": "s",
    "switch": "x",
    "gather": "g",
    "drain": "d",
}


def show_simulation(result: SimResult, candidate: Candidate, console: Console) -> None:
    """Print the simulated averages, the histogram and the timeline."""
    scenario = result.scenario
    kept = scenario.num_steps - scenario.num_warmup_steps
    console.print(
        Text.assemble(
            (
                f"{capitalized(MODE_TITLES[candidate.mode])}, {split(*candidate.split, candidate.mode)}",
                "bold",
            ),
            f": {counted(scenario.num_replicas, 'replica')} x {counted(scenario.slots_per_replica, 'slot')}, "
            f"{scenario.groups_per_step} x {counted(scenario.group_size, 'trajectory')} a step; mean of "
            f"{counted(kept, 'step')} "
            f"after {scenario.num_warmup_steps} of warm-up",
        )
    )
    console.print()
    console.print(Padding(_averages(result, candidate), (0, 0, 0, 2)))
    if because := why_apart(result, candidate):
        console.print()
        console.print(because)
    if scenario.staleness_bound:
        _title(console, "Staleness of trained trajectories, in versions")
        console.print(Padding(_histogram(result.staleness), (0, 0, 0, 2)))
    _title(console, "Timeline")
    console.print(Padding(_timeline(result), (0, 0, 0, 2)))


_APART_FRAC = 0.05


def why_apart(result: SimResult, candidate: Candidate) -> str:
    """What the closed form leaves out, where it is more than a twentieth away; empty where it is not."""
    span, scenario = candidate.account.step_s, result.scenario
    if abs(result.step_s / span.value - 1) <= _APART_FRAC:
        return ""
    left_out = [
        (scenario.num_lent_replicas > 0, "how lent replicas fill and empty"),
        (math.isfinite(scenario.replica_mtbf_s), "replicas that fail"),
        (scenario.trajectory_failure_frac > 0, "trajectories that fail"),
        (scenario.length_growth_frac != 0, "responses that grow"),
        (scenario.take == "arrival", "groups in the order of their arrival"),
        (
            scenario.on_publish != "keep" or scenario.recomputes_kv,
            "what a publication does to running responses",
        ),
        (scenario.sync_every > 1, "several updates between two publications"),
        (
            result.num_preemptions > _APART_FRAC * result.num_trained,
            "sequences that a full KV pool pushes out and prefills again",
        ),
        (scenario.env_s is not None, "how the slowest environments differ from batch to batch"),
    ]
    named = [what for is_so, what in left_out if is_so] or [
        "chance: how the longest responses differ from batch to batch"
    ]
    holds = "holds" if span.low <= result.step_s <= span.high else "does not hold"
    return (
        f"The closed form leaves out {', '.join(named)}. Its range, {seconds_range(span.low, span.high)}, "
        f"{holds} the "
        "simulated step."
    )


def _title(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, style="bold"))


def _averages(result: SimResult, candidate: Candidate) -> Table:
    account, idle = candidate.account, candidate.account.idle_frac
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("")
    for name in ("simulated", "closed form", "difference"):
        table.add_column(name, justify="right")
    difference = f"{100 * (result.step_s / account.seconds.total - 1):+.1f} %"
    table.add_row("step", seconds(result.step_s), seconds(account.seconds.total), difference, style="bold")
    spans = [result.step_range(account.step_s), account.step_s]
    if spans[1].high > spans[1].low * 1.001:
        table.add_row("  its range", *(seconds_range(s.low, s.high) for s in spans), "")
    rows = [
        ("rollout GPUs idle", percent(result.rollout_idle_frac), percent(idle["rollout"])),
        ("training GPUs idle", percent(result.train_idle_frac), percent(idle["train"])),
        ("slots decoding while busy", percent(result.occupancy_frac), ""),
        ("bubble", seconds(result.bubble_s), ""),
        ("response tokens a second", count(result.tokens_per_s), ""),
    ]
    if candidate.is_on_policy:  # others start the next batch while the last responses of this one end
        tail_s = account.seconds.generate_tail
        rows.append(
            ("tail, last tenth of a batch", seconds(result.tail_s), seconds(tail_s) if tail_s else "")
        )
    for name, simulated, closed in rows:
        table.add_row(name, simulated, closed, "")
    counts = [
        ("trajectories failed", result.num_failed),
        ("trajectories evicted as too old", result.num_evicted),
        ("preemptions, KV pool full", result.num_preemptions),
        ("tokens sampled and lost", result.lost_tokens),
    ]
    for name, number in counts:
        if number:
            table.add_row(f"{name}, all {counted(result.scenario.num_steps, 'step')}", count(number), "", "")
    if result.num_evicted:
        bias = result.evicted_mean_tokens / result.trained_mean_tokens
        table.add_row("mean length, evicted over trained", f"{bias:.2f}", "", "")
    return table


def _histogram(staleness: dict[int, int]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    total = sum(staleness.values())
    for age, number in sorted(staleness.items()):
        bar = "█" * max(round(40 * number / total), 1)
        table.add_row(str(age), f"{percent(number / total):>7}", Text(bar, style="cyan"))
    return table


def _timeline(result: SimResult) -> Text:
    """The last steps that fit: live sequences of all replicas as a curve, the trainer as letters."""
    scenario = result.scenario
    cycle = 1 if not scenario.staleness_bound else scenario.staleness_bound + 1
    shown = result.steps[-min(max(2, cycle), len(result.steps)) :]
    start_s, end_s = shown[0].start_s, shown[-1].end_s
    edges = np.linspace(start_s, end_s, _WIDTH + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    at = np.clip(np.searchsorted(result.curve_at_s, middle, side="right") - 1, 0, len(result.curve_at_s) - 1)
    share = result.curve_live[at] / (scenario.num_replicas * scenario.slots_per_replica)
    letters = [" "] * _WIDTH
    for interval in sorted(result.intervals, key=lambda i: i.start_s - i.end_s):  # short ones stay visible
        if interval.lane == "trainer":
            first = np.searchsorted(edges, interval.start_s, side="right") - 1
            last = np.searchsorted(edges, interval.end_s, side="left")
            for i in range(max(int(first), 0), min(int(last), _WIDTH)):
                letters[i] = _LETTERS[interval.name]
    if is_colocated(scenario.mode):
        share = np.where(np.array(letters) == "·", share, 0.0)  # paused while the trainer has the GPUs
    curve = "".join(_LEVELS[math.ceil(min(max(x, 0.0), 1.0) * 8)] for x in share)
    marks = [" "] * (_WIDTH + 1)
    for step in shown:
        marks[min(int((step.start_s - start_s) / (end_s - start_s) * _WIDTH), _WIDTH)] = "|"
    used = sorted({x for x in letters if x != " "})
    names = {letter: name for name, letter in _LETTERS.items()}
    legend = ", ".join(f"{letter} {names[letter]}" for letter in used)
    lines = [
        f"engines  {curve}",
        f"trainer  {''.join(letters)}",
        f"steps    {''.join(marks)}".rstrip(),
        f"{seconds(start_s)} to {seconds(end_s)}; engines: share of slots that decode; trainer: {legend}",
    ]
    return Text("\n".join(lines))
