"""Promise 8 in the loop itself: every span of a step carries what the ledger expected of it, beside the measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollbook.controller.plan import Plan
from rollbook.controller.step_plan import StepPlan
from rollbook.ledger.hardware import Contention, DecodeFit, MachineSpec, TrainFit
from rollbook.ledger.lengths import LengthDistribution
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.predict import StepWork, predict_stages
from rollbook.observe.catalogue import STAGES
from tiny_run import TinyRun

TINY = ModelSpec(
    name="tiny", num_layers=2, hidden_size=128, vocab_size=32, num_heads=4, intermediate_size=512
)
MACHINE = MachineSpec(
    name="box",
    device="cpu",
    gemm_flops_per_s={"float32": 8e10},
    copy_bytes_per_s=2e10,
    memory_bytes=16_000_000_000,
    decode=DecodeFit(base_s=1e-3, per_row_s=2e-5, per_row_token_s=1e-8, prefill_tokens_per_s=2e4),
    train=TrainFit(per_micro_batch_s=0.01, tokens_per_s=2e4, forward_tokens_per_s=6e4),
    digest_bytes_per_s=1e9,
    sync_base_s=0.01,
)
WORK = StepWork(
    num_groups=8,
    group_size=4,
    prompt_tokens=6.0,
    lengths=LengthDistribution.from_samples([4.0], max_tokens=8),
    num_slots=64,
    micro_batch_tokens=100,
)

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
    assert not [span["name"] for span in stages if "expected_s" not in span]
    assert all("expected_s" in step for step in steps.values())
    for span in stages:
        if "bytes" in span:
            assert span["expected_bytes"] == pytest.approx(span["bytes"], rel=0.02), span
    assert {s["name"] for s in stages if "bytes" in s} == {"sync", "checkpoint"}
    metrics = run.metrics[-1]
    for name in {span["name"] for span in stages}:
        assert metrics[f"expected_s/{STAGES[name]}"] >= 0 and metrics[f"timing_s/{STAGES[name]}"] >= 0


def test_a_wait_is_what_the_other_stages_left_of_generating_and_a_probe_what_was_asked() -> None:
    """Engines alone take 10 s for a step, and 1.25 times that beside the trainer. After 5 s of others 6 s are left;
    after 20 s nothing. Of two replicas one had no slot for the probe: half of its seconds are expected."""
    machine = replace(MACHINE, contention=Contention(engine=1.25))
    work = replace(WORK, generates_beside=True, most_running=64)
    plan = Plan(
        model=TINY,
        machine=machine,
        work=work,
        stages=predict_stages(TINY, machine, work),
        occasional={},
        shares={},
        generation_s=10.0,
    )
    expected = StepPlan(plan=plan)
    expected.begin_step()
    for beside_s, wait_s in ((5.0, 6.0), (20.0, 0.0)):
        expected.wait_after(beside_s)
        assert expected.of("rollout")["expected_s"] == pytest.approx(wait_s)
    alone_s = expected.publication()["expected_s"]
    assert alone_s == pytest.approx(TINY.computed_params * 4.0 / 1e9)
    assert expected.probe_of(0.5)["expected_s"] == pytest.approx(0.005)
    assert expected.of("sync")["expected_s"] == pytest.approx(alone_s + 0.005)


@pytest.mark.parametrize("beside", [False, True])
def test_engines_that_run_ahead_are_expected_to_take_longer_for_longer_responses(beside: bool) -> None:
    """Of full slots twice the tokens take twice as long, and the KV that they read somewhat more; the prompts stay."""
    work = replace(WORK, most_running=64, num_slots=16, generates_beside=beside)
    plan = Plan(
        model=TINY, machine=MACHINE, work=work, stages=predict_stages(TINY, MACHINE, work), occasional={}, shares={},
        generation_s=predict_stages(TINY, MACHINE, replace(work, generates_beside=False))["rollout"].seconds,
    )  # fmt: skip

    def expected_s(length: int) -> float:
        lengths = [length] * work.num_sequences
        return (plan.wait_after(0.0, lengths) if beside else plan.rollout_for(lengths)).seconds

    assert expected_s(4) == pytest.approx(plan.generation_s)
    # 4 tokens: 4 x (1 ms / 16 + 20 us + 6 x 10 ns) + 16 / 2 x 10 ns + 1.5 prompt tokens at 50 us; 8 tokens alike.
    four, eight = 4 * 82.56 + 0.08 + 75, 8 * 82.56 + 0.32 + 75
    assert expected_s(8) / expected_s(4) == pytest.approx(eight / four)


def test_a_run_without_a_plan_expects_nothing(tiny_run: TinyRun) -> None:
    run = tiny_run(num_steps=1)
    assert not any("expected_s" in span for span in run.events_of("span"))
