"""What is generated and not trained: the counts of filters of flat groups, and the batch beside which they stand."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.view import View

FLAT_GROUPS = "evicted/flat/num_groups"
"""Groups that our own filter dropped; logged in the steps that have some."""


def batch_of(view: View, dropped: str) -> float:
    """What a step trains on, in the unit of what is dropped; NaN when it cannot be told."""
    batch = view.last("batch/num_groups" if dropped.startswith(FLAT_GROUPS) else "batch/num_sequences")
    if np.isfinite(batch):
        return batch
    length, prompt = view.last("response_length/mean"), view.last("prompt_length/mean")
    tokens = view.last("perf/total_num_tokens")
    return tokens / (length + (prompt if np.isfinite(prompt) else 0.0))
