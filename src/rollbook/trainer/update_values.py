"""What the updates of a step are reported as."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollbook.observe.values import Last, Low, Peak, Ratio, Total, Values
from rollbook.trainer.optimizer import UpdateReport


def balance_values(rank_tokens: NDArray[np.float64]) -> Values:
    """Tokens of the policy's updates by rank, from the division that every rank knows."""
    low, high = float(rank_tokens.min()), float(rank_tokens.max())
    return {
        "global_seqlen/mean": Ratio(float(rank_tokens.sum()), len(rank_tokens)),
        "global_seqlen/max": Peak(high),
        "global_seqlen/min": Low(low),
        "global_seqlen/minmax_diff": Peak(high - low),
    }


def update_values(report: UpdateReport, prefix: str) -> Values:
    if not report.is_applied:
        return {f"trainer/{prefix}_skipped_updates": Total(1)}
    return {
        f"{prefix}/grad_norm": Ratio(report.grad_norm, 1),
        f"{prefix}/grad_clipped_frac": Ratio(report.is_clipped, 1),
        f"{prefix}/lr": Last(report.lr),
        f"trainer/{prefix}_updates": Total(1),
        f"trainer/{prefix}_unmoved_updates": Total(not report.has_moved),
    }
