"""Who owns how many bytes on which device: every owner counted from its own tensors, no byte counted twice.

Owners register once, with a function that returns their tensors as they are now; a reading calls all of them. Memory
that two owners share (an engine that computes with the trainer's weights) counts for the one that registered first.
What the allocator has reserved beyond what it has allocated is fragmentation when it grows from switch to switch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rollbook.observe.values import Last, Low, Peak, Values

Owner = Literal[
    "weights",
    "gradients",
    "master weights",
    "optimizer moments",
    "critic",
    "reference",
    "teacher",
    "rollout weights",
    "KV pool",
    "CUDA graphs",
    "buckets",
]
"""The ledger's names (`ledger.memory`), so that expectation and reading stand side by side."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One owner's bytes on one device."""

    owner: Owner
    device: str
    num_bytes: int
    """Without what an earlier owner already counts."""
    expected_bytes: float | None


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The allocator's view of one device. On a host only `allocated_bytes` means something: the registered bytes."""

    device: str
    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int

    @property
    def fragmented_bytes(self) -> int:
        return self.reserved_bytes - self.allocated_bytes


@dataclass(frozen=True, slots=True)
class Reading:
    """All owners and devices at one point of a hand-over."""

    point: str
    holdings: tuple[Holding, ...]
    devices: tuple[DeviceState, ...]

    def bytes_of(self, owner: Owner, device: str) -> int:
        return sum(h.num_bytes for h in self.holdings if h.owner == owner and h.device == device)

    def values(self) -> Values:
        """The catalogue's `memory/...` metrics of the accelerators (of the host, where there is none)."""
        accelerators = [state for state in self.devices if state.device != "cpu"] or list(self.devices)
        names = {state.device for state in accelerators}
        values: Values = {}
        for name, read in (
            ("allocated_bytes", lambda s: s.allocated_bytes),
            ("reserved_bytes", lambda s: s.reserved_bytes),
            ("fragmented_bytes", lambda s: s.fragmented_bytes),
        ):
            values[f"memory/{self.point}/{name}"] = Peak(max(map(read, accelerators), default=0))
        free = min((state.free_bytes for state in accelerators), default=0)
        values[f"memory/{self.point}/free_bytes"] = Low(free)
        for owner in dict.fromkeys(h.owner for h in self.holdings):
            held = [h for h in self.holdings if h.owner == owner and h.device in names]
            key = f"memory/owner/{owner.replace(' ', '_')}"
            values[f"{key}/bytes"] = Last(sum(h.num_bytes for h in held))
            expected = [h.expected_bytes for h in held if h.expected_bytes is not None]
            if expected:
                values[f"{key}/expected_bytes"] = Last(sum(expected))
        return values


class Register:
    """The owners of one process."""

    def __init__(self, expected: Mapping[tuple[Owner, str], float] | None = None) -> None:
        """
        Args:
            expected: (owner, device) -> bytes by the ledger, for the readings.
        """
        self._owners: list[tuple[Owner, Callable[[], Iterable[Tensor]]]] = []
        self._expected = dict(expected or {})

    def add(self, owner: Owner, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Register an owner. `tensors` is called at every reading; what was dropped is simply not returned."""
        self._owners.append((owner, tensors))

    def read(self, point: str) -> Reading:
        """Count every storage once, for the first owner that returns a tensor in it."""
        seen: set[tuple[str, int]] = set()
        counts = dict.fromkeys(self._expected, 0)  # an expected owner is shown when it holds nothing, too
        for owner, tensors in self._owners:
            for tensor in tensors():
                storage = tensor.untyped_storage()
                device, address = str(tensor.device), storage.data_ptr()
                if storage.nbytes():
                    is_new = (device, address) not in seen
                    seen.add((device, address))
                    counts[owner, device] = counts.get((owner, device), 0) + is_new * storage.nbytes()
        holdings = tuple(
            Holding(owner, device, num_bytes, self._expected.get((owner, device)))
            for (owner, device), num_bytes in counts.items()
        )
        return Reading(point, holdings, _device_states(holdings))


def _device_states(holdings: Iterable[Holding]) -> tuple[DeviceState, ...]:
    registered: dict[str, int] = {}
    for holding in holdings:
        registered[holding.device] = registered.get(holding.device, 0) + holding.num_bytes
    states = []
    for device in sorted(registered | dict.fromkeys(_accelerators(), 0)):
        if device.startswith("cuda"):
            allocated = torch.cuda.memory_allocated(device)
            free = torch.cuda.mem_get_info(device)[0]
            state = DeviceState(device, allocated, torch.cuda.memory_reserved(device), free)
        else:
            state = DeviceState(device, registered[device], registered[device], 0)
        states.append(state)
    return tuple(states)


def _accelerators() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [f"cuda:{idx}" for idx in range(torch.cuda.device_count())]
