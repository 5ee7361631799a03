"""The worker's half of a publication and the port that drives it, over two ranks that only look like vLLM's."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollbook.errors import EngineError, SyncError
from rollbook.rollout.vllm.port import VllmPort
from rollbook.rollout.vllm.worker import PublicationExtension
from rollbook.sync.config import SyncConfig
from rollbook.sync.publisher import Publisher
from rollbook.weights import TensorSpec


class RowParallelLinear(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.tp_rank, self.tp_size = rank, 2


class Rank(PublicationExtension):
    """A worker with one cut and one whole parameter."""

    def __init__(self, rank: int) -> None:
        self.model = nn.ModuleDict({"o_proj": RowParallelLinear(rank), "norm": nn.LayerNorm(4, bias=False)})

    def get_model(self) -> nn.Module:
        return self.model


class TwoRanks:
    """What `VllmPort` needs of an engine."""

    replica_id = 3

    def __init__(self) -> None:
        self.ranks = [Rank(0), Rank(1)]
        self.version, self.calls = 0, list[str]()
        self.is_serving = True

    async def weight_version(self) -> int:
        return self.version

    def ask_workers_on_thread(self, method: str, *args: Any) -> list[str]:
        self.calls.append(method)
        return [getattr(rank, method)(*args) for rank in self.ranks]

    async def ask_workers(self, method: str, *args: Any) -> list[str]:
        return self.ask_workers_on_thread(method, *args)

    async def run_between_steps(self, fn: Any) -> Any:
        return fn()

    def adopt_on_thread(self, version: int) -> None:
        self.version, self.is_serving = version, True

    async def sleep(self, level: int) -> None:
        self.is_serving = False

    async def wake(self) -> None: ...

    async def pause(self, mode: str) -> None:
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")


class Export:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name=n, shape=tuple(t.shape), dtype="float32", num_bytes=4 * t.numel())
            for n, t in self.tensors.items()
        )

    def export_weights(self) -> Any:
        yield from self.tensors.items()


TENSORS = {"o_proj.weight": torch.arange(24.0).view(4, 6), "norm.weight": torch.arange(4.0)}


async def publish(engine: TwoRanks, version: int, **options: Any) -> VllmPort:
    port = VllmPort(engine, **options)  # type: ignore[arg-type]
    publisher = Publisher(
        Export(TENSORS), [port], SyncConfig(), buffers=port.sender.buffer, weight_version=version - 1
    )
    try:
        await publisher.publish(version)
    finally:
        publisher.close()
    return port


@pytest.mark.parametrize("staging", ["staged", "direct"])
async def test_each_rank_takes_its_part_and_proves_it(staging: Any) -> None:
    engine = TwoRanks()
    await publish(engine, 1, staging=staging)
    for rank, worker in enumerate(engine.ranks):
        part = TENSORS["o_proj.weight"][:, 3 * rank : 3 * rank + 3]
        assert torch.equal(worker.model["o_proj"].weight, part)
        assert torch.equal(worker.model["norm"].weight, TENSORS["norm.weight"])
    assert engine.version == 1
    assert ("pause" in engine.calls, "resume" in engine.calls) == ((staging == "direct"),) * 2


async def test_a_rank_that_cannot_commit_takes_the_replica_out_of_service() -> None:
    engine = TwoRanks()
    engine.ranks[1].rollbook_commit = lambda: json.dumps(  # type: ignore[method-assign]
        {"error": {"kind": "SyncError", "what": "the live proof failed", "remedy": "re-sync"}}
    )
    with pytest.raises(SyncError, match="rank 1: the live proof failed"):
        await publish(engine, 1)
    assert (engine.version, engine.is_serving) == (0, False)
    del engine.ranks[1].rollbook_commit
    await publish(engine, 1)  # the first publication of a publisher is a full re-sync
    assert (engine.version, engine.is_serving) == (1, True)


async def test_ranks_that_committed_a_version_which_the_engine_cannot_adopt_serve_nothing() -> None:
    """BR-026: caches of the old weights that cannot be dropped, say."""
    engine = TwoRanks()

    def refuse(version: int) -> None:
        raise EngineError("vLLM did not reset the prefix cache", "restart it")

    engine.adopt_on_thread = refuse  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="did not reset the prefix cache"):
        await publish(engine, 1)
    assert not engine.is_serving and engine.version == 0


async def test_calls_out_of_order_are_answered_with_an_error() -> None:
    engine = TwoRanks()
    port = VllmPort(engine)  # type: ignore[arg-type]
    with pytest.raises(SyncError, match="no publication open"):
        await port.prove({})
    await port.abort()  # nothing to drop
    assert "rollbook_abort" not in engine.calls


def test_a_pickle_is_not_a_message(tmp_path: Path) -> None:
    """BR-132: JSON and raw bytes alone are read; what would create a file when unpickled creates none."""

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "pwned",))

    worker = Rank(0)
    begin = {"replica_id": 0, "weight_version": 0, "staging": "staged", "transport": "inline"}
    assert json.loads(worker.rollbook_begin(json.dumps(begin)))["ok"] == {"num_tensors": 2}
    bomb = pickle.dumps(Bomb())
    for answer in (
        worker.rollbook_open(bomb.decode("latin1")),
        worker.rollbook_prove(bomb.decode("latin1")),
        worker.rollbook_receive('{"weight_version": 0, "bucket_idx": 0, "entries": [], "place": {}}', bomb),
        worker.rollbook_receive(bomb.decode("latin1"), b""),
    ):
        assert "error" in json.loads(answer)
    assert not (tmp_path / "pwned").exists()
