"""`rollbook drill`: inject one named fault into a job and say whether it was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from rollbook.drill.run import DrillReport


def command(
    fault: Annotated[Optional[str], typer.Argument(help="Name of the fault; `--list` shows them.")] = None,  # noqa: UP045
    config: Annotated[Optional[Path], typer.Argument(help="The job's TOML file; see examples/.")] = None,  # noqa: UP045
    list_: Annotated[bool, typer.Option("--list", help="List the faults and what they need.")] = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of the drilled run.")] = 48,
    at: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--at", min=0, help="Step from which the fault is there; a third in by default."),
    ] = None,
    set_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", metavar="A.B=C", help="Override one field; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Inject one named fault into a job and say whether it was found.

    Example: rollbook drill skipped_bucket_unproven examples/addition.toml

    Exits with 0 when the right rule named it first, with 1 when not.
    """
    from rollbook.errors import ConfigError

    if list_:
        _print_list(as_json)
        return
    if fault is None or config is None:
        raise ConfigError(
            "drill needs a fault and a config file",
            "rollbook drill --list, then rollbook drill slow_replica examples/addition.toml",
        )
    from rollbook.drill.run import find_fault, run_drill

    report = run_drill(find_fault(fault), config, set_ or [], num_steps=steps, at_step=at)
    typer.echo(json.dumps(report.to_json()) if as_json else _text(report))
    if not report.is_found:
        raise typer.Exit(1)


def _print_list(as_json: bool) -> None:
    from rollbook.drill.faults import FAULTS

    if as_json:
        rows = [
            {"fault": f.name, "says": f.says, "expects": f.expects, "needs": {**f.needs, **f.least}}
            for f in FAULTS.values()
        ]
        typer.echo(json.dumps(rows))
        return
    for fault in FAULTS.values():
        typer.echo(f"{fault.name}\n    {fault.says}\n    found by: {', '.join(fault.expects)}")
        needs = [f"{key} = {value}" for key, value in fault.needs.items()]
        needs += [f"{key} at least {value}" for key, value in fault.least.items()]
        needs += [f"{fault.least_sources} data sources"] if fault.least_sources > 1 else []
        if needs:
            typer.echo(f"    sets: {', '.join(needs)}")


def _text(report: DrillReport) -> str:
    lines = [f"{report.fault}: {report.says}", f"  run: {report.run_dir}, steps 0 to {report.last_step}"]
    if report.changed:
        lines.append("  set for the drill: " + ", ".join(f"{k} = {v}" for k, v in report.changed.items()))
    lines.append(f"  fault from step {report.at_step} on")
    if report.ended_with:
        lines.append(f"  the run stopped: {report.ended_with}")
    if report.is_found and report.onset_step is None:
        lines.append("RIGHT: no alarm, and what is odd about the log is said")
    elif report.is_found:
        late = f"with the log up to step {report.found_at_step}"
        lines.append(f"FOUND by {report.verdict}, {late}; it dates the onset to step {report.onset_step}")
    else:
        lines.append(
            f"NOT FOUND: the verdict is {report.verdict}, {' or '.join(report.expects)} was expected"
        )
    lines.append(f"  before the fault (steps 0 to {report.at_step - 1}): {report.control_verdict}")
    return "\n".join(lines)
