"""`rollbook trace`: one step as a trace file."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class TraceFormat(StrEnum):
    CHROME = "chrome"
    OTLP = "otlp"


def command(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    step: Annotated[int | None, typer.Option(help="Step to write; the last finished one by default.")] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.")] = Path("trace.json"),
    format: Annotated[
        TraceFormat,
        typer.Option(help="chrome: for Perfetto; otlp: trajectories as OpenTelemetry spans in OTLP/JSON."),
    ] = TraceFormat.CHROME,
    endpoint: Annotated[
        str | None,
        typer.Option(help="Also send OTLP/JSON to a collector, e.g. http://localhost:4318/v1/traces."),
    ] = None,
) -> None:
    """Write one step as a trace for Perfetto or chrome://tracing.

    Example: rollbook trace runs/reverse --step 3 -o trace.json

    `rollbook demo` makes runs/reverse.
    """
    from rollbook.errors import RunError
    from rollbook.observe.history import RunHistory
    from rollbook.observe.run_dir import storage_error
    from rollbook.observe.trace import chrome_trace, otlp_trace

    if run.is_file():
        raise RunError(
            f"{run} is a file: it holds no spans", "give the run directory that holds events.jsonl"
        )
    history = RunHistory(run)
    history.refresh_all()
    if step is None:
        known = history.steps_with_spans()
        if not known:
            raise RunError(f"{run} holds no finished step with spans", "run at least one step")
        step = known[-1]
    trace = chrome_trace(history, step) if format is TraceFormat.CHROME else otlp_trace(history, step)
    try:
        out.write_text(json.dumps(trace) + "\n")
    except OSError as error:
        raise storage_error(out, error) from error
    print(out)
    if endpoint is not None:
        _send(endpoint, otlp_trace(history, step))
    if format is TraceFormat.CHROME:
        print("open it at https://ui.perfetto.dev or chrome://tracing", file=sys.stderr)


def _send(endpoint: str, trace: dict[str, object]) -> None:
    import httpx

    from rollbook.errors import RunError

    try:
        httpx.post(endpoint, json=trace, timeout=30.0).raise_for_status()
    except httpx.HTTPError as error:
        raise RunError(
            f"the collector at {endpoint} refused the trace: {error}", "check its address and path"
        ) from None
    print(f"sent to {endpoint}", file=sys.stderr)
