"""A hand-over that is timed within generation, as verl's `timing_s/reshard` is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.diagnose_runs import noisy, run_of

from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

N = 120
T = np.arange(N)
FEW = np.isin(T, (61, 66, 77, 95, 110)) * 1.0


@pytest.mark.parametrize(
    ("gen_s", "verdict"), [(200.0, "collective_hang"), (0.0, "collective_hang"), (80.0, "well")]
)
def test_a_stall_of_the_hand_over_is_no_longer_generation(gen_s: float, verdict: str) -> None:
    """Where generation grows by as much it only has the stall inside; by another share, all of the step is slow."""
    stalled = 200.0 * FEW
    values = {
        "timing_s/update_weights": noisy(4.0, 13) + stalled,
        "timing_s/gen": noisy(50.0, 10) + gen_s * FEW,
        "timing_s/step": noisy(105.0, 14) + np.maximum(stalled, gen_s * FEW),
    }
    assert diagnose(run_of(values)).verdict == verdict


def test_reshard_is_the_hand_over(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    rows = [{"step": i, "data": {"timing_s/gen": 16.2, "timing_s/reshard": 0.25}} for i in range(1, 9)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert load(str(path)).values["timing_s/update_weights"][0] == 0.25
