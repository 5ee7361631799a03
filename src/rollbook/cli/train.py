"""`rollbook train`: run a job from its config, or resume one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def command(
    config: Annotated[Optional[Path], typer.Argument(help="The run's TOML file; see examples/.")] = None,  # noqa: UP045
    set_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", metavar="A.B=C", help="Override one field; may be repeated."),
    ] = None,
    resume: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Continue the run in this run directory from its newest checkpoint."),
    ] = None,
) -> None:
    """Run a job from its config, or resume one.

    Example: rollbook train examples/addition.toml --set run.num_steps=20
    """
    from rollbook.controller.entry import resume_run, start_run
    from rollbook.errors import ConfigError

    if config is None and resume is None:
        raise ConfigError(
            "train needs either a config file or --resume RUN",
            "rollbook train examples/addition.toml, or rollbook train --resume runs/addition",
        )
    if config is not None and resume is not None:
        raise ConfigError(
            f"a config file ({config}) and --resume {resume} exclude each other: a resumed run has the config in its "
            "run directory",
            f"to go on: rollbook train --resume {resume}, with --set for fields that change; to begin anew: rollbook "
            f"train {config} --set run.name=...",
        )
    if resume is not None:
        run_dir = resume_run(resume, set_ or [])
    else:
        assert config is not None
        run_dir = start_run(config, set_ or [])
    print(run_dir)
