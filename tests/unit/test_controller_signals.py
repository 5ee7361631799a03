"""Signals that alerts, panels and the duty manual stand on are there in real runs, with the numbers they claim."""

from __future__ import annotations

import re

import numpy as np
import pytest

from rollbook.buffer.buffer import Eviction, Taken
from rollbook.controller.evaluate import evaluation_values
from rollbook.controller.step_metrics import idle_values, staleness_values, trajectory_values
from rollbook.observe import catalogue
from rollbook.observe.alerts import ALERTS, Thresholds
from rollbook.observe.prometheus import exported_name
from rollbook.observe.values import Last
from rollbook.types import Failure, FailureKind, FinishReason, Group, Prompt, Trajectory, Turn, VersionRun
from tiny_run import TinyRun

OF_SOME_RUNS = {
    "env/capacity": "a scorer with workers of its own",
    "sync/num_failed": "a publication that failed",
    "observe/nonfinite_metrics": "a metric that is NaN",
    "memory/{point}/fragmented_bytes": "a GPU",
    "memory/{point}/reserved_bytes": "a GPU",
    "expected_s/step": "a plan",
    "expected_s/update_weights": "a plan",
    "rollout_corr/rollout_is_eff_sample_size": "logprobs of the trainer before its updates",
}
"""Metric of an alert -> what a run needs to write it."""


@pytest.mark.parametrize("schedule", ["sync", "separate_async"])
def test_a_run_writes_what_the_alerts_read(tiny_run: TinyRun, schedule: str) -> None:
    run = tiny_run(num_steps=3, **{"run.schedule": schedule, "run.groups_per_step": 6})
    families = {metric.name for row in run.metrics for metric in map(catalogue.lookup, row) if metric}
    by_export = {exported_name(metric.name): metric.name for metric in catalogue.catalogue()}
    read = {
        by_export[name]
        for alert in ALERTS
        for name in re.findall(r"rollbook_\w+", alert.expr(Thresholds()))
        if name in by_export
    }
    assert read - families - set(OF_SOME_RUNS) == set()


def test_running_sequences_and_the_kv_pool_are_seen_while_a_step_decodes(tiny_run: TinyRun) -> None:
    """When a synchronous step reports, its sequences have ended: a gauge would be 0 in every step."""
    run = tiny_run(num_steps=2)
    for row in run.metrics:
        assert row["replica/0/num_running"] == pytest.approx(row["rollout/mean_batch"])
        assert 0.0 < row["replica/0/kv_used_frac"] <= 1.0
        assert row["rollout/kv_used_frac"] == row["replica/0/kv_used_frac"]


def test_shared_devices_are_idle_together_and_separate_ones_each_by_itself() -> None:
    """Ten seconds: two engines that are busy for 2 and 4 of them, a trainer that computes for 5."""
    values = {
        "replica/0/idle_frac": Last(0.8),
        "replica/1/idle_frac": Last(0.6),
        "replica/0/num_running": Last(7),
    }
    apart = idle_values(values, computed_s=5.0, elapsed_s=10.0, shares_device=False)
    assert {name: value.result() for name, value in apart.items()} == pytest.approx(
        {"idle_frac/rollout": 0.7, "idle_frac/train": 0.5}
    )
    shared = idle_values(values, computed_s=5.0, elapsed_s=10.0, shares_device=True)
    assert [value.result() for value in shared.values()] == pytest.approx([0.2, 0.2])


def test_the_share_that_passed_the_filters_is_of_the_groups_they_looked_at(tiny_run: TinyRun) -> None:
    run = tiny_run(
        num_steps=3, **{"algorithm.filter.drop_flat": True, "buffer.on_starvation": "train_partial"}
    )
    for row in run.metrics:
        num_dropped = row.get("evicted/flat/num_groups", 0.0)
        assert row["filter/kept_frac"] == row["batch/num_groups"] / (row["batch/num_groups"] + num_dropped)
    assert any(row["filter/kept_frac"] < 1.0 for row in run.metrics)


def test_br047_failures_are_counted_by_cause() -> None:
    causes = [FailureKind.TIMEOUT, FailureKind.ENGINE, FailureKind.TIMEOUT]
    prompt = Prompt(prompt_id="row", prompt_ids=np.array([1], np.int32), source="add")
    failed = [
        Trajectory(
            group_id=0, member_idx=i, prompt=prompt, turns=(), failure=Failure(kind=kind, message="gone")
        )
        for i, kind in enumerate(causes)
    ]
    nothing = Taken(groups=[], staleness_steps=[], evictions=[], num_refills=0, dropped=[], prompts_done=[])
    values = trajectory_values(nothing, failed)
    assert values["failures/timeout/num"].result() == values["failures/timeout/add/num"].result() == 2
    assert values["failures/engine/num"].result() == 1
    assert values["failures/frac"].result() == 1.0


def test_an_answer_that_could_not_be_scored_is_counted_in_an_evaluation_and_no_zero() -> None:
    prompt = Prompt(prompt_id="p", prompt_ids=np.ones(1, np.int32), source="maths")
    right = Trajectory(group_id=-1, member_idx=0, prompt=prompt, reward=1.0, reward_terms={"exact": 1.0})
    failure = Failure(kind=FailureKind.TIMEOUT, message="gave no answer")
    failed = Trajectory(group_id=-2, member_idx=0, prompt=prompt, failure=failure)
    values = {name: value.result() for name, value in evaluation_values([right, failed]).items()}
    wanted = {"val/maths/reward": 1.0, "val/maths/exact_match": 1.0, "val/maths/failed_frac": 0.5}
    assert wanted.items() <= values.items()


def test_what_a_filter_dropped_is_generated_and_not_trained() -> None:
    """Two whole responses were trained; two that hit the limit, of a flat group, were dropped."""
    prompt = Prompt(prompt_id="p", prompt_ids=np.ones(1, np.int32), source="maths")

    def group(group_id: int, reason: FinishReason, num_tokens: int) -> Group:
        turn = Turn(
            response_ids=np.zeros(num_tokens, np.int32),
            behavior_logprobs=np.zeros(num_tokens, np.float32),
            version_runs=(VersionRun(0, num_tokens),),
            finish_reason=reason,
        )
        members = tuple(
            Trajectory(group_id=group_id, member_idx=i, prompt=prompt, turns=(turn,), reward=0.0)
            for i in range(2)
        )
        return Group(group_id=group_id, prompt=prompt, trajectories=members)

    taken = Taken(
        [group(0, FinishReason.STOP, 2)], [0], [], 0, [group(1, FinishReason.LENGTH, 8)], [prompt, prompt]
    )
    values = {name: value.result() for name, value in trajectory_values(taken, []).items()}
    wanted = {
        "response_length/clip_ratio": 0.0,
        "generated/clip_ratio": 0.5,
        "response_length/mean": 2.0,
        "generated/response_length/mean": 5.0,
    }
    assert wanted.items() <= values.items()


def test_staleness_is_told_of_the_newest_and_of_the_oldest_token_and_bias_of_what_was_evicted() -> None:
    """Step 5 trains a group of two that versions 3 and 4 sampled; a group twice as long was too old."""
    prompt = Prompt(prompt_id="p", prompt_ids=np.ones(1, np.int32), source="maths")
    turn = Turn(
        response_ids=np.zeros(4, np.int32),
        behavior_logprobs=np.zeros(4, np.float32),
        version_runs=(VersionRun(3, 1), VersionRun(4, 3)),
        finish_reason=FinishReason.STOP,
    )
    members = tuple(
        Trajectory(group_id=0, member_idx=i, prompt=prompt, turns=(turn,), reward=0.0) for i in range(2)
    )
    group = Group(group_id=0, prompt=prompt, trajectories=members)
    stale = Eviction(group_id=1, reason="stale", staleness_steps=3, num_response_tokens=16)
    taken = Taken([group], [2], [stale], 0, [], [prompt], step=5, version_steps={3: 3, 4: 4})
    values = {name: value.result() for name, value in staleness_values(taken).items()}
    wanted = {
        "training/off_policy/trajectory_staleness/mean": 1.0,
        "training/off_policy/trajectory_staleness_worst/mean": 2.0,
        "training/off_policy/trajectory_spans/mean": 2.0,
        "training/off_policy/staleness_hist/2": 2,
        "training/off_policy/evicted_samples": 1,
        "evicted/length_bias": 2.0,
        "rollout/num_continued": 2,
    }
    assert wanted.items() <= values.items()
