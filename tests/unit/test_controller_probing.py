"""The probe must not make a publication wait for a long response."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from rollbook.controller.probing import Prober
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.engine import EngineStats
from rollbook.sync.config import SyncConfig


class BusyEngine:
    """Says how many sequences it has, and fails when it is asked for one more."""

    replica_id = 0

    def __init__(self, *, num_running: int, num_waiting: int) -> None:
        self.num_running, self.num_waiting = num_running, num_waiting

    async def stats(self) -> EngineStats:
        return EngineStats(
            weight_version=1,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_slots=4,
            kv_pool_tokens=64,
            kv_used_tokens=0,
            prefill_tokens=0,
            cached_prompt_tokens=0,
            decode_tokens=0,
            decode_steps=0,
            num_preemptions=0,
            busy_s=0.0,
        )

    async def generate(self, request: object) -> object:
        raise AssertionError("the probe took a slot")


@pytest.mark.parametrize(("num_running", "num_waiting"), [(4, 0), (4, 9), (2, 2)])
async def test_a_replica_whose_slots_are_taken_is_not_asked(num_running: int, num_waiting: int) -> None:
    prober = Prober(
        sync=SyncConfig(),
        rollout=RolloutConfig(),
        trainer=cast(Any, None),
        prompt_ids=np.array([1, 2], np.int32),
        max_context_tokens=64,
    )
    engine = cast(Any, BusyEngine(num_running=num_running, num_waiting=num_waiting))
    assert await prober.check(engine, 1, cast(Any, None)) is None
    assert prober.num_checked == 0
