"""Handing one device from the engine to the trainer and back: bytes and seconds of every move."""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.errors import PlanError
from rollbook.ledger.assumptions import SwitchAssumptions
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.model import ModelSpec

BASE_MOVE = "caches, pools, processes"
"""What a hand-over costs whatever is moved."""

_PCIE_BYTES_PER_S = 64e9
"""Of 16 lanes of the fifth generation, over which the frameworks' rates were measured. A device that shares its host's
memory (Grace) is not held up by staging: DeepSeek-V3 on 128 GB200 has 84 GB a GPU to move both ways and a step of 78 to
128 s, where NeMo RL's rate over PCIe alone would be 140 s (open nemo_dsv3 cases)."""


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a hand-over, on one GPU."""

    name: str
    bytes: float
    """Over the host link."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepChoice:
    """What an engine keeps while the trainer has its device."""

    sleep_level: int = 2
    """0: stays awake; 1: weights in host memory; 2: dropped, the publication brings them back."""
    rebuilds_engine: bool = False
    """KV pool and CUDA graphs are made again at each wake; False: the pool keeps its addresses, so both survive."""
    moves_state: bool = True
    """The training state waits in host memory while the engine generates; False: it stays on the device."""

    def __post_init__(self) -> None:
        if self.sleep_level not in (0, 1, 2):
            raise PlanError(
                f"sleep level is {self.sleep_level}",
                "use 0 (awake), 1 (weights wait in host memory) or 2 (dropped; the publication brings them back)",
            )

    @property
    def moves_nothing(self) -> bool:
        """Engine and trainer stay on the device together."""
        return self.sleep_level == 0 and not self.moves_state


def hand_over(
    model: ModelSpec,
    cluster: Cluster,
    assumptions: SwitchAssumptions,
    *,
    num_gpus: int,
    rollout_weights_bytes_per_gpu: float,
    state_bytes_per_param: float,
    frozen_bytes_per_param: float = 0.0,
    choice: SleepChoice | None = None,
    offloads_state: bool = True,
) -> list[Move]:
    """Moves of one step: engine to trainer and back again.

    Level 1 keeps the engine's weights in host memory and copies them both ways; level 2 drops them, and the
    publication brings them back. The KV pool is only dropped and mapped again. CUDA graphs survive when the
    pool keeps its addresses; else it is made and they are captured again. Where nothing moves, nothing is paid.

    Args:
        num_gpus: over which the training state is sharded.
        state_bytes_per_param: weights, gradients, master weights and moments, of policy and critic together.
        frozen_bytes_per_param: reference (or the base of adapters) and reward model. Their copy in host memory
            stays good, so they move one way only.
    """
    choice = choice or SleepChoice()
    link = cluster.accelerator.host_link_bytes_per_s
    state_rate = min(assumptions.state_bytes_per_s * max(link / _PCIE_BYTES_PER_S, 1.0), link)
    engine_rate = min(assumptions.engine_bytes_per_s, link)
    offloads_state = offloads_state and choice.moves_state
    state = state_bytes_per_param * model.params / num_gpus if offloads_state else 0.0
    frozen = frozen_bytes_per_param * model.params / num_gpus if offloads_state else 0.0
    weights = rollout_weights_bytes_per_gpu if choice.sleep_level == 1 else 0.0
    sleeps = float(choice.sleep_level > 0)
    moves = [
        Move("engine sleeps", bytes=weights, seconds=sleeps * assumptions.sleep_s + weights / engine_rate),
        Move("training state to device", bytes=state, seconds=state / state_rate),
        Move("training state to host", bytes=state, seconds=state / state_rate),
        Move("frozen models to device", bytes=frozen, seconds=frozen / state_rate),
        Move("engine wakes", bytes=weights, seconds=sleeps * assumptions.wake_s + weights / engine_rate),
        Move(BASE_MOVE, bytes=0.0, seconds=assumptions.base_s * (sleeps or offloads_state)),
    ]
    if choice.rebuilds_engine and choice.sleep_level:
        moves.append(Move("KV pool made again", bytes=0.0, seconds=assumptions.pool_s))
        moves.append(Move("graphs captured again", bytes=0.0, seconds=assumptions.graphs_s))
    return moves


def pinned_bytes(moves: list[Move]) -> float:
    """Host memory that must be pinned per GPU: training state, frozen models, and the weights of sleep level 1."""
    owners = ("training state", "frozen models", "engine")
    return sum(max((m.bytes for m in moves if m.name.startswith(owner)), default=0.0) for owner in owners)
