"""`rollbook demo`: plan, train and reconcile a small string task on this machine."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer


def command(
    dir: Annotated[Path, typer.Option(help="Folder of run directories.")] = Path("runs"),
    seed: Annotated[int, typer.Option(help="Decides initial weights, data order and sampling.")] = 0,
    set_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", metavar="A.B=C", help="Override one field of the config; may be repeated."),
    ] = None,
) -> None:
    """Plan, train and reconcile a small string task on this machine, in about three minutes.

    Example: rollbook demo
    """
    from importlib import resources

    from rollbook.cli.reconcile import command as reconcile
    from rollbook.controller.entry import free_name, start_run

    name = free_name(dir, "reverse")
    overrides = [
        f"run.dir={dir}",
        f"run.name={name}",
        f"run.seed={seed}",
        f"model.seed={seed}",
        *(set_ or []),
    ]
    with resources.as_file(resources.files("rollbook.cli").joinpath("reverse.toml")) as config:
        run_dir = start_run(config, overrides)
    reconcile(str(run_dir))
    rollbook = program()
    print(
        f"\nRun directory: {run_dir}\nNext:\n"
        f"  {rollbook} watch {run_dir}        the same run on one web page\n"
        f"  {rollbook} diagnose {run_dir}     what is wrong with it, if anything\n"
        f"  {rollbook} trace {run_dir} -o trace.json   one step for Perfetto\n"
        f"  {rollbook} plan --model Qwen3-32B --gpu H100 --num-gpus 64   a job you do not have the GPUs for yet\n"
        "  examples/                     the same loop on your own model and data"
    )


def program() -> str:
    """How the reader's shell calls this program: by its name where the path has it, else by where it lies."""
    called = Path(sys.argv[0])
    if shutil.which("rollbook") or called.name != "rollbook":
        return "rollbook"
    return str(called.relative_to(Path.cwd()) if called.is_relative_to(Path.cwd()) else called)
