"""One short prompt after each commit: what digests cannot see.

Digests prove that the bytes arrived. The probe checks what the engine does with them: scales of quantized weights,
tied and derived tensors, caches of the old weights, its numerics. The engine samples a few tokens, the trainer
computes the same tokens' logprobs, and the largest difference is held against what this kind of engine shows in
this dtype when all is well (its baseline: the largest gap of its first probes, each of which had to be plausible).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rollbook.types import Floats, Ids, VersionRun

FLOOR_NATS: Mapping[str, float] = {
    "float32": 1e-4,
    "float16": 2e-2,
    "bfloat16": 5e-2,
    "int8": 0.1,
    "fp8_block": 0.3,
}
"""Differences that mean nothing: order of summation, kernels, and what weights lose that are sent as codes."""
CEILING_NATS: Mapping[str, float] = {
    "float32": 1e-2,
    "float16": 0.5,
    "bfloat16": 1.0,
    "int8": 2.0,
    "fp8_block": 4.0,
}
"""No sound engine shows more on any token: a gap above it never becomes a baseline."""
BASELINE_PROBES = 3


class Sampled(Protocol):
    """What the probe reads of an engine's response (`rollout.engine.Response`)."""

    @property
    def response_ids(self) -> Ids: ...
    @property
    def logprobs(self) -> Floats: ...
    @property
    def version_runs(self) -> tuple[VersionRun, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """One probe of one replica."""

    replica_id: int
    weight_version: int
    gap_max_nats: float
    """Largest abs(trainer - engine) logprob over the probe's tokens."""
    gap_mean_nats: float
    limit_nats: float
    """What `gap_max_nats` was held against."""
    baseline_nats: float
    is_passed: bool
    why: str
    """Empty when it passed."""


@dataclass(slots=True)
class Probe:
    """Probes replicas and keeps a baseline per (kind of engine, dtype).

    Args:
        prompt_ids: [n] int32, the same prompt every time.
        factor: how far above its baseline a gap may rise.
    """

    prompt_ids: Ids
    factor: float = 4.0
    _gaps: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    async def check(
        self,
        *,
        replica_id: int,
        weight_version: int,
        engine: str,
        dtype: str,
        sample: Callable[[Ids], Awaitable[Sampled]],
        score: Callable[[Ids, Ids], Awaitable[Floats]],
    ) -> ProbeReport:
        """Sample and compare.

        Args:
            sample: prompt ids -> what the engine of this replica sampled, at temperature 1.
            score: (prompt ids, response ids) -> [n] float32, the trainer's logprobs at `weight_version`.
        """
        sampled = await sample(self.prompt_ids)
        scored = await score(self.prompt_ids, sampled.response_ids)
        gaps = np.abs(scored.astype(np.float64) - sampled.logprobs.astype(np.float64))
        gap = float(gaps.max()) if len(gaps) and not np.isnan(gaps).any() else float("inf")
        ceiling, floor = CEILING_NATS.get(dtype, 1.0), FLOOR_NATS.get(dtype, 5e-2)
        held = self._gaps.setdefault((engine, dtype), [])
        baseline = max(held, default=0.0)
        is_learning = len(held) < BASELINE_PROBES
        limit = ceiling if is_learning else min(ceiling, max(floor, self.factor * baseline))
        versions = sorted({run.weight_version for run in sampled.version_runs})
        why = ""
        if versions != [weight_version]:
            why = f"sampled under versions {versions} after version {weight_version} was committed"
        elif not gap <= limit:
            why = (
                f"its logprobs are {gap:.2g} nats from the trainer's at version {weight_version}; the limit is "
                f"{limit:.2g} (baseline {baseline:.2g} of {engine} in {dtype})"
            )
        elif is_learning:
            held.append(gap)
        return ProbeReport(
            replica_id=replica_id,
            weight_version=weight_version,
            gap_max_nats=gap,
            gap_mean_nats=float(gaps.mean()) if len(gaps) else float("inf"),
            limit_nats=limit,
            baseline_nats=baseline,
            is_passed=not why,
            why=why and f"replica {replica_id}: {why}",
        )
