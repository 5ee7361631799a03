"""Stages that each take some seconds more, however long they took: what they share is the way of the batch. Stages that
are slower in proportion share a host, and one that is slower alone computes something else."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import noisy, run_of
from rollbook.diagnose.finding import Diagnosis
from rollbook.diagnose.tree import diagnose

N = 160
T = np.arange(N, dtype=np.float64)
FILLS = np.clip((T - 60) / 90, 0, 1) ** 0.8
STAGES = {"adv": 0.15, "reward": 0.9, "old_log_prob": 12.0, "ref": 11.0, "update_actor": 45.0}


def _run(
    more_s: dict[str, float] | None = None,
    times: dict[str, float] | None = None,
    *,
    work: float = 1.0,
    leave_out: tuple[str, ...] = (),
    format: str = "verl-file",
) -> Diagnosis:
    """A run in which stages take, in the end, so many seconds more, or so many times as long, and answers are `work`
    times as long."""
    grown = 1 + (work - 1) * FILLS
    changed = {
        "response_length/mean": noisy(800.0 * grown, 1, 0.02, n=N),
        "timing_s/gen": noisy(55.0 * grown, 2, 0.02, n=N),
    }
    for i, (stage, seconds) in enumerate(STAGES.items()):
        computing = seconds * (grown if seconds > 5 else 1.0)
        slow = (
            computing * (1 + ((times or {}).get(stage, 1.0) - 1) * FILLS)
            + (more_s or {}).get(stage, 0.0) * FILLS
        )
        changed[f"timing_s/{stage}"] = noisy(slow, 3 + i, 0.02, n=N)
    changed["timing_s/step"] = (
        np.sum([v for k, v in changed.items() if k.startswith("timing_s/")], axis=0) + 5.0
    )
    missing = {f"timing_s/{stage}": np.full(N, np.nan) for stage in leave_out}
    return diagnose(run_of(changed | missing, n=N, format=format))


SAME = {"adv": 1.6, "reward": 2.4, "old_log_prob": 2.0, "ref": 1.5, "update_actor": 2.2}


@pytest.mark.parametrize("work", [0.8, 1.0, 1.3])
def test_the_same_seconds_in_every_stage_are_the_batch_that_goes_over_a_disk(work: float) -> None:
    diagnosis = _run(SAME, work=work)
    assert diagnosis.verdict == "object_store_spill"
    assert 50 <= diagnosis.findings[0].step <= 85
    assert "timing_s/adv" in {item.metric for item in diagnosis.findings[0].evidence}


def test_stages_that_compute_bear_out_the_only_light_one_that_is_timed() -> None:
    """As in a log that has neither the step's seconds nor the scorer's."""
    assert _run(SAME, leave_out=("reward", "step")).verdict == "object_store_spill"


@pytest.mark.parametrize(
    "times",
    [
        {"adv": 2.5, "reward": 2.5, "old_log_prob": 1.3, "ref": 1.3, "update_actor": 1.3},
        {"adv": 4.0, "reward": 4.0},
        {"adv": 4.0, "reward": 4.0, "old_log_prob": 1.1, "ref": 1.1, "update_actor": 1.1},
        {"adv": 15.0},
        {"reward": 5.0},
        {"old_log_prob": 1.4, "ref": 1.4, "update_actor": 1.2},
    ],
    ids=["a slow host", "a busy processor", "both", "another estimator", "a slow scorer", "a slower device"],
)
@pytest.mark.parametrize("leave_out", [(), ("reward",)], ids=["all timed", "no scorer"])
def test_what_is_slower_in_proportion_or_alone_is_no_batch_on_a_disk(
    times: dict[str, float], leave_out: tuple[str, ...]
) -> None:
    assert _run(times=times, leave_out=leave_out).verdict != "object_store_spill"


def test_longer_answers_and_trifles_are_none() -> None:
    assert _run(work=2.0).verdict == "well"
    assert _run({stage: 0.1 * seconds for stage, seconds in SAME.items()}).verdict == "well"
