"""What a user meets before and around the first step: where rewards are found, what is said, what is planned."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollbook.controller import calibrate
from rollbook.controller.begin import _topology
from rollbook.controller.entry import resume_run, start_run
from rollbook.controller.loop import Controller
from rollbook.controller.schedule import SCHEDULES
from rollbook.envs.config import RewardConfig
from rollbook.envs.rewards.functions import REWARDS, prepare
from rollbook.envs.rewards.math_verify import _library
from rollbook.envs.rewards.result import RewardResult
from rollbook.envs.rewards.scorer import Scorer
from rollbook.envs.rewards.self_test import require_proven, self_test
from rollbook.errors import ConfigError
from rollbook.observe import core_waits
from rollbook.types import Failure, FailureKind, Prompt
from tiny_run import RunResult, TinyRun, as_set, tiny_config, write_tiny


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_reward_module_is_found_beside_the_config_and_again_by_a_resume_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    name = f"beside_the_config_{isolation}"
    (tmp_path / "job").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "job" / f"{name}.py").write_text(
        "def half(response, task, **_):\n    return len(response) / 8\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    path = write_tiny(tmp_path / "job", num_steps=1)
    overrides = as_set(
        {"reward.terms.0": {"function": f"{name}:half", "isolation": isolation, "is_tested": False}}
    )
    run = RunResult(start_run(path, overrides))
    assert f'search_path = ["{tmp_path / "job"}", "{tmp_path}"]' in (run.folder / "config.toml").read_text()
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path / "elsewhere")
    resume_run(run.folder, ["run.num_steps=2"])
    assert len(run.metrics) == 2


def test_a_reward_module_that_is_nowhere_is_reported_with_the_folders_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = write_tiny(tmp_path / "job")
    for isolation in ("thread", "process"):
        overrides = as_set({"reward.terms.0": {"function": "nowhere_at_all:f", "isolation": isolation}})
        with pytest.raises(ConfigError) as refused:
            start_run(path, overrides)
        assert f"searched: {tmp_path / 'job'}, {tmp_path}, PYTHONPATH" in refused.value.what
        assert "put nowhere_at_all.py beside the config" in refused.value.remedy


def test_libraries_of_built_in_scorers_are_loaded_before_the_first_call() -> None:
    """A call's deadline is for the call; imports take seconds on a busy machine."""
    heavy = {name for name, built_in in REWARDS.items() if built_in.prepare is not None}
    assert heavy == {"math_verify", "reasoning_gym"}
    prepare("math_verify")
    assert _library.cache_info().currsize == 1
    prepare("reasoning_gym")
    assert "reasoning_gym.factory" in sys.modules
    prepare("exact")
    prepare("some.module:function")


class Failing(Scorer):
    """A scorer whose grader is broken, with a long message."""

    async def score(self, response: str, prompt: Prompt) -> RewardResult:
        message = "KeyError: 'tests' " + "x" * 900 + "\nsecond line"
        return RewardResult(reward=None, failure=Failure(kind=FailureKind.REWARD, message=message))


async def test_a_failed_self_test_is_one_example_and_a_count() -> None:
    prompts = [
        Prompt(
            prompt_id=f"{source}/{n}",
            prompt_ids=np.zeros(1, np.int32),
            source=source,
            task={"answer": f"{n}"},
        )
        for source in ("code", "maths")
        for n in range(4)
    ]
    tests = await self_test(Failing(RewardConfig()), prompts)
    with pytest.raises(ConfigError) as refused:
        require_proven(tests)
    what = refused.value.what
    assert what.count("KeyError") == 1
    assert "the reference answer '0' of code/0 fails: KeyError: 'tests'" in what
    assert "(4 of 4 reference answers); and so for 'maths'" in what
    assert len(what) < 400
    assert "second line" not in what


def test_a_reward_that_never_varies_is_a_finding_before_the_first_step(tiny_run: TinyRun) -> None:
    run = tiny_run(num_steps=1, **{"reward.terms.0.function": "tiny_rewards:zero", "plan.is_on": True})
    (finding,) = run.events_of("finding")
    assert finding["rule"] == "one_reward"
    assert finding["summary"] == ("all 8 rewards of the first 4 groups are 0: there is nothing to learn from")
    kinds = [event["kind"] for event in run.events]
    first_step = next(i for i, e in enumerate(run.events) if e["kind"] == "span_open" and e["name"] == "step")
    assert kinds.index("finding") < first_step


def test_without_a_plan_the_finding_comes_with_the_first_groups_and_a_starved_step_counts_its_losses(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    with pytest.raises(
        Exception, match="lost 12 .*: 12 flat .score in all their members 0: 12.; 12 groups were admitted"
    ) as starved:
        tiny_run(
            **{
                "reward.terms.0.function": "tiny_rewards:zero",
                "algorithm.filter.drop_flat": True,
                "algorithm.filter.refill": True,
                "buffer.max_refills_per_step": 8,
            }
        )
    assert "gives one value to everything" in str(starved.value)
    run = RunResult(tmp_path / "run")
    assert len(run.events_of("finding")) == 1
    assert run.events_of("step_failed")


def test_every_stage_that_takes_time_is_planned_also_those_of_some_steps(tiny_run: TinyRun) -> None:
    """Evaluation and checkpoint stand in plan.json as their share of a mean step, and beside each measurement."""
    run = tiny_run(
        num_steps=2,
        **{
            "plan.is_on": True,
            "data.held_out_frac": 0.2,
            "eval.num_prompts": 2,
            "eval.every_steps": 2,
            "checkpoint.every_steps": 1,
        },
    )
    stages = json.loads((run.folder / "plan.json").read_text())["stages"]
    (plan,) = run.events_of("plan")
    for stage, suffix, num_due in (("eval", "testing", 1), ("checkpoint", "save_checkpoint", 2)):
        expected = [m[f"expected_s/{suffix}"] for m in run.metrics if f"timing_s/{suffix}" in m]
        assert len(expected) == num_due
        assert stages[stage]["seconds"] == pytest.approx(expected[0] * num_due / 2)
        assert plan["stages"][stage] == stages[stage]["seconds"]
    assert plan["topology"] == "sync: 1 native engine on cpu, in turn with the trainer on cpu"
    again = RunResult(resume_run(run.folder, ["run.num_steps=3"]))
    assert again.metrics[2]["expected_s/save_checkpoint"] > 0  # from the checkpoint written last


def test_ranks_of_the_trainer_and_their_processes_stand_in_the_plan() -> None:
    config = tiny_config(
        **{"run.schedule": "separate_async", "cluster": {"kind": "ray", "num_trainer_ranks": 2}}
    )
    controller: Any = SimpleNamespace(config=config, schedule=SCHEDULES["separate_async"])
    assert _topology(controller) == (
        "separate_async: 1 native engine on cpu, beside the trainer's 2 ranks on cpu, in processes on Ray"
    )


def test_a_step_is_expected_to_take_what_its_stages_are_and_its_rate_counts_what_was_generated(
    tiny_run: TinyRun,
) -> None:
    """Filters leave a step less to train, or nothing; the engine generated what they dropped."""
    run = tiny_run(
        num_steps=4,
        **{
            "plan.is_on": True,
            "algorithm.filter.drop_flat": True,
            "algorithm.filter.refill": False,
            "reward.terms.0.function": "tiny_rewards:first_is_low",
        },
    )
    plan = json.loads((run.folder / "plan.json").read_text())
    host, workload = plan["machine"]["coefficients"]["host"], plan["workload"]
    num_dropped = 0
    for step, metrics in enumerate(run.metrics):
        stages = {n: v for n, v in metrics.items() if n.startswith("expected_s/") and n != "expected_s/step"}
        stages.pop("expected_s/testing", None)  # not part of the step
        # Between the stages every trajectory is reported, with the texts of new tokens; what is trained, with its gap
        # to the engine as well.
        other_s = host["report_s"] * workload["num_groups"] * workload["group_size"] + host["texts_s"]
        other_s += host["report_trained_s"] * metrics.get("batch/num_sequences", 0)
        if "batch/num_sequences" not in metrics:
            other_s = plan["stages"]["other"]["seconds"]
        assert metrics["expected_s/step"] == pytest.approx(sum(stages.values()) + other_s)
        rows = run.trajectories(step)
        num_dropped += sum(row["loss_mask"] is None for row in rows)
        generated = sum(turn["num_response_tokens"] for row in rows for turn in row["turns"])
        rate = metrics["perf/tokens_per_s/gen"]
        assert rate * metrics["timing_s/gen"] == pytest.approx(generated)
    assert num_dropped > 0


def test_the_gap_is_of_the_sequences_that_trained_where_others_have_no_loss_token(tiny_run: TinyRun) -> None:
    """One update on policy notes the trainer's logprobs as it trains; a masked response passes it by."""
    run = tiny_run(num_steps=1, **{"algorithm.filter.mask_truncated": True, "rollout.group_size": 8})
    (step,) = run.metrics
    assert 0 < step["response_length/clip_ratio"] < 1
    assert 0 < step["training/logprob_gap/mean"] < 1e-4
    assert step["training/rollout_probs_diff_max"] < 1e-4


def test_sides_that_work_at_once_are_measured_at_once_and_leave_the_step_a_wait(tiny_run: TinyRun) -> None:
    """The rollout of an asynchronous step is what it waits, and its stages add up to the step, as in turns."""
    run = tiny_run(
        num_steps=2,
        **{"plan.is_on": True, "run.schedule": "separate_async", "buffer.max_staleness_steps": 1},
    )
    plan = json.loads((run.folder / "plan.json").read_text())
    contention = plan["machine"]["coefficients"]["contention"]
    assert set(contention) == {"engine", "trainer", "publication"}
    assert min(contention.values()) >= 1 and np.isfinite(list(contention.values())).all()
    assert plan["stages"]["rollout"]["low"] == 0.0  # perhaps no wait at all
    (event,) = run.events_of("plan")
    in_step = [name for name in plan["stages"] if name not in ("eval", "checkpoint")]
    expected_s = sum(plan["stages"][name]["seconds"] for name in in_step)
    assert event["step_s"] == pytest.approx(expected_s + plan["stages"]["checkpoint"]["seconds"])


def test_sides_that_take_turns_do_not_slow_each_other(tiny_run: TinyRun) -> None:
    run = tiny_run(num_steps=1, **{"plan.is_on": True})
    plan = json.loads((run.folder / "plan.json").read_text())
    assert plan["machine"]["coefficients"]["contention"] is None
    assert plan["stages"]["rollout"]["low"] > 0


def test_a_plan_holds_how_busy_the_machine_was_that_it_was_measured_on(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_waits, "longest_wait_s", lambda before, after: 0.25)
    run = tiny_run(num_steps=1, **{"plan.is_on": True})
    (span,) = [event for event in run.events_of("span") if event["name"] == "plan"]
    plan = json.loads((run.folder / "plan.json").read_text())
    assert plan["core_wait_frac"] == pytest.approx(0.25 / span["duration_s"])


def test_what_a_run_kept_from_the_collector_is_given_back_at_its_end(tiny_run: TinyRun) -> None:
    """Else each run of a process would keep its models."""
    tiny_run(num_steps=1)
    assert gc.get_freeze_count() == 0


def test_what_a_first_step_imports_is_kept_from_the_collector_too(tiny_run: TinyRun) -> None:
    """A full collection goes through what steps make, not through modules: 25 ms in some steps and none in others."""
    frozen: list[int] = []

    def note(controller: Controller) -> None:
        report = controller.report

        async def noting(*arguments: Any) -> None:
            frozen.append(gc.get_freeze_count())
            await report(*arguments)

        controller.report = noting  # type: ignore[method-assign]

    tiny_run(num_steps=2, faults=[note])
    assert 0 < frozen[0] < frozen[1]


@pytest.mark.parametrize("is_on", [False, True])
def test_the_collector_is_told_once_before_the_first_step_and_once_after_it(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    """Each goes through everything that was imported, which takes as long as a small step."""
    told: list[int] = []
    plain = gc.freeze

    def freeze() -> None:
        told.append(1)
        plain()

    monkeypatch.setattr(gc, "freeze", freeze)
    monkeypatch.setattr(calibrate, "ROUNDS_S", 0.1)
    tiny_run(num_steps=1, **{"plan.is_on": is_on})
    assert len(told) == 2
