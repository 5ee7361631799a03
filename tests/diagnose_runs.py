"""A healthy synchronous run of which tests of the diagnosis change a few series."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollbook.diagnose.readers.assemble import assemble
from rollbook.diagnose.series import Event, Row, RunSeries

Array = NDArray[np.float64]
DIFF, KL, PEARSON = (
    "training/rollout_probs_diff_mean",
    "rollout_corr/kl",
    "training/rollout_actor_probs_pearson_corr",
)
ALLOCATED, RESERVED = "perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"


def noisy(level: float | Array, seed: int, size: float = 0.04, *, n: int = 120) -> Array:
    """[n] `level` times log-normal noise."""
    return np.asarray(level * np.exp(np.random.default_rng(seed).normal(0, size, n)))


def run_of(
    changed: dict[str, Array],
    *,
    n: int = 120,
    decimals: int | None = None,
    events: tuple[Event, ...] = (),
    format: str = "verl-file",
) -> RunSeries:
    """The run with some series replaced, NaN where they are missing; `decimals` rounds all as a console does; events
    come after the last step."""
    steps = np.arange(n, dtype=np.float64)
    values = {
        "critic/score/mean": 0.3 + 0.2 * steps / n + np.random.default_rng(1).normal(0, 0.01, n),
        DIFF: noisy(0.006, 2, n=n),
        KL: noisy(0.001, 3, 0.1, n=n),
        "actor/grad_norm": noisy(0.2, 4, 0.1, n=n),
        "actor/entropy": noisy(0.4, 5, 0.02, n=n),
        "actor/ppo_kl": noisy(2e-4, 6, 0.1, n=n),
        "actor/pg_clipfrac": noisy(2e-3, 7, 0.1, n=n),
        "response_length/mean": noisy(800.0, 8, n=n),
        "response_length/max": noisy(3000.0, 9, n=n),
        "timing_s/gen": noisy(50.0, 10, n=n),
        "timing_s/update_actor": noisy(40.0, 11, n=n),
        "timing_s/old_log_prob": noisy(10.0, 12, n=n),
        "timing_s/update_weights": noisy(4.0, 13, n=n),
        "timing_s/step": noisy(105.0, 14, n=n),
        ALLOCATED: np.maximum.accumulate(noisy(50.0, 15, 0.001, n=n)),
        RESERVED: np.maximum.accumulate(noisy(58.0, 16, 0.001, n=n)),
    } | changed
    if decimals is not None:
        values = {name: np.round(series, decimals) for name, series in values.items()}
    rows = [
        Row(step=i + 1, data={k: float(v[i]) for k, v in values.items() if np.isfinite(v[i])})
        for i in range(n)
    ]
    return assemble([*rows, *events], source="log", format=format)
