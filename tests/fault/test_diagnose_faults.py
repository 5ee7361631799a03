"""Every fault of the night and of the table is found first, and nothing is found in runs that are well.

The logs come from four generators that know nothing of the rules (`bench/synthetic_runs.py` moves a mechanism,
`bench/described_runs.py` tells what people saw, `bench/unseen_runs.py` was written from the table of faults alone,
`bench/reported_runs.py` takes jobs of eleven kinds at their real scales); `bench/diagnose.py` measures the same on many
seeds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollbook.diagnose.finding import Diagnosis
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import RULES, diagnose
from rollbook.drill import faults as drills

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import described_runs
import oncall_runs
import quiet_runs
import reported_runs
import synthetic_runs
import unseen_runs

FAULTS = sorted(synthetic_runs.FAULTS)
STATES = sorted(synthetic_runs.STATES)


def _described(name: str, seed: int, tmp_path: Path) -> Diagnosis:
    return diagnose(load(str(described_runs.write_jsonl(name, seed, tmp_path / "exp.jsonl"))))


def _synthetic(name: str, seed: int, tmp_path: Path, how: str) -> Diagnosis:
    world = synthetic_runs.make(name, seed, own_names=how == "own")
    path = tmp_path / ("run.log" if how == "console" else "exp.jsonl")
    if how == "console":
        synthetic_runs.write_console(world, path)
    else:
        synthetic_runs.write_jsonl(world, path, own_names=how == "own")
    return diagnose(load(str(path)))


OF_EVENTS = {"dead_scorer", "refused_publication", "replica_died", "run_stopped", "slow_replica"}
"""Rules that read what only our own run directories say; drills hold them (test_drill_faults.py)."""


def test_each_fault_has_its_rule() -> None:
    only_reported = {"absurd_gradient", "all_rejected", "no_update", "not_finite"}
    only_reported |= {"slow_environment", "slow_generation"}
    assert set(FAULTS) == set(described_runs.FAULTS) == set(RULES) - OF_EVENTS - only_reported
    assert set(reported_runs.FAULTS) == set(RULES) - OF_EVENTS
    assert {rule for fault in drills.FAULTS.values() for rule in fault.expects} | {"run_stopped"} >= OF_EVENTS
    assert set(STATES) == set(described_runs.STATES)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("how", ["verl", "console", "own"])
def test_a_fault_of_the_mechanism_is_found_first(fault: str, how: str, tmp_path: Path) -> None:
    diagnosis = _synthetic(fault, 2, tmp_path, how)
    assert diagnosis.verdict == fault
    finding = diagnosis.findings[0]
    assert finding.evidence and finding.action and finding.next_check


@pytest.mark.parametrize("seed", [9201, 9206, 9209])
def test_a_leap_of_memory_in_the_hand_over_goes_before_lengths_that_grew_all_along(
    seed: int, tmp_path: Path
) -> None:
    """Each explains the other, and the lengths are dated by the foot of their climb, long before."""
    diagnosis = _synthetic("oom_in_sync", seed, tmp_path, "verl")
    assert diagnosis.verdict == "oom_in_sync"
    assert "late_oom_with_length" in {finding.rule for finding in diagnosis.consequences}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_as_people_describe_it_is_found_first(fault: str, tmp_path: Path) -> None:
    assert _described(fault, 5, tmp_path).verdict == fault


@pytest.mark.parametrize("name", [*reported_runs.FAULTS, *reported_runs.WELL])
def test_a_run_of_some_recipe_is_judged_right(name: str, tmp_path: Path) -> None:
    log = reported_runs.write_console(
        reported_runs.make(name, 101 if name != "dead_sandbox_pool" else 102), tmp_path / "log"
    )
    verdict = diagnose(load(str(log))).verdict
    assert verdict == name if name in RULES else verdict in ("well", "not_judged")


FOUND = (
    "leak_by_count",
    "rare_tail",
    "rare_call",
    "spill_in_words",
    "moments_lost",
    "missed_without_versions",
)


@pytest.mark.parametrize("name", [*FOUND, *quiet_runs.WELL])
def test_a_story_of_an_on_call_engineer_is_judged_right(name: str, tmp_path: Path) -> None:
    log = oncall_runs.write("verl console", name, 1, tmp_path)
    assert diagnose(load(str(log))).verdict in oncall_runs.EXPECTS.get(name, ("well", "not_judged"))


@pytest.mark.parametrize("name", ["healthy", *STATES])
def test_nothing_is_found_in_a_run_that_is_well_or_limited_by_its_algorithm(
    name: str, tmp_path: Path
) -> None:
    for seed in (1, 4):
        assert _described(name, seed, tmp_path).findings == ()
        assert _synthetic(name, seed, tmp_path, "verl").findings == ()


@pytest.mark.parametrize(
    "state", ["learning_rate_too_high", "entropy_collapse", "data_exhausted", "reward_saturates"]
)
def test_a_state_of_the_algorithm_is_named_beside_the_proof(state: str, tmp_path: Path) -> None:
    diagnosis = _described(state, 3, tmp_path)
    assert diagnosis.is_well
    assert state in [s.name for s in diagnosis.states]
    assert len(diagnosis.signals) == 4


def test_the_onset_of_a_missed_sync_is_told_within_some_steps(tmp_path: Path) -> None:
    """World 3 stops publishing at index 29 of 59, which is step 30."""
    finding = _synthetic("missed_weight_sync", 3, tmp_path, "verl").findings[0]
    assert abs(finding.step - 30) <= 4


def test_consequences_of_a_missed_sync_are_not_causes(tmp_path: Path) -> None:
    """Told by versions: every sample ages, so staleness and the gap rise as well."""
    rules = set()
    for seed in range(6):
        diagnosis = _synthetic("missed_weight_sync", seed, tmp_path, "own")
        rules |= {finding.rule for finding in diagnosis.findings}
    assert rules == {"missed_weight_sync"}


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("buffer_never_fills", 121),  # the clip ratio drifts meanwhile: no tail burst
        ("buffer_never_fills", 122),  # seconds of no stage grew too, by a hundredth of the wait
        ("one_source_all_zero", 104),  # the reward had been learned fast
        ("stale_samples", 500),  # over a third of the run
        ("clean_resume", 110),
        ("hiccups", 3),
        ("longer_answers", 3),
    ],
)
def test_a_run_of_an_outsider_is_judged_right(name: str, seed: int, tmp_path: Path) -> None:
    log = unseen_runs.write_jsonl(unseen_runs.make(name, seed), tmp_path / "exp.jsonl")
    assert diagnose(load(str(log))).verdict == (name if name in RULES else "well")


@pytest.mark.parametrize(("name", "seed"), [("missed_weight_sync", 3009), ("filter_starvation", 3001)])
def test_a_ramp_is_dated_where_it_leaves_its_baseline(name: str, seed: int, tmp_path: Path) -> None:
    """Within a tenth of what came after; the scan for the bend alone was early by that and more."""
    log = unseen_runs.make(name, seed)
    found = diagnose(load(str(unseen_runs.write_jsonl(log, tmp_path / "exp.jsonl")))).findings[0]
    assert found.rule == name
    assert abs(found.step - log.first_step - log.at * log.every) <= 0.1 * (log.n - log.at) * log.every


@pytest.mark.parametrize("seed", [20006, 20011])
def test_bursts_are_seen_beside_a_filter_and_beside_growing_answers(seed: int, tmp_path: Path) -> None:
    """In the first a filter makes every step slower meanwhile, in the second the mean grows for good."""
    assert _synthetic("tail_burst", seed, tmp_path, "verl").verdict == "tail_burst"
