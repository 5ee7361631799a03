"""Asynchronous runs of the real loop: partial responses, deliberate mismatch, a teacher, deadlines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbook.controller.loop import Controller
from rollbook.errors import ConfigError, RolloutError
from rollbook.modeling.config import ModelConfig, NewModelConfig
from rollbook.modeling.load import load_model
from rollbook.rollout.engine import GenerateRequest, Response
from rollbook.types import VersionRun
from run_oracles import NotedWeights, label_gaps, rows, versions_of
from tiny_run import TINY, RunResult, TinyRun, tiny_config

LONG = {"rollout.max_response_tokens": 20, "rollout.num_slots": 3, "rollout.kv_policy": "recompute"}
"""Few slots and long responses: a pause falls into the middle of them."""
COLOCATED = {"run.schedule": "colocate_async", "buffer.max_staleness_steps": 2, **LONG}
APART = {"run.schedule": "separate_async", "buffer.max_staleness_steps": 1}


# ---- partial responses


@pytest.mark.parametrize("mode", ["keep", "abort", "drain"])
def test_a_response_paused_in_the_middle_is_the_one_that_its_labels_say(tiny_run: TinyRun, mode: str) -> None:
    """Kept, or aborted and asked for again, it goes on from its own tokens under the next version; drained, it
    ended before. Every token's logprob is that of the version it is labeled with."""
    weights = NotedWeights()
    run = tiny_run(num_steps=4, faults=[weights], **COLOCATED, **{"rollout.pause_mode": mode})
    assert label_gaps(run, weights).max() < 2e-5
    trained = [row for row in rows(run) if row["loss_mask"] is not None]
    spanning = [row for row in trained if len(set(versions_of(row))) > 1]
    assert bool(spanning) is (mode != "drain")
    assert sum(m["rollout/num_continued"] for m in run.metrics) == len(spanning)
    assert all(len(row["turns"]) == 1 for row in rows(run))  # a continued response is one response
    lengths = [len(versions_of(row)) for row in rows(run)]
    assert max(lengths) == 20, "no response is longer for having been continued"


def test_an_aborted_and_continued_response_is_the_uninterrupted_one(tiny_run: TinyRun) -> None:
    """The learning rate moves nothing visible: only the pauses differ."""
    exact = {**COLOCATED, "rollout.batch_invariant": True, "trainer.lr": 1e-7}
    runs = {m: tiny_run(name=m, num_steps=3, **exact, **{"rollout.pause_mode": m}) for m in ("keep", "abort")}
    tokens = {mode: [row["token_ids"] for row in rows(run)] for mode, run in runs.items()}
    logprobs = {mode: [row["behavior_logprobs"] for row in rows(run)] for mode, run in runs.items()}
    assert sum(m["rollout/num_continued"] for m in runs["abort"].metrics) > 0
    assert tokens["keep"] == tokens["abort"]
    for kept, aborted in zip(logprobs["keep"], logprobs["abort"], strict=True):
        np.testing.assert_allclose(kept, aborted, atol=1e-4)


@pytest.mark.parametrize("kv_policy", ["keep", "recompute"])
def test_kept_keys_show_in_the_logprobs_of_a_response_that_spans_versions(
    tiny_run: TinyRun, kv_policy: str
) -> None:
    """`recompute`: tokens after the swap are exactly the new version's. `keep`: their context is the old one's."""
    weights = NotedWeights()
    run = tiny_run(
        num_steps=4, faults=[weights], **{**COLOCATED, "rollout.kv_policy": kv_policy, "trainer.lr": 0.03}
    )
    gaps = label_gaps(run, weights)
    assert gaps.max() < 2e-5 if kv_policy == "recompute" else gaps.max() > 1e-3


# ---- deliberate mismatch


def test_a_mismatched_run_says_so_and_the_gap_shows_it(tiny_run: TinyRun) -> None:
    sync = tiny_run(name="plain", num_steps=2)
    rounded = tiny_run(name="rounded", num_steps=2, **{"rollout.mismatch": "int8"})
    (event,) = rounded.events_of("mismatch")
    assert event["mismatch"] == "int8" and 0 < event["error_frac"]["0"] < 0.02
    assert not sync.events_of("mismatch")
    for plain, metrics in zip(sync.metrics, rounded.metrics, strict=True):
        assert plain["training/logprob_gap/max"] < 1e-5 < 1e-3 < metrics["training/logprob_gap/max"]
        assert 0 < metrics["rollout/mismatch_error_frac"] < 0.02
        assert metrics["training/logprob_gap_by_replica/0/mean"] > 1e-4
    assert [e["weight_version"] for e in rounded.events_of("publication")] == [0, 1, 2]


def test_importance_weights_of_a_mismatched_run_are_those_of_the_logprobs(tiny_run: TinyRun) -> None:
    """On average they are 1: the expectation of p / q under q, whatever the rounding."""
    run = tiny_run(
        num_steps=1,
        **{
            "rollout.mismatch": "int4",
            "rollout.group_size": 64,
            "algorithm.correction.level": "token",
            "algorithm.correction.upper": 50.0,
        },
    )
    metrics = run.metrics[0]
    assert metrics["rollout_corr/rollout_is_std"] > 0.05
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("schedule", ["sync", "colocate_async", "separate_async"])
def test_the_gap_is_reported_by_age_and_by_replica_in_every_mode(tiny_run: TinyRun, schedule: str) -> None:
    staleness = 0 if schedule == "sync" else 2
    run = tiny_run(
        num_steps=4,
        **{
            "run.schedule": schedule,
            "buffer.max_staleness_steps": staleness,
            "rollout.num_replicas": 2,
            **LONG,
        },
    )
    names = {name for metrics in run.metrics for name in metrics}
    for replica_id in (0, 1):
        assert f"training/logprob_gap_by_replica/{replica_id}/mean" in names
    ages = {n.split("/")[2] for n in names if n.startswith("training/logprob_gap_by_staleness/")}
    assert ages == {"0"} if schedule == "sync" else len(ages) > 1
    hist = {n.split("/")[-1] for n in names if "staleness_hist" in n}
    assert ages == hist


@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_the_gap_is_reported_where_the_behavior_policy_is_the_anchor(
    tiny_run: TinyRun, num_mini_batches: int
) -> None:
    """No forward was made for it: it is of the tokens that the weights at the start of the step have seen."""
    run = tiny_run(**{"algorithm.proximal": "behavior", "trainer.num_mini_batches": num_mini_batches})
    assert all(m["training/logprob_gap/max"] < 1e-5 for m in run.metrics)


# ---- teacher


def save_teacher(folder: Path, seed: int, **changes: Any) -> Path:
    new = NewModelConfig.model_validate({**TINY["model"]["new"], **changes})
    load_model(ModelConfig(new=new, seed=seed)).save(folder)
    return folder


@pytest.mark.parametrize("placement", ["advantage", "loss"])
def test_a_student_comes_nearer_to_its_teacher(tiny_run: TinyRun, tmp_path: Path, placement: str) -> None:
    """Reverse KL on the student's own tokens: behavior logprob minus teacher logprob, on average."""
    run = tiny_run(
        num_steps=12,
        **{
            "algorithm.name": "distill",
            "algorithm.distill.placement": placement,
            "algorithm.distill.coef": 1.0,
            "teacher.path": str(save_teacher(tmp_path / "teacher", seed=1)),
            "rollout.group_size": 8,
            "trainer.lr": 0.02,
        },
    )
    kl = [m["actor/teacher_kl_k1"] for m in run.metrics]
    assert kl[-1] < 0.7 * kl[0]
    assert all("timing_s/teacher" in m for m in run.metrics)


def test_a_teacher_that_is_the_student_teaches_nothing(tiny_run: TinyRun, tmp_path: Path) -> None:
    teacher = save_teacher(tmp_path / "teacher", seed=0)
    run = tiny_run(num_steps=1, **{"algorithm.name": "distill", "teacher.path": str(teacher)})
    assert abs(run.metrics[0]["actor/teacher_kl_k1"]) < 1e-6
    assert run.metrics[0]["actor/grad_norm"] < 1e-5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"alphabet": "1023456789+="}, "token [0-9]+ is '0' to the policy and '1' to the teacher"),
        ({"alphabet": "0123456789"}, "tokenizer has [0-9]+ tokens and the teacher's [0-9]+"),
        ({"max_position": 16}, "the teacher's context is 16 tokens and the policy's 32"),
    ],
)
def test_a_teacher_of_another_kind_is_refused(
    tiny_run: TinyRun, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    teacher = save_teacher(tmp_path / "teacher", seed=0, **changes)
    with pytest.raises(ConfigError, match=words):
        tiny_run(**{"algorithm.name": "distill", "teacher.path": str(teacher)})


# ---- deadlines


def test_a_deadline_that_no_full_response_can_keep_is_refused_before_the_first_step(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    def slow_engine(controller: Controller) -> None:
        controller.router.engines[0]._decode_s = 1e6  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match="group_deadline_s is 600 s, and a response of .* 6 takes at least"):
        tiny_run(faults=[slow_engine])
    assert not (tmp_path / "run").exists()


def test_the_config_of_a_teacher_is_written_and_read_back(tmp_path: Path) -> None:
    config = tiny_config(**{"algorithm.name": "distill", "teacher": {"path": "somewhere"}})
    assert config.teacher is not None and config.teacher.path == "somewhere"
    config.check()


# ---- replicas one after the other


def test_while_a_version_rolls_over_the_replicas_every_token_knows_its_own(tiny_run: TinyRun) -> None:
    """A group admitted between the first swap and the last counts as sampled by the older version."""
    weights = NotedWeights()
    serving: list[tuple[int, ...]] = []

    def note(controller: Controller) -> None:
        plain = controller.publisher.ports[1].commit

        async def commit() -> Any:
            serving.append(tuple([(await e.stats()).weight_version for e in controller.router.engines]))
            assert controller.rollout.buffer.serving_step <= serving[-1][1]
            return await plain()

        controller.publisher.ports[1].commit = commit  # type: ignore[method-assign]

    run = tiny_run(
        num_steps=4,
        faults=[weights, note],
        **{
            "run.schedule": "separate_async",
            "buffer.max_staleness_steps": 1,
            "sync.commit_order": "rolling",
            "rollout.num_replicas": 2,
            **LONG,
        },
    )
    assert serving[1:] == [(version, version - 1) for version in (1, 2, 3, 4)]
    assert label_gaps(run, weights).max() < 2e-5
    assert all(m["training/off_policy/trajectory_staleness_worst/max"] <= 1 for m in run.metrics)


# ---- engines that lie about versions


def lies(runs: tuple[VersionRun, ...]) -> Callable[[Controller], None]:
    """Member 1 of group 0 comes back with these labels."""

    def fault(controller: Controller) -> None:
        engine = controller.router.engines[0]
        plain = engine.generate

        async def generate(request: GenerateRequest) -> Response:
            response = await plain(request)
            if (request.group_id, request.member_idx) != (0, 1):
                return response
            first = VersionRun(runs[0].weight_version, len(response.response_ids) - 1)
            return replace(response, version_runs=(first, runs[1]))

        engine.generate = generate  # type: ignore[method-assign]

    return fault


LIES = [
    ((VersionRun(1, 1), VersionRun(0, 1)), "run backwards: [1, 0]"),
    ((VersionRun(0, 1), VersionRun(9, 1)), "weight versions [0, 9], and the newest that was published is 0"),
]


@pytest.mark.parametrize(("runs", "says"), LIES)
def test_a_replica_whose_versions_cannot_be_is_quarantined_and_the_others_go_on(
    tiny_run: TinyRun, runs: tuple[VersionRun, ...], says: str
) -> None:
    """Its requests are sampled again elsewhere; the next proven publication takes it back."""
    run = tiny_run(num_steps=2, faults=[lies(runs)], **{"rollout.group_size": 4, "rollout.num_replicas": 2})
    (quarantined,) = run.events_of("quarantined")
    assert quarantined["replica_id"] == 0
    assert quarantined["why"].startswith("response 0/1#0 has weight versions")
    assert says in quarantined["why"]
    assert [row["failure_kind"] for row in run.trajectories(0)] == [None] * 16
    (sampled_again,) = [r for r in run.trajectories(0) if (r["group_id"], r["member_idx"]) == (0, 1)]
    assert sampled_again["replica_id"] == 1
    assert [m["replica/num_serving"] for m in run.metrics] == [2, 2]
    assert [m["batch/num_sequences"] for m in run.metrics] == [16, 16]


@pytest.mark.parametrize(("runs", "says"), LIES)
def test_where_no_other_replica_is_left_impossible_versions_stop_the_run_with_their_values(
    tiny_run: TinyRun, tmp_path: Path, runs: tuple[VersionRun, ...], says: str
) -> None:
    with pytest.raises(RolloutError, match="none of 1 replicas is in service") as stopped:
        tiny_run(faults=[lies(runs)])
    assert says in str(stopped.value)
    assert RunResult(tmp_path / "run").events_of("run_failed")
