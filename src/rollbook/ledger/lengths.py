"""How long responses are: a truncated log-normal, or what was seen.

The slowest sequences decide a synchronous step, so the ledger keeps the whole curve S(t), the fraction of
responses longer than t tokens, instead of a mean. A response that would pass the limit is cut there and
counts as clipped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.errors import PlanError
from rollbook.ledger.quantity import require_number

MOST_SIGMA = 20.0
"""Measured lengths have at most ln(limit) / 2; beyond that their exponentials pass the range of a float."""

Curve = NDArray[np.floating[Any]]
"""[n] float64."""

DEFAULT_SIGMA = 0.6
"""Standard deviation of ln(length) when nothing is known of the task."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Response lengths in tokens, between 1 and `max_tokens`.

    Give `samples` for an empirical distribution (they are clipped to `max_tokens`), else `mean_tokens` (after
    clipping) and `sigma`, the standard deviation of ln(length) before clipping.
    """

    max_tokens: int
    mean_tokens: float
    sigma: float = DEFAULT_SIGMA
    samples: tuple[float, ...] = ()
    _mu: float = field(init=False, repr=False, compare=False, default=0.0)

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise PlanError(f"max response tokens is {self.max_tokens}", "give at least 1")
        if not 0 < self.mean_tokens <= self.max_tokens:
            raise PlanError(
                f"mean response of {self.mean_tokens} tokens, limit {self.max_tokens}",
                "the mean lies above 0 and at or below the limit",
            )
        require_number(
            "length sigma",
            self.sigma,
            least=0,
            most=MOST_SIGMA,
            remedy="give 0 (all equal) or more; 0.6 is usual",
        )
        object.__setattr__(self, "_mu", _solve_mu(self.mean_tokens, self.max_tokens, self.sigma))

    @classmethod
    def from_samples(cls, lengths: Sequence[float], max_tokens: int | None = None) -> LengthDistribution:
        """The empirical distribution of `lengths` [n], clipped to `max_tokens`.

        Raises:
            PlanError: no lengths, or one below 1.
        """
        values = np.asarray(lengths, np.float64)
        if values.size == 0 or not np.isfinite(values).all() or values.min() < 1:
            raise PlanError(
                "lengths are empty or hold a value below 1 or not finite",
                "give one positive length per response",
            )
        limit = int(max_tokens if max_tokens is not None else values.max())
        clipped = np.sort(np.minimum(values, limit))
        return cls(limit, float(clipped.mean()), float(np.log(clipped).std()), tuple(clipped.tolist()))

    def survival(self, tokens: Curve | float) -> Curve:
        """Fraction of responses longer than `tokens`; 0 from the limit on."""
        at = np.asarray(tokens, np.float64)
        if self.samples:
            alive: Curve = 1.0 - np.searchsorted(np.asarray(self.samples), at, side="right") / len(
                self.samples
            )
        elif self.sigma == 0 or self.mean_tokens >= self.max_tokens:
            alive = (at < self.mean_tokens).astype(np.float64)
        else:
            with np.errstate(divide="ignore"):
                alive = 1.0 - normal_cdf((np.log(np.maximum(at, 1e-9)) - self._mu) / self.sigma)
        return np.where(at >= self.max_tokens, 0.0, alive)

    @property
    def clip_frac(self) -> float:
        """Fraction of responses that end at the limit."""
        if self.samples:
            return float(np.mean(np.asarray(self.samples) >= self.max_tokens))
        if self.mean_tokens >= self.max_tokens:
            return 1.0
        if self.sigma == 0:
            return 0.0
        return float(1.0 - normal_cdf(np.float64((math.log(self.max_tokens) - self._mu) / self.sigma)))

    def quantile(self, frac: Curve | float) -> Curve:
        """Length that `frac` of the responses do not exceed."""
        at = np.asarray(frac, np.float64)
        if self.samples:
            return np.asarray(np.quantile(np.asarray(self.samples), at, method="inverted_cdf"), np.float64)
        if self.sigma == 0 or self.mean_tokens >= self.max_tokens:
            return np.full_like(at, self.mean_tokens)
        grown = np.exp(self._mu + self.sigma * normal_quantile(at))
        return np.asarray(np.clip(grown, 1.0, self.max_tokens))

    def mean_square(self) -> float:
        """Mean of the squared length; attention FLOPs need it."""
        return _mean_square(self)

    def expected_max(self, num_sequences: int) -> float:
        """Expected longest of `num_sequences` independent responses (its median, closely)."""
        return float(self.quantile(0.5 ** (1.0 / max(num_sequences, 1))))

    def spread(self, num_sequences: int) -> Curve:
        """[n] lengths at the quantiles (i + 1/2) / n, shortest first: a typical draw without noise."""
        return self.quantile((np.arange(num_sequences) + 0.5) / num_sequences)


@functools.lru_cache(maxsize=256)
def _mean_square(lengths: LengthDistribution) -> float:
    """E[X²] = integral of 2 t S(t)."""
    edges = np.linspace(0.0, lengths.max_tokens, 513)
    middle = (edges[1:] + edges[:-1]) / 2
    return float(np.sum(2 * middle * lengths.survival(middle)) * (edges[1] - edges[0]))


@functools.lru_cache(maxsize=256)
def _solve_mu(mean_tokens: float, max_tokens: int, sigma: float) -> float:
    """mu of ln(length) so that the mean after clipping at `max_tokens` is `mean_tokens` (bisection)."""
    if sigma == 0 or mean_tokens >= max_tokens:
        return math.log(mean_tokens)
    low, high = math.log(mean_tokens) - sigma**2 - 5.0, math.log(max_tokens) + 12.0 * sigma
    for _ in range(60):
        middle = (low + high) / 2
        if clipped_lognormal_mean(middle, sigma, max_tokens) < mean_tokens:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def clipped_lognormal_mean(mu: float, sigma: float, limit: float) -> float:
    """E[min(X, limit)] of a log-normal X.

    Source: the limited expected value, exp(mu + s²/2) Phi(z - s) + limit (1 - Phi(z)),
    z = (ln limit - mu) / s.
    """
    z = (math.log(limit) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * _phi(z - sigma) + limit * (1 - _phi(z))


def _phi(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def normal_cdf(z: Curve | np.float64) -> Curve:
    """Standard normal CDF, to 7.5e-8. Source: Abramowitz and Stegun, 26.2.17."""
    t = 1.0 / (1.0 + 0.2316419 * np.abs(z))
    poly = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) * poly
    return np.where(z >= 0, 1.0 - upper, upper)


def normal_quantile(frac: Curve | float) -> Curve:
    """Inverse of the standard normal CDF, to 5e-4. Source: Abramowitz and Stegun, 26.2.23."""
    frac = np.asarray(frac, np.float64)
    tail = np.clip(np.where(frac < 0.5, frac, 1.0 - frac), 1e-15, 0.5)
    t = np.sqrt(-2.0 * np.log(tail))
    z = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)))
    return np.asarray(np.where(frac < 0.5, -z, z), np.float64)


_MOST_GROWTH = math.log(1e12)


def grown_by(frac_per_step: float, num_steps: int) -> float:
    """Factor after so many steps, within 1e-12 and 1e12: a limit cuts what grows, whatever the factor.

    >>> round(grown_by(0.01, 100), 3), grown_by(0.5, 100_000) > 9e11
    (2.705, True)
    """
    growth = num_steps * math.log1p(frac_per_step)
    return math.exp(min(max(growth, -_MOST_GROWTH), _MOST_GROWTH))
