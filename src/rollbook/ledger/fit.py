"""Coefficients of this machine from measured points: what `rollbook calibrate` calls after measuring.

All coefficients are seconds per something and cannot be negative, and a point of 2 ms has as much to say as one of
2 s, so the fits are non-negative least squares on relative errors. Passes of the trainer are nearly straight lines
only: they are fitted best at the sizes that a run mostly has, which are the largest that were measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.errors import DataError
from rollbook.ledger.hardware import CallFit, DecodeFit, PassFit, TrainFit


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One measured decode step."""

    num_rows: int
    context_tokens: float
    """Tokens that the rows hold together."""
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One measured prefill call."""

    num_tokens: int
    """All prompts of the call together."""
    seconds: float


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """One measured pass over packed micro batches."""

    num_micro_batches: int
    num_tokens: int
    seconds: float


def fit_nonnegative(
    columns: Sequence[Sequence[float]], seconds: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[NDArray[np.float64], float]:
    """Least squares of seconds = columns @ coefficients, coefficients >= 0, on relative errors.

    Every subset of columns is tried (there are at most four), so the answer is exact.

    Args:
        columns: k columns of n values.
        seconds: n measured values above 0.
        weights: n values above 0, of the relative errors; None: all alike.
    Returns:
        [k] coefficients, and the (weighted) root mean square relative error of the fit.
    Raises:
        DataError: fewer points than coefficients, or a measured value that is not positive.
    """
    design = np.asarray(columns, np.float64).T
    target = np.asarray(seconds, np.float64)
    if len(target) < design.shape[1]:
        raise DataError(
            f"{len(target)} measured points for {design.shape[1]} coefficients", "measure at more sizes"
        )
    if not (np.isfinite(target).all() and (target > 0).all()):
        raise DataError("a measured time is zero, negative or not finite", "measure again on a quiet machine")
    weight = np.ones(len(target)) if weights is None else np.asarray(weights, np.float64)
    weight /= np.sqrt(np.mean(weight**2))
    relative = design / target[:, None] * weight[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    best, best_error = np.zeros(design.shape[1]), float("inf")
    for size in range(1, design.shape[1] + 1):
        for subset in itertools.combinations(range(design.shape[1]), size):
            part = relative[:, subset] / scale[list(subset)]
            solution = np.linalg.lstsq(part, weight, rcond=None)[0]
            if (solution < 0).any():
                continue
            error = float(np.sqrt(np.mean((part @ solution - weight) ** 2)))
            if error < best_error - 1e-12:
                best, best_error = np.zeros(design.shape[1]), error
                best[list(subset)] = solution / scale[list(subset)]
    return best, best_error


def fit_decode(points: Sequence[DecodePoint], prefill: Sequence[PrefillPoint]) -> DecodeFit:
    """Seconds of a decode step = base + per_row x rows + per_row_token x context; prefill = base + tokens / rate.

    Raises:
        DataError: fewer than three decode or two prefill points.
    """
    columns = [[1.0] * len(points), [float(p.num_rows) for p in points], [p.context_tokens for p in points]]
    (base, per_row, per_token), error = fit_nonnegative(columns, [p.seconds for p in points])
    prefill_base, prefill_rate, _ = _fit_rate(
        [1] * len(prefill), [p.num_tokens for p in prefill], [p.seconds for p in prefill]
    )
    return DecodeFit(
        base_s=float(base),
        per_row_s=float(per_row),
        per_row_token_s=float(per_token),
        prefill_base_s=prefill_base,
        prefill_tokens_per_s=prefill_rate,
        error_frac=error,
    )


def fit_train(
    train: Sequence[BatchPoint],
    forward: Sequence[BatchPoint],
    *,
    optimizer_s: float,
    num_params: int,
) -> TrainFit:
    """Seconds = per_micro_batch x micro batches + tokens / rate, apart for training and forwards.

    Args:
        train: forward and backward, without the optimizer.
        forward: logprobs only.
        optimizer_s: one optimizer update, clipping included.
        num_params: of the model that was measured.
    Raises:
        DataError: fewer than two points of either.
    """
    per_batch, rate, error = _fit_batches(train)
    forward_per_batch, forward_rate, _ = _fit_batches(forward)
    return TrainFit(
        per_micro_batch_s=per_batch,
        tokens_per_s=rate,
        forward_per_micro_batch_s=forward_per_batch,
        forward_tokens_per_s=forward_rate,
        optimizer_s_per_param=optimizer_s / num_params,
        error_frac=error,
    )


def fit_pass(points: Sequence[BatchPoint]) -> PassFit:
    """Seconds = per_micro_batch x micro batches + tokens / rate.

    Raises:
        DataError: fewer than two points.
    """
    per_batch, rate, _ = _fit_batches(points)
    return PassFit(per_micro_batch_s=per_batch, tokens_per_s=rate)


def fit_call(points: Sequence[BatchPoint]) -> CallFit:
    """Seconds of a call = base + tokens / rate, whatever the micro batches.

    Raises:
        DataError: fewer than two points.
    """
    base_s, rate, _ = _fit_rate(
        [1] * len(points), [p.num_tokens for p in points], [p.seconds for p in points]
    )
    return CallFit(base_s=base_s, tokens_per_s=rate)


def _fit_batches(points: Sequence[BatchPoint]) -> tuple[float, float, float]:
    """As `_fit_rate`, a point's error by the root of its tokens: one group alone costs less than the line through the
    run's own sizes says, because nothing waits for memory yet."""
    tokens = [p.num_tokens for p in points]
    return _fit_rate(
        [p.num_micro_batches for p in points],
        tokens,
        [p.seconds for p in points],
        weights=[math.sqrt(max(count, 1)) for count in tokens],
    )


def _fit_rate(
    calls: Sequence[int],
    tokens: Sequence[int],
    seconds: Sequence[float],
    weights: Sequence[float] | None = None,
) -> tuple[float, float, float]:
    """Seconds per call, tokens per second (infinite where nothing depends on them), and the error of the fit."""
    (per_call, per_token), error = fit_nonnegative(
        [[float(c) for c in calls], [float(t) for t in tokens]], seconds, weights
    )
    return float(per_call), 1.0 / float(per_token) if per_token > 0 else float("inf"), error
