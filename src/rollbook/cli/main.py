"""`rollbook`: the table of commands, and how each one ends.

Only the command that was called is imported, so `rollbook --help` starts in the time of the interpreter.
A command's file defines `command`, a plain function with typer annotations; this file makes it a program:

    a value printed to stdout                      exit code 0
    an answer that is no: nothing fits, or differs exit code 1
    RunError -> "error: ..." and "hint: ..."       exit code 2
    Ctrl-C -> "interrupted"                        exit code 130
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from rollbook.errors import RunError, nearest_name

COMMANDS: dict[str, tuple[str, str]] = {
    # name -> file in this folder, one line of help
    "plan": ("plan", "Predict a job's FLOPs, bytes and seconds, and choose its topology."),
    "simulate": ("simulate", "Simulate a topology event by event on a length distribution."),
    "calibrate": ("calibrate", "Measure this machine's ceilings into a hardware.toml."),
    "train": ("train", "Run a job from its config, or resume one."),
    "demo": ("demo", "Plan, train and reconcile a small string task on this machine."),
    "replay": ("replay", "Repeat a run from its own log and compare bit for bit."),
    "watch": ("watch", "Show a run on one web page, live or after the fact."),
    "reconcile": ("reconcile", "Compare plan and measurement, stage by stage."),
    "trace": ("trace", "Write one step as a trace for Perfetto or chrome://tracing."),
    "diagnose": ("diagnose", "Find what is wrong with a run, or that nothing is, from its logs."),
    "runbook": ("runbook", "Print the duty manual of a job: signals, thresholds, actions."),
    "drill": ("drill", "Inject one named fault into a job and say whether it was found."),
    "alerts": ("alerts", "Write Prometheus alert rules and Grafana dashboards for rollbook's metrics."),
    "serve-env": ("serve_env", "Serve environments and their sandboxes over HTTP."),
    "gateway": ("gateway", "Serve an engine to agents over the OpenAI and Anthropic protocols."),
}


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit; `argv` without the program's name."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(overview())
        return
    if argv[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"rollbook {version('rollbook')}")
        return
    name = argv[0]
    if name not in COMMANDS:
        known = [command for command in COMMANDS if _exists(command)]
        _fail(RunError(f"there is no command {name!r}", nearest_name(name, known)))
    if not _exists(name):
        _fail(RunError(f"this installation has no command {name!r}", "update rollbook"))
    try:
        run_command(name, argv[1:])
    except KeyboardInterrupt as interrupt:  # while the command's file was imported
        _interrupted(interrupt)


def run_command(name: str, args: list[str]) -> None:
    """Import one command's file and run it with typer; always ends in SystemExit."""
    import typer

    module = importlib.import_module(f"rollbook.cli.{COMMANDS[name][0]}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, context_settings={"help_option_names": ["-h", "--help"]})(_ends_well(module.command))
    app(args, prog_name=f"rollbook {name}")


def overview() -> str:
    """The text of `rollbook --help`."""
    lines = [
        "Usage: rollbook COMMAND [OPTIONS]",
        "",
        "RL post-training for language models that keeps its books balanced.",
        "",
        "Commands:",
    ]
    lines += [f"  {name:<11}{help_line}" for name, (_, help_line) in COMMANDS.items() if _exists(name)]
    lines += [
        "",
        "Start with:  rollbook demo",
        "Details of a command:  rollbook COMMAND --help",
        "",
    ]
    return "\n".join(lines)


def _exists(name: str) -> bool:
    return importlib.util.find_spec(f"rollbook.cli.{COMMANDS[name][0]}") is not None


def _ends_well(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, ending in an exit code and one message instead of a traceback for a user's mistake."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except RunError as error:
            _fail(error)
        except KeyboardInterrupt as interrupt:
            _interrupted(interrupt)
        except BrokenPipeError:
            # The reader of stdout went away (`| head`): nothing is wrong, and nothing more can be said.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(0) from None

    return run


def _interrupted(interrupt: KeyboardInterrupt) -> None:
    print(": ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr)
    raise SystemExit(130) from None


def _fail(error: RunError) -> None:
    print(f"error: {error.what}\nhint: {error.remedy}", file=sys.stderr)
    raise SystemExit(2) from error


if __name__ == "__main__":
    main()
