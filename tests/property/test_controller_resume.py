"""A run that was killed, whenever and however, goes on as if it had not been."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollbook.checkpoint.checkpoint as checkpoint_module
from fresh_process import in_fresh_process
from rollbook.controller.loop import Controller
from rollbook.controller.rollout import Member
from rollbook.errors import DataError
from rollbook.observe.catalogue import lookup
from rollbook.types import Trajectory
from tiny_run import RunResult, TinyRun, resume_tiny, run_tiny

EXACT = {"rollout.batch_invariant": True, "checkpoint.every_steps": 1, "checkpoint.keep": 100}
"""Numbers that repeat bit for bit, and every state kept."""

TWO_EPOCHS = {
    "run.groups_per_step": 2,
    "data.sources": [{"task": "addition", "num_prompts": 8}],
    "data.num_epochs": 2,
    **EXACT,
}
"""4 steps an epoch."""


def exact_metrics(result: RunResult) -> list[dict[str, Any]]:
    """What does not depend on the clock or on when a request reached the engine's thread."""

    def is_exact(name: str) -> bool:
        metric = lookup(name)
        assert metric is not None
        is_timed = "/s" in metric.unit or "seconds" in metric.denominator
        return metric.owner in ("controller", "trainer", "algos", "buffer") and not is_timed

    return [{n: v for n, v in step.items() if is_exact(n)} for step in result.metrics]


def assert_same_run(left: RunResult, right: RunResult) -> None:
    assert left.trained == right.trained
    assert exact_metrics(left) == exact_metrics(right)
    for name, tensor in left.parameters.items():
        assert tensor.equal(right.parameters[name]), name
    for state in ("means", "mean_squares"):
        for name, tensor in left.state["trainer"]["policy"][state].items():
            assert tensor.equal(right.state["trainer"]["policy"][state][name]), name


def as_it_was(run: RunResult, folder: Path, num_steps_done: int) -> Path:
    """The run directory as a process left it that was killed after this many steps."""
    shutil.copytree(run.folder, folder)
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.partition("_")[2]) > num_steps_done:
            shutil.rmtree(path)
    for path in (folder / "trajectories").iterdir():
        if int(path.stem.partition("_")[2]) >= num_steps_done:
            path.unlink()
    shutil.rmtree(folder / "model")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] < num_steps_done]
    (folder / "metrics.jsonl").write_text("".join(kept))
    return folder


def resume_quietly(folder: Path, overrides: dict[str, Any]) -> None:
    resume_tiny(folder, **overrides)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Two epochs of 8 prompts; the data ends the run, not the number of steps."""
    return run_tiny(tmp_path_factory.mktemp("unbroken"), num_steps=20, **TWO_EPOCHS)


def test_two_epochs_ask_each_prompt_twice_and_end_the_run(unbroken: RunResult) -> None:
    assert unbroken.num_steps == 8
    for epoch in (unbroken.trained[:4], unbroken.trained[4:]):
        assert Counter(i for step in epoch for i in step) == {f"addition/{n}": 1 for n in range(8)}
    assert unbroken.state["num_steps_done"] == 8  # the last state is saved although run.num_steps is 20
    assert (unbroken.folder / "model" / "config.json").is_file()


def test_the_last_step_that_the_data_allows_is_evaluated_like_a_last_step(tiny_run: TinyRun) -> None:
    sources = [{"task": "addition", "num_prompts": 10}]
    run = tiny_run(
        num_steps=20,
        **{"data.sources": sources, "data.num_epochs": 1, "data.held_out_frac": 0.2, "eval.num_prompts": 1},
    )
    assert [("val/addition/reward" in m) for m in run.metrics] == [
        True,
        *[False] * (len(run.metrics) - 2),
        True,
    ]
    assert len(run.metrics) in (2, 3)


@pytest.mark.parametrize("num_steps_done", range(9))
def test_br052_a_fresh_process_goes_on_at_every_step_of_two_epochs(
    unbroken: RunResult, num_steps_done: int, tmp_path: Path
) -> None:
    folder, log = as_it_was(unbroken, tmp_path / "run", num_steps_done), tmp_path / "log"
    assert in_fresh_process(resume_quietly, folder, {}, log=log) == 0, log.read_text()
    resumed = RunResult(folder)
    if num_steps_done < 8:
        assert_same_run(unbroken, resumed)
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 8
        assert log.read_text() == ""
    else:
        assert log.read_text() == f"{folder} is already complete: 8 of 20 steps; nothing was trained\n"
        assert [e["num_steps_done"] for e in resumed.events_of("already_complete")] == [8]
        assert resumed.metrics == unbroken.metrics
        assert len(resumed.events_of("publication")) == len(unbroken.events_of("publication"))


def test_a_complete_run_goes_on_when_it_is_given_more_steps(tiny_run: TinyRun) -> None:
    whole = tiny_run(name="whole", num_steps=4, **EXACT)
    short = tiny_run(name="short", num_steps=2, **EXACT)
    assert_same_run(whole, resume_tiny(short, **{"run.num_steps": 4}))


class Fails:
    """The trainer raises in its update number `update`, once."""

    def __init__(self, update: int) -> None:
        self.left = update

    def __call__(self, controller: Controller) -> None:
        plain = controller.trainer.update

        def update(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise DataError("a logprob is not finite", "look at the batch")
            return plain(*args, **kwargs)

        controller.trainer.update = update  # type: ignore[method-assign]


@pytest.mark.parametrize("every", [1, 2, 0])
def test_an_error_in_a_step_loses_that_step_and_what_was_not_saved_and_repeats_it_alike(
    tiny_run: TinyRun, tmp_path: Path, every: int
) -> None:
    exact = EXACT | {"checkpoint.every_steps": every}
    whole = tiny_run(name="whole", num_steps=5, **exact)
    with pytest.raises(DataError, match="not finite"):
        tiny_run(name="broken", num_steps=5, faults=[Fails(update=4)], **exact)
    broken = RunResult(tmp_path / "broken")
    assert len(broken.metrics) == 3  # a step that failed writes no line
    assert broken.events_of("run_failed")[0]["error"] == "a logprob is not finite"
    assert broken.state["num_steps_done"] == {1: 3, 2: 2, 0: 0}[every]
    assert_same_run(whole, resume_tiny(broken))


# ---- killed at random moments, with groups under way


class DiesAt:
    """SIGKILL at moment number `moment`: an event, a line of metrics or a file of a checkpoint reaching the disk."""

    def __init__(self, moment: int) -> None:
        self.left = moment

    def __call__(self, controller: Controller) -> None:
        run_dir = controller.recorder.run_dir
        self.count(run_dir.events, "append")
        self.count(run_dir.metrics, "append")
        self.count(checkpoint_module, "_flush")

    def count(self, holder: Any, name: str) -> None:
        plain: Callable[..., Any] = getattr(holder, name)

        def counted(*args: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args)

        setattr(holder, name, counted)


def one_in_five_is_slow(controller: Controller) -> None:
    plain = controller.rollout.produce

    async def produce(member: Member) -> Trajectory:
        if int(member.prompt.prompt_id.rpartition("/")[2]) % 5 == 0:
            for _ in range(300):
                await asyncio.sleep(0)
        return await plain(member)

    controller.rollout.produce = produce


ASYNC = {
    "run.schedule": "separate_async",
    "run.groups_per_step": 3,
    "data.sources": [{"task": "addition", "num_prompts": 40}],
    "data.num_epochs": 1,
    "buffer.max_staleness_steps": 2,
    "buffer.max_running_groups": 6,
    "checkpoint.every_steps": 2,
}


def start_and_die(folder: Path, moment: int, overrides: dict[str, Any]) -> None:
    run_tiny(folder, num_steps=100, faults=[one_in_five_is_slow, DiesAt(moment)], **overrides)


def start_and_die_in_the_first_checkpoint(folder: Path) -> None:
    run_tiny(folder, num_steps=100, faults=[dies_in_a_checkpoint], **EXACT)


def dies_in_a_checkpoint(controller: Controller) -> None:
    """When its first file is written and reaches the disk."""
    DiesAt(1).count(checkpoint_module, "_flush")


def resume_and_die(folder: Path, moment: int) -> None:
    resume_tiny(folder, faults=[one_in_five_is_slow, DiesAt(moment)])


KILLED = {
    "admission": {"buffer.order": "admission"},
    "arrival": {"buffer.order": "arrival"},
    "lending": {"lending.is_on": True, "lending.margin": 0.0},
}


@pytest.mark.parametrize("kind", KILLED)
def test_br053_kills_at_random_moments_skip_no_prompt_and_repeat_none(tmp_path: Path, kind: str) -> None:
    """40 prompts in steps of 3, 6 in flight: 14 steps whatever happens, each prompt trained in one of them."""
    draw, log = random.Random(kind), tmp_path / "log"
    exit_code = in_fresh_process(start_and_die, tmp_path, draw.randint(1, 70), ASYNC | KILLED[kind], log=log)
    num_kills = 0
    while exit_code == -signal.SIGKILL:
        num_kills += 1
        moment = draw.randint(1, 70) if num_kills < 10 else 10**9
        exit_code = in_fresh_process(resume_and_die, tmp_path / "run", moment, log=log)
    assert exit_code == 0, log.read_text()
    assert num_kills >= 6  # the tenth is the last, unless the run came to its end before
    run = RunResult(tmp_path / "run")
    assert Counter(i for step in run.trained for i in step) == {f"addition/{n}": 1 for n in range(40)}
    assert [len(step) for step in run.trained] == [3] * 13 + [1]
    assert [m["training/global_step"] for m in run.metrics] == list(range(14))
    last = run.metrics[-1]
    assert last["buffer/num_trained"] == 40
    assert last["buffer/num_admitted"] == sum(
        last[f"buffer/num_{state}"] for state in ("running", "finished", "failed", "trained", "evicted")
    )


def test_killed_before_the_first_checkpoint_it_starts_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert in_fresh_process(start_and_die_in_the_first_checkpoint, tmp_path, log=log) == -signal.SIGKILL
    assert (tmp_path / "run" / "checkpoints" / "step_0.partial").is_dir()
    assert resume_tiny(tmp_path / "run", **{"run.num_steps": 2}).num_steps == 2


def test_a_version_name_is_never_given_to_other_weights(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Published every second step, saved after each: the weights of step 1 had no version when the run died."""
    overrides = {
        "run.schedule": "separate_async",
        "buffer.max_staleness_steps": 1,
        "sync.every_steps": 2,
        "checkpoint.every_steps": 1,
    }
    with pytest.raises(DataError):
        tiny_run(num_steps=4, faults=[Fails(update=2)], **overrides)
    run = resume_tiny(tmp_path / "run")
    versions = [event["weight_version"] for event in run.events_of("publication")]
    assert versions == [0, 1, 2, 3]  # 0 before the kill, 1 on resuming, then after steps 1 and 3
