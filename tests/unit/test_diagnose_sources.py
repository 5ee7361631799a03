"""Rewards that are gone at once: whose they are is said as far as the log has sources."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from diagnose_runs import Array, noisy, run_of
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

N = 120
T = np.arange(N, dtype=np.float64)
REWARD = "critic/score/mean"
PROMPTS = {"prompt_length/mean": noisy(200.0, 21, 0.01)}


def test_whose_rewards_are_all_zero_is_said_where_a_source_is_logged() -> None:
    none = {REWARD: np.where(T >= 70, 0.0, noisy(0.4, 1))}
    assert diagnose(run_of(none)).verdict == "dead_scorer"
    of_a_source = {"reward/math/mean": none[REWARD]}
    assert diagnose(run_of(none | of_a_source)).verdict == "one_source_all_zero"


def test_a_cliff_of_the_reward_in_a_log_without_sources_is_a_scorers_or_the_mixs() -> None:
    cliff = {REWARD: 0.5 * np.where(T >= 70, 0.7, 1.0) + np.random.default_rng(1).normal(0, 0.01, N)}
    finding = diagnose(run_of(cliff | PROMPTS)).findings[0]
    assert (finding.rule, finding.step, finding.confidence) == ("one_source_all_zero", 71, 0.6)
    assert "the mix of prompts changed" in finding.action
    longer = {"response_length/mean": noisy(800 * np.where(T >= 70, 1.4, 1.0), 8)}
    for otherwise in (longer, {"prompt_length/mean": noisy(200 * np.where(T >= 70, 1.2, 1.0), 21, 0.01)}):
        assert diagnose(run_of(cliff | PROMPTS | otherwise)).findings == ()
    assert diagnose(run_of(cliff)).findings == ()  # nobody knows what the prompts are


@pytest.mark.parametrize("scatter", [0.0, 0.0005])
def test_a_reward_that_falls_evenly_has_lost_nothing_at_one_step(scatter: float) -> None:
    ramp = {REWARD: -0.3 - 0.002 * T + np.random.default_rng(1).normal(0, 1, N) * scatter}
    assert "one_source_all_zero" not in {f.rule for f in diagnose(run_of(ramp | PROMPTS)).findings}


def _held_out(level: float, at_zero: bool, seed: int) -> Array:
    """A score every twenty steps: three, and from step 70 on three more that may be zero."""
    scores = np.where(at_zero & (T >= 70), 0.0, noisy(level, seed, 0.05))
    return np.where(T % 20 == 19, scores, np.nan)


@pytest.mark.parametrize(
    ("level", "other", "verdict"),
    [(0.3, 1.0, "one_source_all_zero"), (0.05, 1.0, "well"), (0.3, 0.5, "well")],
)
def test_few_held_out_scores_tell_a_dead_scorer_where_the_others_go_on(
    level: float, other: float, verdict: str
) -> None:
    """A source of which little is solved may have none right three times; nor is it its scorer if the other falls."""
    scores = {
        "val-core/code/reward/mean@1": _held_out(level, True, 1),
        "val-core/math/reward/mean@1": _held_out(0.5, False, 2) * np.where(T >= 70, other, 1.0),
    }
    assert diagnose(run_of(scores)).verdict == verdict


def test_another_source_whose_scores_scatter_has_not_fallen() -> None:
    """Its median is a quarter lower in six scores, which is less than they scatter."""
    scatter = np.full(N, np.nan)
    scatter[4::10] = [0.45, 0.2, 0.6, 0.35, 0.5, 0.25, 0.15, 0.65, 0.28, 0.3, 0.1, 0.55]
    scores = {
        "val-core/code/reward/mean@1": np.where(T % 10 == 4, np.where(T >= 60, 0.0, noisy(0.4, 1)), np.nan),
        "val-core/math/reward/mean@1": scatter,
    }
    assert diagnose(run_of(scores)).verdict == "one_source_all_zero"


@pytest.mark.parametrize(
    "name", ["critic/score_by_source/{}/mean", "data_source/{}/reward", "acc_per_dataset.{}"]
)
@pytest.mark.parametrize(("level", "verdict"), [(0.0, "one_source_all_zero"), (0.05, "well")])
def test_a_source_is_told_by_a_name_that_says_by_source(
    name: str, level: float, verdict: str, tmp_path: Path
) -> None:
    """Whatever the order of its words, and of sources of several parts; one that is hardly solved is well."""
    rng = np.random.default_rng(4)
    levels = {"lab/easy-sums": 0.6, "lab/word problems": 0.5, "programs_v2": level}
    lines = []
    for i in range(1, 61):
        scores = {name.format(s): max(0.0, p + (p > 0) * rng.normal(0, 0.02)) for s, p in levels.items()}
        data = {"critic/rewards/mean": float(np.mean(list(scores.values()))), "actor/entropy": 0.3, **scores}
        lines.append(json.dumps({"step": i, "data": data}))
    log = tmp_path / "run.jsonl"
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = diagnose(load(str(log)))
    assert found.verdict in (verdict, "not_judged" if verdict == "well" else verdict)
    if level == 0.0:
        assert "'programs_v2'" in found.findings[0].title
