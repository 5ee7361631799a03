"""`rollbook reconcile`: a finished run against its plan, stage by stage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollbook.ledger.quantity import require_number
from rollbook.observe.numbers import counted

if TYPE_CHECKING:
    from rollbook.planner.expected import Expectation
    from rollbook.planner.request import PlanRequest


def command(
    run: Annotated[str, typer.Argument(help="Run directory, or a log of verl, TRL, slime or AReaL.")],
    workload: Annotated[
        Path | None,
        typer.Option(
            "--workload",
            help="TOML with the options of `rollbook plan` as keys, and mode; for logs without a plan.",
        ),
    ] = None,
    assume: Annotated[
        str,
        typer.Option(
            "--assume",
            help="Assumptions for --workload, as of `rollbook plan`; empty: the workload's own, else of "
            "the loop that wrote the log.",
        ),
    ] = "",
    format: Annotated[str, typer.Option("--format", help="Log format; empty: found out.")] = "",
    first: Annotated[int, typer.Option("--first", help="First step to look at; -1: after the warm-up.")] = -1,
    last: Annotated[int, typer.Option("--last", help="Last step to look at; -1: the last of the log.")] = -1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare plan and measurement stage by stage, and say which three stages most deserve work.

    Example: rollbook reconcile runs/reverse

    `rollbook demo` makes runs/reverse.
    """
    from rollbook.diagnose.readers.table import load
    from rollbook.errors import PlanError
    from rollbook.planner.ending import ending_of, require_finished_step
    from rollbook.planner.expected import expectation_of_run
    from rollbook.planner.measured import means_of
    from rollbook.planner.reconcile import reconcile

    require_number("--first", first, least=-1, remedy="give a step, or -1: after the warm-up")
    require_number("--last", last, least=-1, remedy="give a step, or -1: the last of the log")
    if assume and workload is None:
        raise PlanError("--assume has no effect: the run has its plan", "leave it out, or give --workload")
    require_finished_step(Path(run))
    series = load(run, format=format or None)
    measured = means_of(
        series.steps,
        series.values,
        first=first if first >= 0 else None,
        last=last if last >= 0 else None,
    )
    means, for_work = measured.means, None
    if workload is None and series.format != "rollbook":
        raise PlanError(
            f"{run} is a log of {series.format}, which holds no plan",
            "give --workload FILE, a TOML of what was run: model, gpu, num_gpus, prompts, group_size, response_tokens, "
            "mode and whatever else `rollbook plan` has an option for (docs/plan.md shows one)",
        )
    if workload is None:
        expectation = expectation_of_run(Path(series.source))
    else:
        loop = series.format.partition("-")[0]  # "verl-file" and "verl-console" are logs of one
        expectation, for_work = _expectation_of(workload, assume, means, loop=loop)
        # What a run expected of its work is its own plan's.
        kept = {name: value for name, value in means.items() if not name.startswith("expected_s/")}
        if len(kept) < len(means):
            note = f"compared with {workload} alone: the run's own plan is left aside"
            means, expectation = kept, replace(expectation, notes=(*expectation.notes, note))
    result = reconcile(
        expectation,
        means,
        source=series.source,
        for_work=for_work,
        first_step=measured.first_step,
        last_step=measured.last_step,
        num_steps=measured.num_steps,
        left_out=measured.left_out,
    )
    about_the_log = tuple(f"of the log: {note}" for note in series.notes)
    result = replace(result, notes=(*measured.notes, *result.notes, *about_the_log))
    ending = ending_of(Path(run))
    if ending is not None and ending.why:
        result = replace(
            result, notes=(f"{counted(ending.num_steps, 'step')} finished; {ending.why}", *result.notes)
        )
    if as_json:
        typer.echo(json.dumps(result.as_json()))
        return
    from rich.console import Console

    from rollbook.planner.show_reconciliation import show_reconciliation

    show_reconciliation(result, Console(highlight=False))


_OTHER_WORK = 1.25
"""Factor between the tokens of a step in the log and as described from which they are not the same work."""
_OTHER_LENGTH = 1.05
"""The same of a mean length."""
_LENGTHS = {"prompt_tokens": "prompt_length/mean", "response_tokens": "response_length/mean"}
"""Metric of a log that measures what a key describes."""
_BESIDE_A_STEP = ("checkpoint_every", "checkpoint_async", "storage_gb_per_s", "length_growth", "horizon")


def _expectation_of(
    path: Path, assume: str, means: dict[str, float], *, loop: str
) -> tuple[Expectation, Expectation | None]:
    """The plan of a described workload, priced as the `loop` that wrote the log where that was measured, and the same
    with the lengths of the log where they are others; those that the description leaves out are the log's in both."""
    from rollbook.errors import PlanError, RunError
    from rollbook.ledger.assumptions import has_assumptions, load_assumptions
    from rollbook.planner.emit_targets import engine_written
    from rollbook.planner.expected import expectation_of_request
    from rollbook.planner.options import PlanOptions, of_file, read_options
    from rollbook.planner.request import choice_of
    from rollbook.planner.words import count

    values: dict[str, Any] = read_options(path)
    if assume and values.get("assume", assume) != assume:
        raise PlanError(
            f"--assume is {assume} and {path} says assume = {values['assume']!r}", "leave one of them out"
        )
    values["assume"] = assume or values.get("assume", loop if has_assumptions(loop) else "default")
    if values["assume"] != "paper":
        values.setdefault("engine", engine_written("", loop, writes_config=False))
    notes = []
    for key, metric in _LENGTHS.items():
        is_given = key in values or (key == "response_tokens" and "lengths" in values)
        if not is_given and metric in means:
            values[key] = max(round(means[metric]), 1)
            notes.append(f"{key} = {values[key]}, as the log measured it")
    named = str(values.pop("mode", "sync"))
    mode = choice_of(f"{path}: mode", named, "sync", "colocate_async", "separate_sync", "separate_async")
    idle = dict.fromkeys(_BESIDE_A_STEP, "only stages of a step are compared")
    if mode in ("sync", "colocate_async"):
        idle |= dict.fromkeys(("split", "lend"), f"mode {mode} shares all GPUs")
    for key in values.keys() & idle.keys():
        raise PlanError(f"{path}: {key} has no effect: {idle[key]}", "leave it out")
    if assume:
        load_assumptions(assume)  # whose mistake is not the file's
    try:
        request = PlanOptions(**values).request()
        expectation, _ = expectation_of_request(request, mode=mode)
    except RunError as error:
        raise of_file(path, error) from None
    for_work, others = None, _other_lengths(request, means, is_file="lengths" in values)
    if others:
        told = " and ".join(f"{key} = {value}" for key, value in others.items())
        try:
            request = PlanOptions(**values | others).request()
            for_work, _ = expectation_of_request(request, mode=mode)
            notes.append(f"its work is with {told}, as the log measured it, which {path} describes otherwise")
        except RunError as error:
            notes.append(
                f"the log measured {told}, which {path} leaves no room for: {of_file(path, error).what}"
            )
    logged, work = means.get("perf/total_num_tokens", 0.0), request.workload
    if logged > 0 and not 1 / _OTHER_WORK < logged / work.trained_tokens < _OTHER_WORK:
        prompts = max(round(logged / (work.group_size * work.sequence_tokens)), 1)
        apart = (
            f"a step of the log has {count(logged)} tokens, the described one {count(work.trained_tokens)}: {path} "
            "describes other work"
        )
        try:
            request = PlanOptions(**values | others | {"prompts": prompts}).request()
            for_work, _ = expectation_of_request(request, mode=mode)
            notes.append(
                f"{apart}; its work is with prompts = {prompts} of group_size {work.group_size}, which make as many"
            )
        except RunError:
            notes.append(f"{apart} (prompts, group_size), so its ratios are those of other work")
    return replace(expectation, notes=expectation.notes + tuple(notes)), for_work


def _other_lengths(request: PlanRequest, means: dict[str, float], *, is_file: bool) -> dict[str, int]:
    """Mean lengths that the log measured and the description has otherwise, by key.

    Args:
        is_file: response lengths are described by a file of them. Such a one, and an agent's, among whose tokens logs
            count what the environment said, are left as described.
    """
    work, others = request.workload, {}
    described = {"prompt_tokens": work.prompt_tokens}
    if not is_file and not work.observation_tokens:
        described["response_tokens"] = work.response_tokens
    for key, tokens in described.items():
        logged = means.get(_LENGTHS[key], 0.0)
        if logged > 0 and not 1 / _OTHER_LENGTH < logged / tokens < _OTHER_LENGTH:
            others[key] = max(round(logged), 1)
    return others
