"""Relations of asynchronous configs: what contradicts itself is refused with values and a remedy."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from rollbook.controller.build import compute_alone, with_threads
from rollbook.errors import ConfigError
from tiny_run import tiny_config

TEACHER = {"new": {"hidden_size": 32, "num_heads": 2, "alphabet": "0123456789+="}}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"buffer.max_staleness_steps": 1}, "'sync' and buffer.max_staleness_steps is 1"),
        (
            {"run.schedule": "colocate_async", "buffer.max_staleness_steps": 0},
            "'colocate_async' and buffer.max_staleness_steps is 0",
        ),
        (
            {"run.schedule": "separate_async", "sync.every_steps": 2},
            "sync.every_steps is 2 and buffer.max_staleness_steps is 0",
        ),
        (
            {"run.schedule": "separate_async", "buffer.order": "arrival"},
            "'arrival' and buffer.max_staleness_steps is 0",
        ),
        (
            {
                "run.schedule": "separate_async",
                "buffer.max_staleness_steps": 1,
                "buffer.max_running_groups": 3,
            },
            "max_running_groups is 3, fewer than run.groups_per_step 4",
        ),
        ({"buffer.step_deadline_s": 5.0}, "group_deadline_s is 600, longer than buffer.step_deadline_s 5"),
        ({"buffer.max_running_groups": 3}, "max_running_groups is 3, fewer than run.groups_per_step 4"),
        ({"algorithm.correction.level": "token"}, "every weight would be 1"),
        (
            {
                "run.schedule": "separate_async",
                "algorithm.correction.reject": {"statistic": "token", "upper_nats": 1.0},
            },
            "every weight would be 1",
        ),
        (
            {
                "algorithm.correction.level": "token",
                "algorithm.loss": "reinforce",
                "algorithm.proximal": "behavior",
            },
            "every weight would be 1",
        ),
        ({"rollout.mismatch": "int8", "rollout.engine": "vllm"}, "mismatch is 'int8' and rollout.engine"),
        ({"rollout.mismatch": "bf16", "rollout.dtype": "bfloat16"}, "nothing would be rounded"),
        ({"rollout.mismatch": "bf16", "model.dtype": "bfloat16"}, "nothing would be rounded"),
        ({"algorithm.filter.min_scored": 3}, "min_scored is 3 and rollout.group_size 2: every group"),
        ({"algorithm.name": "distill"}, "distill.placement is 'advantage' and there is no teacher"),
        ({"teacher": TEACHER}, "there is a \\[teacher\\] table"),
    ],
)
def test_bounds_that_contradict_are_refused_with_their_values(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        tiny_config(**overrides).check()
    assert caught.value.remedy


@pytest.mark.parametrize(
    "more",
    [
        {"run.schedule": "separate_async", "buffer.max_staleness_steps": 1},
        {"rollout.mismatch": "int8"},
        {"sync.quantize": "int8"},
        {"rollout.dtype": "bfloat16"},
        {"model.dtype": "bfloat16"},
        {"algorithm.proximal": "behavior", "algorithm.loss": "reinforce", "trainer.num_mini_batches": 2},
    ],
    ids=str,
)
def test_a_correction_is_taken_where_behavior_and_proximal_policy_differ(more: dict[str, Any]) -> None:
    tiny_config(**{"algorithm.correction.level": "token", **more}).check()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"buffer.when_stale": "drop"}, "in which nothing goes stale"),
        ({"algorithm.filter.metric": "reward"}, "nothing is compared"),
        ({"algorithm.filter.refill": True}, "no filter drops a group"),
    ],
)
def test_options_that_would_do_nothing_are_refused(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny_config(**overrides)


@pytest.mark.parametrize(
    ("overrides", "num_cores", "expected"),
    [
        ({}, 2, (1, 1)),
        ({"rollout.num_replicas": 3}, 8, (2, 2)),
        ({"rollout.num_replicas": 4}, 2, (1, 1)),
        ({"rollout.num_threads": 3}, 2, (3, 3)),
        ({"rollout.num_threads": 3, "trainer.num_threads": 5}, 2, (3, 5)),
    ],
)
def test_engines_and_trainer_that_run_at_once_share_the_cores(
    overrides: dict[str, Any], num_cores: int, expected: tuple[int, int]
) -> None:
    plain = {"trainer": {"lr": 0.01}, "run.schedule": "separate_async", **overrides}
    config = with_threads(tiny_config(**plain), num_cores=num_cores)
    assert (config.rollout.num_threads, config.trainer.num_threads) == expected


def test_where_they_take_turns_each_keeps_what_torch_gives() -> None:
    config = tiny_config(trainer={"lr": 0.01})
    assert with_threads(config, num_cores=8) == config


@pytest.mark.parametrize(
    ("changes", "num_devices"),
    [
        ({"model.device": "cuda", "rollout.device": "cuda:0"}, 1),
        ({"model.device": "cuda:1", "rollout.device": "cuda"}, 2),
        ({"model.device": "cuda", "rollout.device": "cpu"}, 1),
        (
            {
                "rollout.engine": "vllm",
                "rollout.vllm.tp_size": 4,
                "model.device": "cuda",
                "rollout.device": "cuda",
            },
            4,
        ),
        ({"cluster.kind": "ray", "cluster.num_trainer_ranks": 2, "rollout.num_replicas": 3}, 3),
        (
            {
                "cluster.kind": "ray",
                "cluster.num_trainer_ranks": 2,
                "rollout.num_replicas": 3,
                "run.schedule": "separate_async",
            },
            5,
        ),
    ],
)
def test_devices_are_counted_once_whoever_computes_there(
    changes: dict[str, object], num_devices: int
) -> None:
    """Throughput a GPU and the whole-step MFU are over all of them."""
    assert tiny_config(**changes).pools.num_devices == num_devices


def test_every_schedule_is_chosen_by_one_line() -> None:
    bounds = {}
    for schedule in ("sync", "colocate_async", "separate_async"):
        config = tiny_config(**{"run.schedule": schedule})
        config.check()
        bounds[schedule] = config.buffer.max_staleness_steps
    assert bounds == {"sync": 0, "colocate_async": 1, "separate_async": 0}


async def test_a_process_that_leaves_computing_to_actors_uses_one_thread_while_it_runs() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        async with AsyncExitStack() as stack:
            compute_alone(tiny_config(**{"cluster.kind": "ray"}), stack)
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        async with AsyncExitStack() as stack:  # an accelerator's trainer, whose config says how many
            compute_alone(tiny_config(**{"trainer.num_threads": 2}), stack)
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
