"""A stage is judged by the work it got, not by the work the plan foresaw."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollbook.cli.main import main
from rollbook.planner.expected import Expectation, Expected, expectation_of_request
from rollbook.planner.options import PlanOptions
from rollbook.planner.reconcile import reconcile
from rollbook.planner.reconciliation import Reconciliation
from rollbook.planner.show_reconciliation import show_reconciliation
from rollbook.planner.words import seconds


def test_a_filter_that_leaves_half_the_batch_is_no_gain_in_speed() -> None:
    """Planned 2 s of training; half the sequences were flat, so 1 s was expected of what was left, and took 1 s."""
    stages = {
        "rollout": Expected(seconds=4.0, low=3.0, high=5.0),
        "train": Expected(seconds=2.0, low=1.6, high=2.4),
    }
    means = {
        "timing_s/step": 5.0,
        "timing_s/gen": 4.0,
        "timing_s/update_actor": 1.0,
        "expected_s/gen": 4.0,
        "expected_s/update_actor": 1.0,
    }
    result = reconcile(Expectation(source="plan.json", stages=stages, step_s=6.0), means, source="run")
    train = next(stage for stage in result.stages if stage.stage == "train")
    assert train.planned is not None and train.expected is not None
    assert (train.expected.seconds, train.expected.low, train.expected.high) == (1.0, 0.8, 1.2)
    assert train.planned.seconds == 2.0
    assert (train.work_ratio, train.ratio) == (0.5, 1.0)  # other work; the machine as the ledger says
    assert result.step.expected is not None and result.step.planned is not None
    assert (result.step.expected.seconds, result.step.planned.seconds) == (5.0, 6.0)
    assert any("train 0.50 x" in note for note in result.notes)


def test_what_runs_between_the_spans_stands_against_its_own_plan() -> None:
    """A step of 10 s with 9 s in its stages: 1 s between them, of which 0.8 s were planned."""
    stages = {
        "train": Expected(seconds=9.0, low=8.0, high=10.0),
        "other": Expected(seconds=0.8, low=0.5, high=1.2),
    }
    expectation = Expectation(source="a plan", stages=stages, step_s=9.8)
    result = reconcile(expectation, {"timing_s/update_actor": 9.0, "timing_s/step": 10.0}, source="a log")
    other = next(s for s in result.stages if s.stage == "other")
    assert other.ratio == pytest.approx(1.25) and other.verdict == "as planned"
    assert not result.notes


def test_a_checkpoint_that_no_step_had_is_not_expected_between_the_stages() -> None:
    """A run of ours that was stopped before its first one; another's log may not time what it does."""
    stages = {
        "train": Expected(seconds=9.0, low=8.0, high=10.0),
        "checkpoint": Expected(seconds=0.5, low=0.3, high=0.7),
        "other": Expected(seconds=0.8, low=0.5, high=1.2),
    }
    expectation = Expectation(source="a plan", stages=stages, step_s=10.3)
    means = {"timing_s/update_actor": 9.0, "timing_s/step": 10.0}
    own = means | {"expected_s/update_actor": 9.0, "expected_s/step": 9.8}
    other = {
        name: next(s for s in reconcile(expectation, held, source="a log").stages if s.stage == "other")
        for name, held in (("ours", own), ("another's", means))
    }
    assert other["ours"].expected is not None and other["another's"].expected is not None
    assert other["ours"].expected.seconds == pytest.approx(0.8)
    assert other["another's"].expected.seconds == pytest.approx(1.3)
    result = reconcile(expectation, own, source="a run")
    assert result.step.planned is not None and result.step.planned.seconds == pytest.approx(9.8)
    assert "none of these steps had: checkpoint" in result.notes


def test_other_work_and_a_slower_machine_are_two_causes() -> None:
    """Responses twice as long as planned (2 s of rollout for 1 s) on a machine that took 1.5 times what they need."""
    stages = {"rollout": Expected(seconds=1.0, low=0.9, high=1.1)}
    means = {"timing_s/step": 3.0, "timing_s/gen": 3.0, "expected_s/gen": 2.0}
    rollout = reconcile(
        Expectation(source="plan.json", stages=stages, step_s=1.0), means, source="run"
    ).stages[0]
    assert (rollout.work_ratio, rollout.ratio, rollout.verdict) == (2.0, 1.5, "slower")
    assert rollout.beyond_s == pytest.approx(1.0)
    assert rollout.as_json()["planned_s"] == 1.0 and rollout.as_json()["expected_s"] == 2.0


def test_what_the_step_expects_beyond_its_stages_is_expected_of_the_time_between_them() -> None:
    """Planned 0.8 s between the stages; of this step's work 10.2 s were expected, 9.8 s of them in its stages."""
    stages = {
        "train": Expected(seconds=9.0, low=8.0, high=10.0),
        "other": Expected(seconds=0.8, low=0.5, high=1.2),
    }
    means = {
        "timing_s/update_actor": 9.8,
        "timing_s/step": 10.2,
        "expected_s/update_actor": 9.8,
        "expected_s/step": 10.2,
    }
    result = reconcile(Expectation(source="a plan", stages=stages, step_s=9.8), means, source="a log")
    other = next(s for s in result.stages if s.stage == "other")
    assert other.expected is not None and other.expected.seconds == pytest.approx(0.4)
    assert other.ratio == pytest.approx(1.0)


def test_a_thousandth_of_a_step_is_no_difference() -> None:
    stages = {
        "rollout": Expected(seconds=1.0, low=0.9, high=1.1),
        "to_trainer": Expected(seconds=1e-4, low=7e-5, high=1.5e-4),
    }
    means = {"timing_s/step": 1.0, "timing_s/gen": 0.999, "timing_s/switch_to_trainer": 8e-4}
    result = reconcile(Expectation(source="a plan", stages=stages, step_s=1.0), means, source="a log")
    assert {s.stage: s.verdict for s in result.stages} == {
        "rollout": "as planned",
        "to_trainer": "too short to judge",
    }


def busy(own_core_frac: float, **waited_s: float) -> Reconciliation:
    """Training takes 5 s where 2 were expected, generation 4 s as planned."""
    stages = {
        "rollout": Expected(seconds=4.0, low=3.0, high=5.0),
        "train": Expected(seconds=2.0, low=1.6, high=2.4),
    }
    means = {
        "timing_s/step": 9.0,
        "timing_s/gen": 4.0,
        "timing_s/update_actor": 5.0,
        "host/own_core_frac": own_core_frac,
        **{f"core_wait_s/{name}": value for name, value in waited_s.items()},
    }
    return reconcile(Expectation(source="plan.json", stages=stages, step_s=6.0), means, source="run")


def test_a_stage_that_waited_for_a_core_is_not_the_one_that_deserves_work() -> None:
    """5 s of which 2.8 s were a wait: 2.2 s are within the range of 2 s. Nothing is to be won in the stage."""
    result = busy(0.4, update_actor=2.8, gen=0.1)
    train = next(stage for stage in result.stages if stage.stage == "train")
    assert train.verdict == "waited for a core" and train.own_beyond_s == 0
    assert result.step.verdict == "waited for a core"
    assert [d.stage for d in result.deserving] == ["rollout", "train"]
    assert "waited 2.8 s for a core" in result.deserving[1].why
    assert result.notes[0] == (
        "the machine was busy: stages waited for a core, of their seconds train 56.0 %; the run itself used 40.0 % of "
        "them, others had the rest: measure again on a quiet machine"
    )


def test_what_a_wait_for_cores_does_not_explain_stays_with_the_stage() -> None:
    """Of the 3 s beyond the plan it waited 1 s; 2 s are its own."""
    result = busy(0.95, update_actor=1.0)
    assert (result.deserving[0].stage, result.deserving[0].seconds) == ("train", 2.0)
    assert "1.0 s of it waiting for a core" in result.deserving[0].why
    assert "the run's own threads had 95.0 %" in result.notes[0]


def test_a_quiet_machine_is_not_mentioned() -> None:
    result = busy(0.5, update_actor=0.01)
    assert not result.notes and result.deserving[0].stage == "train"
    assert "waiting for a core" not in result.deserving[0].why


def test_an_account_without_a_range_is_told_by_its_ratio_alone() -> None:
    """The paper account: no stage is slower or faster than arithmetic, and what took longer deserves work."""
    request = PlanOptions(model="Qwen3-8B", num_gpus="16", response_tokens="1k", assume="paper").request()
    expectation, candidate = expectation_of_request(request)
    train_s = expectation.stages["train"].seconds
    means = {"timing_s/step": 3 * train_s, "timing_s/update_actor": 2 * train_s}
    result = reconcile(expectation, means, source="a log")
    train = next(stage for stage in result.stages if stage.stage == "train")
    assert {train.verdict, result.step.verdict} == {"no range"} and train.ratio == pytest.approx(2.0)
    assert result.deserving[0].stage == "train" and result.deserving[0].seconds == pytest.approx(train_s)
    assert any("its seconds have no range" in note for note in result.notes)
    assert candidate.expected == seconds(candidate.step_s)
    told = StringIO()
    show_reconciliation(result, Console(file=told, width=200))
    assert "none" in told.getvalue() and "± 0 %" not in told.getvalue()


@pytest.mark.parametrize("planned_s", [0.0, 4e-15])
@pytest.mark.parametrize(
    ("step_s", "why"), [(30.0, "engines are likely slower"), (19.0, "trainer is likely faster")]
)
def test_a_wait_where_none_was_planned_has_no_ratio(planned_s: float, step_s: float, why: str) -> None:
    """20 s of training beside engines that keep up: what the trainer waits is told in words, with the side to blame."""
    stages = {
        "rollout": Expected(seconds=planned_s, low=planned_s / 1.5, high=planned_s * 1.5),
        "train": Expected(seconds=20.0, low=16.0, high=24.0),
    }
    expectation = Expectation(source="a plan", stages=stages, step_s=20.0)
    means = {"timing_s/step": step_s, "timing_s/gen": 10.0, "timing_s/update_actor": step_s - 10.0}
    result = reconcile(expectation, means, source="a log")
    wait = next(stage for stage in result.stages if stage.stage == "rollout")
    assert (wait.verdict, wait.ratio, wait.work_ratio) == ("none planned", None, None)
    assert wait.beyond_s == pytest.approx(10.0)
    first = result.deserving[0]
    assert first.stage == "rollout" and "waits 10.0 s for trajectories, none was planned" in first.why
    assert why in first.why
    told = StringIO()
    show_reconciliation(result, Console(file=told, width=200))
    row = next(line for line in told.getvalue().splitlines() if line.strip().startswith("rollout"))
    assert row.split() == ["rollout", "none", "none", "10.0", "s", "none", "planned"]
    assert "µs" not in told.getvalue() and "0.0 s" not in first.why.replace("10.0 s", "")


def test_a_wait_that_the_steps_expected_is_judged_by_that() -> None:
    """None was planned before the run; the steps expected 4 s of the work they got, in the step's range."""
    stages = {
        "rollout": Expected(seconds=0.0, low=0.0, high=0.0),
        "train": Expected(seconds=20.0, low=16.0, high=24.0),
    }
    expectation = Expectation(source="a plan", stages=stages, step_s=20.0)
    means = {
        "timing_s/step": 24.5, "timing_s/gen": 4.5, "timing_s/update_actor": 20.0,
        "expected_s/step": 24.0, "expected_s/gen": 4.0, "expected_s/update_actor": 20.0,
    }  # fmt: skip
    result = reconcile(expectation, means, source="a run")
    wait = next(stage for stage in result.stages if stage.stage == "rollout")
    assert (wait.verdict, wait.ratio, wait.work_ratio) == ("as planned", 1.125, None)
    assert wait.expected is not None and wait.expected.high == pytest.approx(4.8)
    assert result.step.expected is not None and result.step.expected.seconds == pytest.approx(24.0)


def test_a_wait_as_short_as_planned_is_as_planned() -> None:
    stages = {
        "rollout": Expected(seconds=0.0, low=0.0, high=0.0),
        "train": Expected(seconds=9.0, low=8.0, high=10.0),
    }
    expectation = Expectation(source="a plan", stages=stages, step_s=9.0)
    for waited_s, verdict in ((0.0, "as planned"), (0.004, "too short to judge")):
        means = {"timing_s/step": 9.0, "timing_s/gen": waited_s, "timing_s/update_actor": 9.0 - waited_s}
        assert reconcile(expectation, means, source="a log").stages[0].verdict == verdict


def test_work_beyond_the_peak_is_not_the_work_of_the_log() -> None:
    stages = {"train": Expected(seconds=9.0, low=8.0, high=10.0, flops=2.7e15)}
    expectation = Expectation(source="a plan", stages=stages, step_s=9.0, peak_flops_per_s=1e15)
    for measured_s, is_told in ((1.0, True), (9.0, False)):
        result = reconcile(
            expectation, {"timing_s/update_actor": measured_s, "timing_s/step": measured_s}, source="a log"
        )
        assert any("would be 270 % of the peak" in note for note in result.notes) == is_told


def test_a_description_of_other_work_than_the_logs_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """512 x 8 trajectories of 2,048 tokens are 8.4 M; the log has 100 k and, in a second one, 8 M of them."""
    workload = tmp_path / "work.toml"
    workload.write_text(
        'model = "Qwen3-8B"\nnum_gpus = 16\nprompts = 512\ngroup_size = 8\nprompt_tokens = 1024\n'
        "response_tokens = 1024\n"
    )
    for tokens, is_told in ((100_000, True), (8_000_000, False)):
        log = tmp_path / f"{tokens}.jsonl"
        data = {"timing_s/step": 180.0, "timing_s/gen": 60.0, "timing_s/update_actor": 70.0,
                "perf/total_num_tokens": tokens}  # fmt: skip
        log.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step in (1, 2, 3)))
        with pytest.raises(SystemExit, match="0"):
            main(["reconcile", str(log), "--workload", str(workload), "--json"])
        notes = json.loads(capsys.readouterr().out)["notes"]
        assert (
            any("a step of the log has 100.0 k tokens, the described one 8.4 M" in n for n in notes)
            == is_told
        )


@pytest.fixture
def described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """The reconciliation of a log with these readings, described as 512 x 8 of 1,024 + 2,048 tokens and more lines."""

    def reconciled(*lines: str, **logged: float) -> dict[str, Any]:
        data = {"timing_s/step": 180.0, "timing_s/gen": 60.0, "timing_s/update_actor": 70.0,
                "timing_s/update_weights": 5.0}  # fmt: skip
        data |= {name.replace("_mean", "/mean"): value for name, value in logged.items()}
        log, workload = tmp_path / "log.jsonl", tmp_path / "work.toml"
        log.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step in (1, 2, 3)))
        base = ('model = "Qwen3-8B"', "num_gpus = 16", "group_size = 8", "response_tokens = 2048", *lines)
        workload.write_text("\n".join(base))
        with pytest.raises(SystemExit, match="0"):
            main(["reconcile", str(log), "--workload", str(workload), "--json"])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found | {"stages": {stage["stage"]: stage for stage in found["stages"]}}

    return reconciled


def test_a_logs_own_lengths_are_the_work_that_another_systems_steps_got(
    described: Callable[..., dict[str, Any]],
) -> None:
    """Half the response: generation and training are expected to be shorter than described, publications are not; and
    the expectation is that of a description with the log's lengths."""
    as_logged = described(response_length_mean=1024.0)
    stages = as_logged["stages"]
    assert 0.3 < stages["rollout"]["work_ratio"] < 0.8 and 0.5 < stages["train"]["work_ratio"] < 0.8
    assert stages["sync"]["work_ratio"] == pytest.approx(1.0)
    assert any("its work is with response_tokens = 1024" in note for note in as_logged["notes"])
    assert as_logged["step"]["expected_s"] < as_logged["step"]["planned_s"]


@pytest.mark.parametrize(
    ("lines", "response_tokens"),
    [
        ((), 2000.0),  # as described, but for chance
        (
            ("turns = 3", "observation_tokens = 500"),
            1024.0,
        ),  # what the environment said is in the log's lengths
    ],
)
def test_lengths_that_say_nothing_of_other_work_leave_it_as_described(
    described: Callable[..., dict[str, Any]], lines: tuple[str, ...], response_tokens: float
) -> None:
    stages = described(*lines, response_length_mean=response_tokens)["stages"]
    assert stages["rollout"]["work_ratio"] == stages["train"]["work_ratio"] == 1.0


def test_a_log_whose_responses_the_description_has_no_room_for_is_told(
    described: Callable[..., dict[str, Any]],
) -> None:
    found = described("max_response_tokens = 3072", response_length_mean=5000.0)
    assert found["stages"]["rollout"]["work_ratio"] == 1.0
    assert any("measured response_tokens = 5000, which" in note and "3072" in note for note in found["notes"])


def test_a_log_of_fewer_sequences_is_judged_by_as_many(
    described: Callable[..., dict[str, Any]],
) -> None:
    """An eighth of the tokens at the same lengths: an eighth of the prompts is what stages are judged by."""
    found = described(**{"perf/total_num_tokens": 64 * 8 * (1024 + 2048.0)})
    assert any("its work is with prompts = 64 of group_size 8" in note for note in found["notes"])
    assert 0.05 < found["stages"]["train"]["work_ratio"] < 0.5
    assert found["stages"]["rollout"]["work_ratio"] < 1
    assert not any("no ratio tells" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("step_s", "verdict"), [(10.2, "as planned"), (14.0, "within that range"), (25.0, "slower")]
)
def test_a_step_half_again_as_long_is_not_called_as_planned(step_s: float, verdict: str) -> None:
    """Planned 10 s, give or take a factor of two."""
    stages = {"rollout": Expected(seconds=10.0, low=5.0, high=20.0)}
    means = {"timing_s/step": step_s, "timing_s/gen": step_s}
    result = reconcile(Expectation(source="a plan", stages=stages, step_s=10.0), means, source="a log")
    shown = Console(file=StringIO(), width=200)
    show_reconciliation(result, shown)
    assert isinstance(shown.file, StringIO)
    assert f": {step_s / 10:.2f} x, {verdict}." in shown.file.getvalue()
