"""What `[cluster]` refuses before anything starts, and what its publisher says to those who want its ports."""

from __future__ import annotations

import pytest

from rollbook.errors import ConfigError
from tiny_run import tiny_config


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"cluster.num_trainer_ranks": 2}, "cluster.num_trainer_ranks is 2 and cluster.kind 'inproc'"),
        ({"cluster.kind": "ray", "sync.transport": "ipc"}, "sync.transport is 'ipc'"),
        (
            {"cluster.kind": "ray", "rollout.engine": "vllm"},
            "rollout.engine is 'vllm' and cluster.kind 'ray'",
        ),
        ({"cluster.kind": "ray", "memory.offload": True}, "memory.offload True with cluster.kind 'ray'"),
        (
            {"cluster.kind": "ray", "cluster.num_trainer_ranks": 2, "model.lora": {"publish": "merged"}},
            "cluster.num_trainer_ranks is 2 with model.lora",
        ),
    ],
)
def test_what_cannot_run_in_several_processes_is_refused(overrides: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        tiny_config(**overrides).check()
    assert told in str(raised.value)
    assert "hint: " in str(raised.value)


def test_one_process_and_ray_with_shared_memory_are_accepted() -> None:
    tiny_config().check()
    tiny_config(**{"cluster.kind": "ray", "cluster.num_trainer_ranks": 2}).check()
    tiny_config(**{"cluster.kind": "ray", "sync.transport": "shm"}).check()
    tiny_config(**{"cluster.kind": "ray", "sync.transport": "broadcast"}).check()
