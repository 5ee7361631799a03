"""Distributions that the simulation draws from: lengths, turns, seconds of environments and rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rollbook.errors import PlanError
from rollbook.ledger.lengths import LengthDistribution

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
"""n samples of a distribution."""


def constant(value: float) -> Draw:
    """Every sample is `value`."""
    return lambda rng, n: np.full(n, float(value), np.float64)


def lengths(distribution: LengthDistribution) -> Draw:
    """Response lengths of the ledger's distribution."""
    return lambda rng, n: np.asarray(distribution.quantile(rng.random(n)), np.float64)


def lognormal(mean: float, p99: float) -> Draw:
    """Log-normal with this mean and 99th percentile; constant when that is not above the mean."""
    if p99 <= mean:
        return constant(mean)
    # mean = exp(mu + s²/2) and p99 = exp(mu + 2.326 s): the smaller root is the one with the shorter tail.
    z, log_ratio = 2.326, math.log(p99 / mean)
    return lognormal_of(mean, z - math.sqrt(max(z * z - 2 * log_ratio, 0.0)))


def lognormal_of(mean: float, sigma: float) -> Draw:
    """Log-normal with this mean and standard deviation of the logarithm."""
    if sigma == 0 or mean == 0:
        return constant(mean)
    mu = math.log(mean) - sigma**2 / 2
    return lambda rng, n: rng.lognormal(mu, sigma, n)


def empirical(values: Sequence[float] | NDArray[np.float64]) -> Draw:
    """Samples with replacement from measured values."""
    held = np.asarray(values, np.float64)
    if held.size == 0:
        raise PlanError("an empirical distribution has no values", "give at least one measured value")
    return lambda rng, n: rng.choice(held, n)
