"""`rollbook diagnose`: what is wrong with a run, or that nothing is, from its logs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rollbook.diagnose.finding import Diagnosis
from rollbook.errors import ConfigError, DataError

MAX_NAMED = 5
"""Logs of a folder that are named and not judged."""
MAX_OTHER_RUNS = 5
"""Runs of the same log, or logs of the same folder, that are judged in one line beside the newest."""
MAX_OTHER_BYTES = 256 * 1024 * 1024
"""Size of another log beyond which it is named and not read."""


def command(
    run: Annotated[
        str, typer.Argument(help="Run directory, log file or folder, or the URL of a Prometheus server.")
    ],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help="rollbook, verl-file, verl-console, tensorboard, trl, slime, areal, prime-rl, openrlhf, nemo-rl, "
            "wandb, records, console or prometheus; empty: found out.",
        ),
    ] = "",
    run_idx: Annotated[
        int,
        typer.Option("--run", help="Which run, when one log holds several (0 is the first); -1: the last."),
    ] = -1,
    hours: Annotated[
        float, typer.Option("--hours", help="How far back to ask a Prometheus server; above 0.")
    ] = 24.0,
    tells_all: Annotated[
        bool, typer.Option("--all", help="Also say what to log for each rule that could not be judged.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write a page with the series around each change.")
    ] = None,
) -> None:
    """Find what is wrong with a run, or that nothing is, from its logs.

    Example: rollbook diagnose runs/reverse

    `rollbook demo` makes runs/reverse.
    """
    from rollbook.diagnose.readers.table import load
    from rollbook.diagnose.report import to_text
    from rollbook.diagnose.tree import diagnose, in_short

    if run_idx < -1:
        raise ConfigError(f"--run is {run_idx}", "give the number of a run, 0 the first, or -1 for the last")
    if not 0.0 < hours < math.inf:
        raise ConfigError(f"--hours is {hours}", "give a number of hours above 0")
    series = load(run, format=format or None, run_idx=run_idx if run_idx >= 0 else None, hours=hours)
    diagnosis = diagnose(series)
    if run_idx < 0 and series.num_runs > 1:
        others = [i for i in range(series.num_runs) if i != series.run_idx][-MAX_OTHER_RUNS:]
        short = [in_short(load(run, format=format or None, run_idx=i, hours=hours)) for i in others]
        diagnosis = replace(diagnosis, other_runs=tuple(short))
    if Path(run).is_dir():
        diagnosis = _with_other_logs(diagnosis, Path(run), format or None)
    if html is not None:
        from rollbook.diagnose.html_report import to_html
        from rollbook.diagnose.signs.gap import gap_of
        from rollbook.diagnose.view import View
        from rollbook.observe.run_dir import storage_error

        view = View.of(series)
        gap_of(view)  # its derived series stands in the evidence
        try:
            html.write_text(to_html(diagnosis, view), encoding="utf-8")
        except OSError as error:
            raise storage_error(html, error) from error
    if as_json:
        typer.echo(json.dumps(diagnosis.to_json(), allow_nan=False))
    else:
        typer.echo(to_text(diagnosis, tells_all=tells_all), nl=False)


def _with_other_logs(diagnosis: Diagnosis, folder: Path, format: str | None) -> Diagnosis:
    """The diagnosis of the newest log of a folder, with a line on each other one."""
    from rollbook.diagnose.readers.table import load, places
    from rollbook.diagnose.tree import in_short

    _, *others = places(folder, format)
    if not others:
        return diagnosis
    judged, named = list(diagnosis.other_runs), []
    for path, its_format in others:
        if len(judged) >= MAX_OTHER_RUNS or (path.is_file() and path.stat().st_size > MAX_OTHER_BYTES):
            named.append(str(path))
            continue
        try:
            judged.append(replace(in_short(load(str(path), format=its_format)), log=str(path)))
        except DataError as error:
            named.append(f"{path} ({error.args[0]})")
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    says = (f"of the folder's logs not judged: {', '.join(named[:MAX_NAMED])}{more}",) if named else ()
    return replace(diagnosis, other_runs=tuple(judged), notes=(*diagnosis.notes, *says))
