"""`rollbook watch`: the one screen of a run as a web page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(help="Run directory, or a metrics.jsonl in verl's format.")],
    port: Annotated[
        int, typer.Option(help="Port on loopback; 0 takes any free one.", min=0, max=65535)
    ] = 8765,
    export: Annotated[
        Path | None, typer.Option(help="Write the page as one file that needs no server, and stop.")
    ] = None,
) -> None:
    """Show a run on one web page, live or after the fact.

    Example: rollbook watch runs/reverse

    `rollbook demo` makes runs/reverse.
    """
    if export is not None:
        _export(run, export)
        return
    from rollbook.observe.page.server import HOST, open_socket, page_app, serve

    app = page_app(run)
    listener = open_socket(port)
    if run.is_file() and not run.stat().st_size:
        print(f"{run} is empty: the page fills in as soon as a step is written to it", file=sys.stderr)
    print(f"http://{HOST}:{listener.getsockname()[1]}/", flush=True)
    print(f"showing {run}; Ctrl-C ends the page, not the run", file=sys.stderr)
    serve(app, listener)


def _export(run: Path, export: Path) -> None:
    from rollbook.observe.clock import SystemClock
    from rollbook.observe.history import RunHistory
    from rollbook.observe.page.content import exported
    from rollbook.observe.run_dir import storage_error

    history = RunHistory(run)
    history.refresh_all()
    page = exported(history, SystemClock().unix_s())
    try:
        export.write_text(page, encoding="utf-8")
    except OSError as error:
        raise storage_error(export, error) from error
    print(export)
