"""Plan against measurement: our run directory, verl's and TRL's logs; figures worked by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbook.cli.main import main
from rollbook.errors import ConfigError, DataError
from rollbook.ledger.hardware import load_accelerator
from rollbook.planner.expected import Expectation, Expected, expectation_of_request, expectation_of_run
from rollbook.planner.measured import means_of
from rollbook.planner.options import PlanOptions, read_options
from rollbook.planner.reconcile import reconcile

PLANNED = {"rollout": (40.0, 2e12), "proximal": (5.0, 2e12), "train": (20.0, 6e12), "sync": (2.0, 0.0)}
"""Seconds and FLOPs; 67 s a step, 1e13 FLOPs."""
MEASURED = {"gen": 60.0, "old_log_prob": 5.0, "update_actor": 19.0, "update_weights": 6.0, "step": 92.0}


def expectation(peak: float = 1e12) -> Expectation:
    stages = {
        name: Expected(seconds=s, low=s / 1.2, high=s * 1.2, flops=f) for name, (s, f) in PLANNED.items()
    }
    return Expectation(source="a plan", stages=stages, step_s=67.0, peak_flops_per_s=peak)


def measured(**changes: float) -> dict[str, float]:
    return {f"timing_s/{k}": v for k, v in (MEASURED | changes).items()}


def run_directory(folder: Path, num_steps: int = 3, **machine: float) -> Path:
    plan = {
        "machine": machine,
        "stages": {
            name: {
                "seconds": s, "low": s / 1.2, "high": s * 1.2, "bytes": 0, "flops": f, "formula": "x",
                "source": "y",
            }
            for name, (s, f) in PLANNED.items()
        },
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan))
    lines = [
        json.dumps({"step": step, "data": measured() | {"response_length/mean": 9.0}})
        for step in range(num_steps)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "events.jsonl").write_text("")
    return folder


def test_stages_carry_ratio_and_verdict() -> None:
    result = reconcile(expectation(), measured(), source="a log")
    by_name = {s.stage: s for s in result.stages}
    assert by_name["rollout"].ratio == pytest.approx(1.5) and by_name["rollout"].verdict == "slower"
    assert by_name["train"].verdict == "as planned"
    assert by_name["sync"].ratio == pytest.approx(3.0)
    assert by_name["other"].measured_s == pytest.approx(2.0)  # 92 - 60 - 5 - 19 - 6
    assert by_name["other"].verdict == "not planned"
    assert result.step.ratio == pytest.approx(92 / 67)


def test_the_measured_waterfall_adds_up_to_the_peak() -> None:
    """1e13 FLOPs at 1e12 a second in 92 s: MFU 10/92. Rollout loses (60 - 2) / 92, 20/92 of it unplanned."""
    result = reconcile(expectation(), measured(), source="a log")
    losses = {loss.loss: loss for loss in result.waterfall}
    assert result.mfu_frac == pytest.approx(10 / 92)
    assert losses["rollout"].frac == pytest.approx(58 / 92)
    assert losses["rollout"].beyond_frac == pytest.approx(20 / 92)
    assert losses["train"].frac == pytest.approx(13 / 92) and losses["train"].beyond_frac == 0
    assert sum(loss.frac for loss in result.waterfall) + 10 / 92 == pytest.approx(1.0)


def test_without_a_peak_the_losses_are_shares_of_the_time() -> None:
    result = reconcile(expectation(peak=0.0), measured(), source="a log")
    assert result.mfu_frac is None
    assert sum(loss.frac for loss in result.waterfall) == pytest.approx(1.0)
    assert result.waterfall[0].loss == "rollout"
    assert result.waterfall[0].frac == pytest.approx(60 / 92)


def test_the_logs_own_mfu_stands_in_for_an_unknown_peak() -> None:
    means = measured() | {"perf/mfu/step": 0.25}
    result = reconcile(expectation(peak=0.0), means, source="a log")
    assert result.mfu_frac == pytest.approx(0.25)


def test_the_three_stages_that_lost_most_deserve_work_first() -> None:
    result = reconcile(expectation(), measured(), source="a log")
    assert [d.stage for d in result.deserving] == ["rollout", "sync", "other"]
    assert [d.seconds for d in result.deserving] == pytest.approx([20.0, 4.0, 2.0])
    assert "20.0 s lost" in result.deserving[0].why


def test_a_run_that_keeps_to_its_plan_is_told_what_the_plan_spends_most_on() -> None:
    means = measured(gen=40.0, update_weights=2.0, step=66.0)
    result = reconcile(expectation(), means, source="a log")
    assert [d.stage for d in result.deserving] == ["rollout", "train", "proximal"]
    assert all(d.why.startswith("as planned") for d in result.deserving)


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.0, 1.1, 1.19, 1.34, 3.0])
@pytest.mark.parametrize("stage", ["rollout", "proximal", "train", "sync"])
def test_table_waterfall_and_advice_say_one_thing(stage: str, factor: float) -> None:
    """A range of 1.2 x: what lies within is as planned everywhere, what lies beyond lost seconds everywhere."""
    suffix = {"rollout": "gen", "proximal": "old_log_prob", "train": "update_actor", "sync": "update_weights"}
    seconds = {suffix[name]: s * (factor if name == stage else 1.0) for name, (s, _) in PLANNED.items()}
    result = reconcile(expectation(), measured(**seconds, step=sum(seconds.values())), source="a log")
    verdict = next(s.verdict for s in result.stages if s.stage == stage)
    assert verdict == ("slower" if factor > 1.2 else "faster" if factor < 1 / 1.2 else "as planned")
    losses = {loss.loss: loss for loss in result.waterfall}
    assert (losses[stage].beyond_frac > 0) == (verdict == "slower")
    for deserving in result.deserving:
        its = next(s.verdict for s in result.stages if s.stage == deserving.stage)
        assert (" lost, " in deserving.why) == (its == "slower")
        assert its == "slower" or deserving.why.startswith(its)


def test_hand_overs_that_a_log_does_not_time_are_expected_inside_the_stages_that_hold_them() -> None:
    """Engines sleep in verl's `gen` and wake in its `update_weights`: 3 + 4 s, and 2 x 5 s of state, are no loss."""
    plan = expectation()
    held = {"rollout": 3.0, "train": 10.0, "sync": 4.0}
    hand_overs = {name: Expected(seconds=8.5, low=8.0, high=9.0) for name in ("to_trainer", "to_rollout")}
    colocated = replace(plan, stages=plan.stages | hand_overs, step_s=plan.step_s + 17.0, hand_over_s=held)
    seconds = {"gen": 43.0, "old_log_prob": 5.0, "update_actor": 30.0, "update_weights": 6.0, "step": 84.0}
    result = reconcile(colocated, measured(**seconds), source="a log of verl")
    assert {s.stage: s.verdict for s in result.stages} == dict.fromkeys(PLANNED, "as planned")
    assert sum(s.expected.seconds for s in result.stages if s.expected) == pytest.approx(
        84.0
    )  # once, not twice
    assert not any("counted as other" in note for note in result.notes)
    assert any("3.0 s in rollout, 10.0 s in train, 4.0 s in sync" in note for note in result.notes)


def test_hand_overs_that_a_log_times_stay_stages_of_their_own() -> None:
    plan = expectation()
    hand_overs = {name: Expected(seconds=8.5, low=8.0, high=9.0) for name in ("to_trainer", "to_rollout")}
    colocated = replace(plan, stages=plan.stages | hand_overs, hand_over_s={"rollout": 17.0})
    means = measured(switch_to_trainer=8.5, switch_to_rollout=8.5, step=109.0)
    by_name = {s.stage: s for s in reconcile(colocated, means, source="our run").stages}
    assert by_name["to_trainer"].verdict == by_name["to_rollout"].verdict == "as planned"
    assert by_name["rollout"].expected == plan.stages["rollout"]


def test_a_described_workload_knows_which_stage_holds_which_move() -> None:
    request = PlanOptions(model="Qwen3-8B", num_gpus="16", response_tokens="1k", idle_state="host").request()
    planned, candidate = expectation_of_request(request, mode="sync")
    assert set(planned.hand_over_s) >= {"rollout", "train", "sync"}
    assert sum(planned.hand_over_s.values()) == pytest.approx(candidate.account.seconds.switch)
    separated, _ = expectation_of_request(replace(request, split=(8, 8)), mode="separate_async")
    assert separated.hand_over_s == {}


def test_a_separated_rollout_side_loses_peak_that_no_stage_times() -> None:
    """Half of the GPUs generate beside the trainer: 0.5 - 2e12 / (1e12 x 92) of the peak is lost there."""
    stages = {"train": Expected(seconds=80.0, low=70.0, high=90.0, flops=6e12, num_gpus=4)}
    beside = Expectation(
        source="x", stages=stages, step_s=85.0, num_gpus=8, peak_flops_per_s=1e12, hidden_rollout_gpus=4,
        hidden_rollout_flops=2e12,
    )  # fmt: skip
    result = reconcile(beside, {"timing_s/step": 92.0, "timing_s/update_actor": 80.0}, source="y")
    losses = {loss.loss: loss.frac for loss in result.waterfall}
    assert losses["rollout GPUs"] == pytest.approx(0.5 - 2 / 92)
    assert losses["train"] == pytest.approx(40 / 92 - 6 / 92)
    assert sum(losses.values()) + 8 / 92 == pytest.approx(1.0)


def test_warm_up_steps_are_left_out_of_longer_runs() -> None:
    steps = np.arange(8)
    seconds = np.array([100.0, 50.0, 10, 10, 10, 10, 10, 10])
    of = means_of(steps, {"timing_s/step": seconds}, first=None, last=None)
    assert (of.means["timing_s/step"], of.first_step, of.last_step, of.num_steps) == (10.0, 2, 7, 6)
    of = means_of(steps, {"timing_s/step": seconds}, first=0, last=1)
    assert (of.means["timing_s/step"], of.first_step, of.num_steps) == (75.0, 0, 2)


def test_a_stage_of_some_steps_only_counts_as_zero_in_the_others() -> None:
    steps = np.arange(4)
    values = {
        "timing_s/step": np.full(4, 10.0),
        "timing_s/save_checkpoint": np.array([np.nan, np.nan, np.nan, 8.0]),
    }
    means = means_of(steps, values, first=0, last=None).means
    assert means["timing_s/save_checkpoint"] == 2.0


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(DataError, match="no timed step"):
        means_of(np.arange(3), {"timing_s/step": np.ones(3)}, first=7, last=9)
    with pytest.raises(DataError, match="times no step"):
        means_of(np.arange(3), {"actor/loss": np.ones(3)}, first=0, last=None)


def test_the_expectation_of_a_run_is_its_plan_json(tmp_path: Path) -> None:
    found = expectation_of_run(run_directory(tmp_path, peak_flops_per_s=1e12))
    assert found.step_s == 67.0 and found.peak_flops_per_s == 1e12
    assert found.stages["train"].flops == 6e12


@pytest.mark.parametrize(("core_wait_frac", "is_told"), [(0.4, True), (0.02, False)])
def test_a_plan_that_was_measured_on_a_busy_machine_says_so(
    tmp_path: Path, core_wait_frac: float, is_told: bool
) -> None:
    plan = run_directory(tmp_path) / "plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"core_wait_frac": core_wait_frac}))
    found = expectation_of_run(tmp_path)
    assert any("waited for a core 40.0 % of that time" in note for note in found.notes) == is_told


def test_a_reward_that_hides_behind_generation_is_not_part_of_the_expected_step(tmp_path: Path) -> None:
    run_directory(tmp_path)
    path = tmp_path / "plan.json"
    plan = json.loads(path.read_text())
    plan["stages"]["reward"] = {"seconds": 30.0, "low": 20.0, "high": 40.0}
    path.write_text(json.dumps(plan))
    assert expectation_of_run(tmp_path).step_s == 67.0


def _of(workload: Path) -> Expectation:
    """What the file describes, with lengths of 500 tokens."""
    values = {**read_options(workload), "response_tokens": "500"}
    return expectation_of_request(PlanOptions(**values).request(), mode="sync")[0]


@pytest.mark.parametrize("reward", ["model", "generative"])
def test_the_stages_of_a_workload_add_up_to_the_ledgers_step(reward: str) -> None:
    options = PlanOptions(model="Qwen3-8B", num_gpus="16", prompts="64", algorithm="ppo", reward=reward)
    found, candidate = expectation_of_request(options.request(), mode="sync")
    assert sum(s.seconds for s in found.stages.values()) == pytest.approx(candidate.step_s)
    assert found.stages["other"].seconds == options.request().assumptions.base_s(64 * 16)
    assert {"rollout", "proximal", "reference", "values", "train", "critic", "sync"} <= set(found.stages)
    assert sum(s.flops for s in found.stages.values()) == pytest.approx(candidate.account.flops.total)


def test_of_a_separated_mode_the_rollout_stage_is_the_trainers_wait() -> None:
    options = PlanOptions(model="Qwen3-8B", num_gpus="16", prompts="64", split="8:8")
    found, candidate = expectation_of_request(options.request(), mode="separate_async")
    assert found.hidden_rollout_gpus == 8
    assert found.stages["rollout"].seconds < 0.8 * candidate.step_s
    with pytest.raises(ConfigError, match="without a split"):
        expectation_of_request(PlanOptions(model="Qwen3-8B", num_gpus="16").request(), mode="separate_async")


# -- the command


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["reconcile", *args])
    captured = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def test_reconcile_prints_a_run_of_ours(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, str(run_directory(tmp_path, peak_flops_per_s=1e12)))
    assert code == 0
    assert out.startswith("A step takes 92.0 s; planned were 67.0 s")
    assert "1.50" in out and "slower" in out and "the whole-step MFU" in out
    assert "1. rollout:" in out and "2. sync:" in out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80


def test_a_run_of_ours_is_compared_with_one_plan_at_a_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What its steps were expected to take is its own plan's: beside a workload it would mix two."""
    folder = run_directory(tmp_path)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["data"] |= {"expected_s/gen": 1.0, "expected_s/step": 2.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "w.toml"
    path.write_text('model = "Qwen3-8B"\nnum_gpus = 16\n')
    code, out, err = run(capsys, str(folder), "--workload", str(path), "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    assert all(stage["expected_s"] == stage["planned_s"] for stage in found["stages"])
    assert any("the run's own plan is left aside" in note for note in found["notes"])


def test_reconcile_json_names_every_stage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, out, _ = run(capsys, str(run_directory(tmp_path, num_steps=12)), "--json")
    data: dict[str, Any] = json.loads(out)
    assert data["steps"] == {"first": 2, "last": 11, "count": 10, "left_out": []}
    assert {s["stage"] for s in data["stages"]} == {"rollout", "proximal", "train", "sync", "other"}
    assert data["step"]["measured_s"] == pytest.approx(92.0)
    assert len(data["deserve_work"]) == 3
    assert any("peak is not known" in note for note in data["notes"])


WORKLOAD = """
model = "Qwen2.5-7B"
gpu = "H800"
num_gpus = 32
prompts = 512
group_size = 16
max_response_tokens = "16k"
reference = false
mode = "sync"
"""


def verl_log(path: Path) -> Path:
    lines = []
    for step in range(1, 10):
        data = {
            "training/global_step": step, "timing_s/step": 300.0, "timing_s/gen": 180.0, "timing_s/reward": 5.0,
            "timing_s/old_log_prob": 25.0, "timing_s/adv": 1.0, "timing_s/update_actor": 80.0,
            "timing_s/update_weights": 6.0, "response_length/mean": 4000.0, "prompt_length/mean": 200.0,
            "perf/throughput": 1000.0, "actor/grad_norm": 0.2, "critic/rewards/mean": 0.3,
        }  # fmt: skip
        lines.append(json.dumps({"step": step, "data": data}))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_reconcile_reads_verls_file_and_takes_missing_lengths_from_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    workload = tmp_path / "workload.toml"
    workload.write_text(WORKLOAD)
    log = verl_log(tmp_path / "verl.jsonl")
    code, out, err = run(capsys, str(log), "--workload", str(workload), "--json")
    assert code == 0, err
    data = json.loads(out)
    stages = {s["stage"]: s for s in data["stages"]}
    assert stages["rollout"]["planned_s"] > 0 and stages["train"]["planned_s"] > 0
    assert stages["rollout"]["measured_s"] == 180.0
    assert "response_tokens = 4000, as the log measured it" in data["notes"]
    losses = sum(loss["frac"] for loss in data["waterfall"])
    assert losses + data["mfu_frac"] == pytest.approx(1.0)


def test_what_the_reader_did_with_a_log_is_told_beside_its_account(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of two runs one is compared, a step without seconds is in no mean: neither goes unsaid."""
    workload, log = tmp_path / "workload.toml", verl_log(tmp_path / "verl.jsonl")
    workload.write_text(WORKLOAD)
    data = json.loads(log.read_text().splitlines()[0])["data"]
    rows = [
        {"step": step, "data": data | {"critic/rewards/mean": 0.1 * run_idx + 0.01 * step}}
        for run_idx in range(2)
        for step in range(1, 31)
    ]
    rows[-5]["data"]["timing_s/step"] = float("nan")
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    code, out, err = run(capsys, str(log), "--workload", str(workload), "--json")
    assert code == 0, err
    told = " ".join(json.loads(out)["notes"])
    assert "of the log: 2 runs in one log" in told
    assert "timing_s/step in 1 step" in told


@pytest.mark.parametrize(
    ("line", "option", "priced"),
    [
        ("", [], "verl"),
        ('assume = "default"', [], "default"),
        ("", ["--assume", "nemo"], "nemo"),
    ],
)
def test_a_log_is_compared_with_the_costs_of_the_loop_that_wrote_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, option: list[str], priced: str
) -> None:
    workload, log = tmp_path / "workload.toml", verl_log(tmp_path / "metrics.jsonl")
    workload.write_text(f"{WORKLOAD}\n{line}\n")
    code, out, _ = run(capsys, str(log), "--workload", str(workload), *option)
    assert code == 0 and f"assumptions {priced}." in " ".join(out.split())


def test_reconcile_reads_a_trl_state_with_nothing_but_step_times(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    history = [
        {"step": i, "loss": 0.1, "reward": 0.2, "grad_norm": 0.1, "learning_rate": 1e-6, "step_time": 40.0,
         "completions/mean_length": 500.0}
        for i in range(1, 6)
    ]  # fmt: skip
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    workload = tmp_path / "workload.toml"
    workload.write_text('model = "Qwen3-0.6B"\nnum_gpus = 8\nprompts = 32\ngroup_size = 8\n')
    code, out, err = run(capsys, str(tmp_path), "--workload", str(workload), "--json")
    assert code == 0, err
    data = json.loads(out)
    assert data["step"]["measured_s"] == 40.0 and data["step"]["ratio"] is not None
    assert any("not timed by the log" in note for note in data["notes"])
    # All that was planned is in the one row that was measured, and the FLOPs of the step are known all the same.
    (only,) = data["stages"]
    assert only["stage"] == "other" and only["planned_s"] == pytest.approx(data["step"]["planned_s"])
    assert only["verdict"] == data["step"]["verdict"] != "not planned"
    peak = 8 * load_accelerator("H100").peak("bfloat16")
    flops = data["mfu_frac"] * peak * 40.0
    assert flops == pytest.approx(sum(s.flops for s in _of(workload).stages.values()), rel=1e-6)


def test_mistakes_are_told_with_a_remedy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = verl_log(tmp_path / "verl.jsonl")
    code, _, err = run(capsys, str(log))
    assert code == 2 and "is a log of verl-file, which holds no plan" in err and "--workload" in err
    assert "Traceback" not in err and "plan.is_on" not in err
    bad = tmp_path / "bad.toml"
    bad.write_text('model = "Qwen3-8B"\nprompt = 3\n')
    code, _, err = run(capsys, str(log), "--workload", str(bad))
    assert code == 2 and "unknown key prompt" in err and "did you mean" in err
    code, _, err = run(capsys, str(tmp_path / "nothing"))
    assert code == 2 and "there is no" in err


@pytest.mark.parametrize(
    "line",
    [
        'reference = "no"', "reference = 1", "reward = 4", "gpu = true", "lengths = 5", "mini_batches = 1.5",
        "mini_batches = true", 'turns = "abc"', "prompts = [1]", "mode = 3",
    ],
)  # fmt: skip
def test_a_value_of_another_kind_in_a_workload_file_is_told(tmp_path: Path, line: str) -> None:
    path = tmp_path / "w.toml"
    path.write_text(f'model = "Qwen3-8B"\n{line}\n')
    with pytest.raises(ConfigError, match=line.split()[0]):
        read_options(path)


@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ('split = "8:8"', []), ("lend = 4.0", []), ("horizon = 3", []), ("checkpoint_every = 5", []),
        ('assume = "rollbook"', ["--assume", "paper"]), (None, ["--assume", "paper"]),
    ],
)  # fmt: skip
def test_what_changes_nothing_in_a_reconciliation_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str | None, extra: list[str]
) -> None:
    log = verl_log(tmp_path / "verl.jsonl")
    args = [str(log), *extra]
    if line is not None:
        path = tmp_path / "w.toml"
        path.write_text(f'model = "Qwen3-8B"\nnum_gpus = 16\n{line}\n')
        args += ["--workload", str(path)]
    code, _, err = run(capsys, *args)
    assert code == 2 and (line or "--assume").split()[0] in err and "leave" in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("num_gpus = 0", "num_gpus is 0, below 1"), ("rollout_tp = -1", "rollout_tp is -1"),
        ('gpu = "H900"', "did you mean"), ('mode = "foo"', "mode is 'foo'"), ("num_gpus = 12", "12 GPUs are not whole"),
        ("prompts = 1\ngroup_size = 2\nmini_batches = 4", "4 mini batches of 2 sequences"),
    ],
)  # fmt: skip
def test_a_senseless_value_of_a_workload_is_told_with_its_file_and_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, words: str
) -> None:
    log, path = verl_log(tmp_path / "verl.jsonl"), tmp_path / "w.toml"
    path.write_text(f'model = "Qwen3-8B"\n{line}\n')
    code, _, err = run(capsys, str(log), "--workload", str(path))
    flat = " ".join(err.split())
    assert code == 2 and f"{path}: " in flat and words in flat and "hint:" in flat
    assert not any(f"--{key}" in flat for key in ("num-gpus", "rollout-tp", "mini-batches"))
    code, _, err = run(capsys, str(log), "--workload", str(path), "--assume", "nix")
    assert code == 2 and ("'nix'" in err) == (not line.startswith("mode"))


def test_steps_that_a_log_does_not_hold_are_told_with_those_it_holds() -> None:
    steps, times = np.arange(3, 9), {"timing_s/step": np.ones(6)}
    with pytest.raises(DataError, match=r"(?s)no timed step from 50\n.*steps 3 to 8"):
        means_of(steps, times, first=50, last=None)


@pytest.mark.parametrize("step_s", [0.0, -1.0, float("nan"), float("inf")])
def test_steps_that_took_no_time_are_no_timed_steps(step_s: float) -> None:
    steps = np.arange(1, 4)
    with pytest.raises(DataError, match="above 0"):
        means_of(steps, {"timing_s/step": np.full(3, step_s)}, first=1, last=None)
    of = means_of(steps, {"timing_s/step": np.array([2.0, step_s, 4.0])}, first=1, last=None)
    assert (of.means["timing_s/step"], of.num_steps) == (3.0, 2)
    assert of.left_out == (() if np.isnan(step_s) else (2,))  # NaN: a line without a step
    assert len(of.notes) == len(of.left_out)


def test_a_workload_file_must_be_toml_and_name_a_model(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    with pytest.raises(ConfigError, match="cannot read"):
        read_options(path)
    path.write_text("model: x")
    with pytest.raises(ConfigError, match="not TOML"):
        read_options(path)
    path.write_text("prompts = 4")
    with pytest.raises(ConfigError, match="names no model"):
        read_options(path)
