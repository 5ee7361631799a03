"""`rollbook replay`: repeat a run from its own log and compare bit for bit."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Optional

import typer


def command(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    step: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--step", help="Sample again only this step's trajectories; the updates up to it are repeated."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Repeat a run from its own log and compare bit for bit.

    Example: rollbook replay runs/reverse

    `rollbook demo` makes runs/reverse, with `--set rollout.batch_invariant=true` one that is equal: without
    batch-invariant numerics logprobs differ in their last digits, and replay says so.

    Exits with 0 when everything is the same, with 1 when not; the first differences are named.
    """
    from rollbook.controller.replay import replay_run
    from rollbook.observe.numbers import counted

    report = replay_run(run, only_step=step)
    if as_json:
        typer.echo(json.dumps({"is_equal": report.is_equal, **asdict(report)}))
    else:
        typer.echo(
            f"{report.run_dir}: {counted(report.num_steps, 'step')} repeated; compared "
            f"{counted(report.num_digests, 'digest')} of published "
            f"weights and {counted(report.num_trajectories, 'trajectory')} with "
            f"{counted(report.num_tokens, 'token')} "
            f"({report.num_cut} cut by a publication)"
        )
        for note in report.notes:
            typer.echo(f"  note: {note}")
        for difference in report.differences:
            typer.echo(f"  {difference}")
        typer.echo(report.conclusion())
    if not report.is_equal:
        raise typer.Exit(1)
