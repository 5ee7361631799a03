"""The order in which prompts are asked, resumable without loss or repetition.

Positions 0, 1, 2, ... each stand for one prompt, decided by (seed, epoch) alone. A position is *taken* when it
is handed out and *consumed* when it is acknowledged (trained, or given up for good). Only consumption is saved:
what was in flight when a run died is handed out again, first and in order.

    consumed ░░░░░░░░▒░▒▒░ ...          ░ consumed  ▒ taken, in flight
                     ▲ floor: everything before it is consumed
"""

from __future__ import annotations

import hashlib
import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from rollbook.envs.config import DataConfig
from rollbook.errors import CheckpointError, DataError
from rollbook.types import Prompt


@dataclass(frozen=True, slots=True)
class Pool:
    """Prompts that share a weight: a source, or all of them."""

    prompts: Sequence[Prompt]
    weight: float = 1.0
    end_weight: float = 1.0


class PromptStream:
    """Hands out prompts by position; see the module's drawing. Not for use from several threads."""

    def __init__(
        self,
        pools: Sequence[Pool],
        *,
        seed: int,
        shuffle: bool = True,
        num_epochs: int = 0,
        curriculum_prompts: int = 0,
    ) -> None:
        empty = [idx for idx, pool in enumerate(pools) if not pool.prompts]
        if not pools or empty:
            raise DataError(
                f"{len(empty) or 'no'} of {len(pools)} prompt pools hold a prompt to draw from",
                "look at data.sources: an empty file, or held_out_frac or long_prompts took every row",
            )
        self._pools = list(pools)
        self._digest = _digest(pools)
        self._seed = seed
        self._shuffle = shuffle
        self._curriculum_prompts = curriculum_prompts
        self._num_positions = num_epochs * len(pools[0].prompts) if num_epochs else None
        self._orders: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._num_drawn = [0] * len(pools)
        self._credits = [0.0] * len(pools)
        self._next = 0
        """First position never handed out."""
        self._floor = 0
        self._consumed: set[int] = set()
        """Consumed positions at or above the floor."""
        self._in_flight: dict[str, list[int]] = defaultdict(list)
        """prompt_id -> its positions handed out and not consumed, ascending."""
        self._returned: list[tuple[int, Prompt]] = []
        """Heap of positions to hand out again."""

    @classmethod
    def of(
        cls, prompts_by_source: Sequence[Sequence[Prompt]], config: DataConfig, *, seed: int
    ) -> PromptStream:
        """A stream over training prompts, one list a source of `config`: one pool each where they have weights."""
        pools = []
        for source, prompts in zip(config.sources, prompts_by_source, strict=True):
            if source.weight is not None:
                end_weight = source.weight if source.end_weight is None else source.end_weight
                pools.append(Pool(prompts, source.weight, end_weight))
        return cls(
            pools or [Pool([prompt for prompts in prompts_by_source for prompt in prompts])],
            seed=seed,
            shuffle=config.shuffle,
            num_epochs=config.num_epochs,
            curriculum_prompts=config.curriculum_prompts,
        )

    def take_one(self) -> Prompt | None:
        """The next prompt, or None when every epoch was handed out."""
        if self._returned:
            position, prompt = heapq.heappop(self._returned)
        else:
            drawn = self._draw()
            if drawn is None:
                return None
            position, prompt = drawn
        positions = self._in_flight[prompt.prompt_id]
        positions.append(position)
        positions.sort()
        return prompt

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; fewer when the data ends."""
        taken: list[Prompt] = []
        while len(taken) < num_prompts and (prompt := self.take_one()) is not None:
            taken.append(prompt)
        return taken

    def acknowledge(self, prompt: Prompt) -> None:
        """Count a taken prompt as consumed: trained, or given up for good."""
        self._consumed.add(self._land(prompt))
        while self._floor in self._consumed:
            self._consumed.remove(self._floor)
            self._floor += 1

    def give_back(self, prompt: Prompt) -> None:
        """Hand a taken prompt out again, before any new one."""
        heapq.heappush(self._returned, (self._land(prompt), prompt))

    @property
    def num_consumed(self) -> int:
        return self._floor + len(self._consumed)

    @property
    def num_in_flight(self) -> int:
        return sum(len(positions) for positions in self._in_flight.values())

    @property
    def epoch(self) -> int:
        """Whole passes consumed, of the first pool."""
        return self._floor // len(self._pools[0].prompts)

    @property
    def is_consumed(self) -> bool:
        """Every epoch was consumed: there is nothing left to do."""
        return self._num_positions is not None and self._floor >= self._num_positions

    def state(self) -> dict[str, JsonValue]:
        """What `restore` needs, as JSON. What is in flight counts as not consumed."""
        return {"floor": self._floor, "consumed": [*sorted(self._consumed)], "data": self._identity()}

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Continue after a saved state: everything not consumed is handed out again, in order.

        Raises:
            CheckpointError: the state is of other data, another seed or another order.
        """
        saved, here = state["data"], self._identity()
        if saved != here:
            differs = {
                key: value
                for key, value in here.items()
                if not isinstance(saved, dict) or saved.get(key) != value
            }
            raise CheckpointError(
                f"the checkpoint's prompts are not these: it has {saved}, the config gives {differs}",
                "resume with the data, seed and weights the run was started with, or start a new run",
            )
        floor, consumed = state["floor"], state["consumed"]
        assert isinstance(floor, int) and isinstance(consumed, list)
        assert self._next == 0, "restore before the first prompt is taken"
        self._floor = floor
        self._consumed = {int(str(position)) for position in consumed}
        # Draw the past again: which pool a position falls to depends on those before it.
        end = max(self._consumed, default=floor - 1) + 1
        while self._next < end:
            drawn = self._draw()
            assert drawn is not None
            position, prompt = drawn
            if position >= floor and position not in self._consumed:
                heapq.heappush(self._returned, (position, prompt))

    def _land(self, prompt: Prompt) -> int:
        """Position of the earliest flight of this prompt; a row may be in flight for two epochs at once."""
        positions = self._in_flight.get(prompt.prompt_id)
        if not positions:
            raise DataError(
                f"prompt {prompt.prompt_id!r} is not in flight",
                "each taken prompt is acknowledged or given back exactly once",
            )
        position = positions.pop(0)
        if not positions:
            del self._in_flight[prompt.prompt_id]
        return position

    def _draw(self) -> tuple[int, Prompt] | None:
        position = self._next
        if self._num_positions is not None and position >= self._num_positions:
            return None
        self._next += 1
        pool_idx = self._pool_at(position)
        epoch, place = divmod(self._num_drawn[pool_idx], len(self._pools[pool_idx].prompts))
        self._num_drawn[pool_idx] += 1
        return position, self._pools[pool_idx].prompts[self._order(pool_idx, epoch)[place]]

    def _pool_at(self, position: int) -> int:
        """Smooth weighted round robin: over any stretch each pool gets its share to within one prompt."""
        if len(self._pools) == 1:
            return 0
        progress = min(position / self._curriculum_prompts, 1.0) if self._curriculum_prompts else 0.0
        weights = [pool.weight + progress * (pool.end_weight - pool.weight) for pool in self._pools]
        total = sum(weights)
        self._credits = [credit + weight / total for credit, weight in zip(self._credits, weights)]
        chosen = max(range(len(weights)), key=lambda idx: (weights[idx] > 0, self._credits[idx]))
        self._credits[chosen] -= 1.0
        return chosen

    def _order(self, pool_idx: int, epoch: int) -> NDArray[np.int64]:
        key = (pool_idx, epoch)
        if key not in self._orders:
            size = len(self._pools[pool_idx].prompts)
            # Positions are drawn in order: an epoch once left is never needed again.
            for old in [k for k in self._orders if k[0] == pool_idx]:
                del self._orders[old]
            draw = np.random.default_rng([self._seed, pool_idx, epoch])
            self._orders[key] = draw.permutation(size) if self._shuffle else np.arange(size)
        return self._orders[key]

    def _identity(self) -> dict[str, JsonValue]:
        return {
            "num_prompts": sum(len(pool.prompts) for pool in self._pools),
            "digest": self._digest,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_positions": self._num_positions,
            "weights": [[pool.weight, pool.end_weight] for pool in self._pools],
            "curriculum_prompts": self._curriculum_prompts,
        }


def _digest(pools: Sequence[Pool]) -> str:
    digest = hashlib.sha256()
    for pool in pools:
        for prompt in pool.prompts:
            digest.update(prompt.prompt_id.encode() + b"\0" + prompt.prompt_ids.tobytes())
    return digest.hexdigest()[:16]
