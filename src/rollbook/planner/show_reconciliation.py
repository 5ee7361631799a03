"""A reconciliation in a terminal: stages, the measured waterfall, and what deserves work."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollbook.planner.expected import Expected
from rollbook.planner.reconciliation import BUSY, NO_RANGE, NONE_PLANNED, Reconciliation, StageResult
from rollbook.planner.words import counted, percent, seconds, seconds_range

_STYLES = {
    "slower": "red",
    BUSY: "yellow",
    NONE_PLANNED: "red",
    "faster": "green",
    "as planned": "",
    "not planned": "dim",
    NO_RANGE: "",
    "too short to judge": "dim",
}
_BAR_WIDTH = 30
_VISIBLE_FRAC = 0.1
"""From which a ratio is no 1, whatever the range."""


def show_reconciliation(result: Reconciliation, console: Console) -> None:
    """Print everything, the answer first."""
    step = result.step
    assert step.planned is not None and step.expected is not None and step.ratio is not None
    low, high = step.expected.low, step.expected.high
    span = f" ({seconds_range(low, high)})" if step.expected.has_range else ""
    # 1.5 times as long is not as planned, though no plan says that it is not.
    is_wide = step.verdict == "as planned" and abs(step.ratio - 1) > _VISIBLE_FRAC
    verdict = "within that range" if is_wide else step.verdict
    is_as_foreseen = step.expected.seconds == step.planned.seconds
    console.print(
        Text.assemble(
            (f"A step takes {seconds(step.measured_s)}", "bold"),
            f"; planned were {seconds(step.expected.seconds)}{'' if is_as_foreseen else ' for the work it got'}"
            f"{span}: {step.ratio:.2f} x, {verdict}."
            + ("" if is_as_foreseen else f" Before the run it was {seconds(step.planned.seconds)}."),
        )
    )
    which = f"{result.first_step} to {result.last_step}" if result.num_steps > 1 else f"{result.first_step}"
    without = f" ({len(result.left_out)} left out)" if result.left_out else ""
    steps = f"{counted(result.num_steps, 'step')}, {which}{without}"
    console.print(
        Text(f"Means of {steps}, of {result.source} against {result.expectation.source}.", style="dim")
    )
    for note in result.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    console.print()
    console.print(Padding(_stages(result), (0, 0, 0, 2)))
    console.print()
    title = "Where the peak went" if result.mfu_frac is not None else "Where the step went"
    console.print(Text(title, style="bold"))
    console.print(Padding(_waterfall(result), (0, 0, 0, 2)))
    console.print()
    console.print(Text("What deserves work", style="bold"))
    for i, deserving in enumerate(result.deserving, 1):
        console.print(
            Padding(Text.assemble(f"{i}. ", (deserving.stage, "bold"), f": {deserving.why}."), (0, 0, 0, 2))
        )


def _stages(result: Reconciliation) -> Table:
    """planned: before the run; its work: expected of what the steps really had to do; ratio: measured over that."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("stage")
    for name in ("planned", "its work", "within", "measured", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("")
    for stage in (*result.stages, result.step):
        table.add_row(*_cells(stage), style="bold" if stage.stage == "step" else _STYLES[stage.verdict])
    return table


def _cells(stage: StageResult) -> list[str]:
    planned, expected = stage.planned, stage.expected
    spread = expected.high / expected.seconds - 1 if expected and not expected.is_none else None
    return [
        stage.stage,
        _planned(planned),
        _planned(expected),
        ""
        if expected is None or expected.is_none
        else f"± {100 * spread:.0f} %"
        if spread and expected.has_range
        else "none",
        seconds(stage.measured_s),
        f"{stage.ratio:.2f}" if stage.ratio is not None else "",
        stage.verdict,
    ]


def _planned(part: Expected | None) -> str:
    if part is None:
        return ""
    return "none" if part.is_none else seconds(part.seconds)


def _waterfall(result: Reconciliation) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, width=_BAR_WIDTH)
    table.add_column(no_wrap=True, style="dim")
    for loss in result.waterfall:
        if loss.frac < 0.0005:
            continue
        whole = max(round(_BAR_WIDTH * loss.frac), 1)
        beyond = round(whole * loss.beyond_frac / loss.frac)
        bar = Text("█" * (whole - beyond), style="blue") + Text("█" * beyond, style="red")
        more = f"{percent(loss.beyond_frac)} beyond the plan" if loss.beyond_frac >= 0.0005 else ""
        table.add_row(loss.loss, percent(loss.frac), bar, more)
    if result.mfu_frac is not None:
        bar = Text("█" * max(round(_BAR_WIDTH * result.mfu_frac), 1), style="green")
        table.add_row("useful", percent(result.mfu_frac), bar, "the whole-step MFU")
    return table
