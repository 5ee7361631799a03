"""Every algorithm and option of a run, on the real loop: each reports only catalogued names and moves the policy."""

from __future__ import annotations

import math
import typing
from typing import Any

import pytest

from rollbook.algos.config import AlgorithmName
from rollbook.observe.catalogue import lookup
from tiny_run import TinyRun

ASYNC = {"run.schedule": "separate_async", "buffer.max_staleness_steps": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    **{
        name: {"algorithm.name": name}
        for name in typing.get_args(AlgorithmName)
        if name != "distill"  # needs a teacher
    },
    "kl_in_reward": {"algorithm.kl.placement": "reward", "algorithm.kl.coef": 0.1},
    "kl_in_loss": {"algorithm.kl.placement": "loss", "algorithm.kl.coef": 0.1},
    "entropy_bonus": {"algorithm.entropy_coef": 0.01},
    "dual_clip": {"algorithm.dual_clip": 3.0},
    "sequence_weights": {"algorithm.correction.level": "sequence", **ASYNC},
    "masked_tokens": {"algorithm.correction.level": "token", "algorithm.correction.mode": "mask", **ASYNC},
    "rejection": {
        "algorithm.correction.reject.statistic": "sequence_mean",
        "algorithm.correction.reject.upper_nats": 5.0,
        **ASYNC,
    },
    "bypass": {"algorithm.proximal": "behavior", "trainer.num_mini_batches": 2, **ASYNC},
    "mask_truncated": {"algorithm.filter.mask_truncated": True, "rollout.max_response_tokens": 12},
    "bfloat16": {"model.dtype": "bfloat16"},
    "bfloat16_engine": {"rollout.dtype": "bfloat16"},
    "shared_critic": {"algorithm.name": "ppo", "critic.backbone": "shared", "trainer.num_epochs": 2},
    "mismatch": {"rollout.mismatch": "int4", "algorithm.correction.level": "token"},
    "stop_strings": {"rollout.stop_strings": ["3"]},
    "qwen3": {"model.new.architecture": "qwen3"},
    "nucleus": {"rollout.top_p": 0.9, "rollout.top_k": 8, "rollout.min_p": 0.01},
    "tight_pool": {"rollout.kv_pool_tokens": 24, "rollout.page_tokens": 4},
    "two_sources": {
        "data.sources": [
            {"task": "addition", "num_prompts": 20},
            {"task": "sort_digits", "num_prompts": 20, "options": {"length": 3}},
        ],
        "model.new.alphabet": "0123456789+=>",
    },
    "warm_and_evaluated": {
        "warmup.num_updates": 4,
        "warmup.check_every_updates": 2,
        "warmup.batch_sequences": 4,
        "warmup.until_exact_frac": 0.9,
        "eval.num_prompts": 3,
        "eval.every_steps": 1,
        "data.held_out_frac": 0.2,
    },
}


@pytest.mark.parametrize("overrides", OPTIONS.values(), ids=OPTIONS)
def test_a_run_with_it_trains_and_every_reading_is_in_the_catalogue(
    tiny_run: TinyRun, overrides: dict[str, Any]
) -> None:
    run = tiny_run(**overrides)
    assert len(run.metrics) == 2
    for metrics in run.metrics:
        assert {name for name in metrics if lookup(name) is None} == set()
        assert {name for name, value in metrics.items() if value is None} == set(), "not finite"
        assert metrics["actor/grad_norm"] > 0
        assert metrics["trainer/actor_updates"] >= 1
        assert math.isfinite(metrics["actor/loss"])
    publications = run.events_of("publication")
    assert all(event["changed_frac"] > 0 for event in publications)
    assert [m["training/weight_version"] for m in run.metrics] == [
        event["weight_version"] for event in publications[-2:]
    ]


def test_the_warm_up_ends_early_once_the_held_out_answers_are_right(tiny_run: TinyRun) -> None:
    """A task of ten problems with one-digit answers, seen often enough."""
    run = tiny_run(
        num_steps=0,
        **{
            "data.sources": [
                {"task": "sort_digits", "num_prompts": 10, "options": {"length": 1}},
                {"name": "held", "task": "addition", "num_prompts": 2, "options": {"num_digits": 1}},
            ],
            "model.new.alphabet": "0123456789+=>",
            "data.held_out_frac": 0.3,
            "eval.num_prompts": 2,
            "warmup.num_updates": 60,
            "warmup.batch_sequences": 16,
            "warmup.check_every_updates": 10,
            "warmup.until_exact_frac": 0.01,
            "reward.terms": [{"function": "exact"}],
        },
    )
    losses = [event["loss"] for event in run.events_of("warmup")]
    assert losses[-1] < 0.5 * losses[0]
    checks = run.events_of("warmup_check")
    assert len(losses) == 10 * len(checks)
    assert [c["weight_version"] for c in run.events_of("publication")] == list(range(len(checks) + 1))
    assert run.state["num_steps_done"] == 0
    assert run.state["weight_version"] == len(checks)
