"""When a store began to spill, where one spill long before it was a moment of its own."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import noisy, run_of
from rollbook.diagnose.finding import Finding
from rollbook.diagnose.rules.object_store_spill import judge
from rollbook.diagnose.series import Event
from rollbook.diagnose.view import View

N = 120
SINCE_70 = [*range(70, 120, 2)]


@pytest.mark.parametrize(
    ("steps", "onset"),
    [
        ([12, *SINCE_70], 70),
        ([12, 31, *SINCE_70], 70),
        ([64, *SINCE_70], 64),
        ([20, 45, 70, 95], 20),
        ([12, 70], 12),
    ],
    ids=["one long before", "two long before", "a few steps before", "rarely all along", "too few for a row"],
)
def test_a_row_of_spills_begins_where_they_come_one_after_the_other(steps: list[int], onset: int) -> None:
    slow = np.where(np.arange(N) >= onset, 30.0, 1.0)
    series = {"timing_s/step": 105.0 + noisy(slow, 14, n=N), "timing_s/adv": noisy(slow / 5, 15, n=N)}
    spills = tuple(Event(kind="object_store_spill", step=s, text=f"Spilled {s * 100} MiB") for s in steps)
    found = judge(View.of(run_of(series, n=N, events=spills)))
    assert isinstance(found, Finding)
    assert found.step == onset
