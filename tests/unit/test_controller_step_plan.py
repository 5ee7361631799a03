"""Promise 8 in the loop itself: every span of a step carries what the ledger expected of it, beside the measured."""

from __future__ import annotations

from typing import Any

import pytest

from rollbook.observe.catalogue import STAGES
from tiny_run import TinyRun

PLANNED: dict[str, Any] = {
    "plan.is_on": True,
    "checkpoint.every_steps": 1,
    "eval.every_steps": 1,
    "eval.num_prompts": 4,
    "data.held_out_frac": 0.2,
}
JOBS: dict[str, dict[str, Any]] = {
    "grpo": {"trainer.num_mini_batches": 2},
    "grpo with a reference": {"algorithm.kl": {"placement": "loss", "coef": 0.01}},
    "ppo": {"algorithm.name": "ppo"},
    "separate_async": {"run.schedule": "separate_async", "buffer.max_staleness_steps": 1},
    "two replicas": {"rollout.num_replicas": 2},
    "handed over": {"memory.sleep_level": 2, "memory.offload": True},
}


@pytest.mark.parametrize("job", sorted(JOBS))
def test_every_stage_of_every_step_carries_what_was_expected_of_it(tiny_run: TinyRun, job: str) -> None:
    run = tiny_run(num_steps=2, **PLANNED, **JOBS[job])
    spans = run.events_of("span")
    steps = {span["span_id"]: span for span in spans if span["name"] == "step"}
    stages = [span for span in spans if span.get("parent_id") in steps]
    assert len(steps) == 2 and {"rollout", "train", "sync", "eval", "checkpoint"} <= {
        s["name"] for s in stages
    }
    # The probe after a publication is a second span of it: its seconds are in what is expected of the first.
    without = [span["name"] for span in stages if "expected_s" not in span]
    assert without == ["sync"] * len(steps)
    assert all("expected_s" in step for step in steps.values())
    for span in stages:
        if "bytes" in span:
            assert span["expected_bytes"] == pytest.approx(span["bytes"], rel=0.02), span
    assert {s["name"] for s in stages if "bytes" in s} == {"sync", "checkpoint"}
    metrics = run.metrics[-1]
    for name in {span["name"] for span in stages}:
        assert metrics[f"expected_s/{STAGES[name]}"] >= 0 and metrics[f"timing_s/{STAGES[name]}"] >= 0


def test_a_run_without_a_plan_expects_nothing(tiny_run: TinyRun) -> None:
    run = tiny_run(num_steps=1)
    assert not any("expected_s" in span for span in run.events_of("span"))
