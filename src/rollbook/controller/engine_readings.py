"""The engines' counters as differences of two readings, one a step, and who stood idle between them."""

from __future__ import annotations

import time

from rollbook.controller.step_metrics import engine_values, idle_values
from rollbook.observe.values import Ratio, Total, Values
from rollbook.rollout.engine import EngineStats
from rollbook.rollout.router import Router


class EngineReadings:
    """Of all replicas of a router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._last: dict[int, EngineStats] = {}
        self._last_at_s = time.monotonic()

    async def begin(self) -> None:
        """What happened so far belongs to no step."""
        self._last, self._last_at_s = await self._read(), time.monotonic()

    async def since_last(
        self, *, computed_s: float, shares_device: bool, runs_ahead: bool, num_lent_tokens: int
    ) -> Values:
        """
        Args:
            computed_s: seconds of the trainer's forward passes and updates.
            shares_device: engines and trainer own it in turn.
            runs_ahead: the engines had the whole time, and not a wait of the loop alone.
            num_lent_tokens: sampled by an engine that is none of these replicas.
        """
        now_s, now = time.monotonic(), await self._read()
        elapsed_s = now_s - self._last_at_s
        values = engine_values(
            self._last, now, elapsed_s=elapsed_s, out_of_service=self._router.out_of_service
        )
        values |= idle_values(values, computed_s=computed_s, elapsed_s=elapsed_s, shares_device=shares_device)
        num_tokens = values["generated/num_tokens"].result() + num_lent_tokens
        values["generated/num_tokens"] = Total(num_tokens)
        if runs_ahead:
            values["perf/tokens_per_s/gen"] = Ratio(num_tokens, elapsed_s)
        self._last, self._last_at_s = now, now_s
        return values

    async def _read(self) -> dict[int, EngineStats]:
        return {engine.replica_id: await engine.stats() for engine in self._router.engines}
