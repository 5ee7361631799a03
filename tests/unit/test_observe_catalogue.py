"""The metric catalogue: complete lines, no name twice, and a printed page that is up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollbook.observe import catalogue as module
from rollbook.observe.catalogue import STAGES, STAGES_OUTSIDE_STEP, catalogue, lookup, to_markdown

ROOT = Path(__file__).parents[2]

VERL_NAMES = [
    "timing_s/step",
    "timing_s/gen",
    "timing_s/reward",
    "timing_s/old_log_prob",
    "timing_s/ref",
    "timing_s/values",
    "timing_s/adv",
    "timing_s/update_critic",
    "timing_s/update_actor",
    "timing_s/update_weights",
    "timing_s/save_checkpoint",
    "timing_s/testing",
    "perf/throughput",
    "perf/time_per_step",
    "perf/total_num_tokens",
    "critic/rewards/mean",
    "critic/score/mean",
    "critic/advantages/max",
    "critic/vf_explained_var",
    "response_length/clip_ratio",
    "prompt_length/mean",
    "num_turns/max",
    "actor/entropy",
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "actor/grad_norm",
    "actor/lr",
    "training/rollout_probs_diff_max",
    "training/off_policy/evicted_samples",
    "training/off_policy/trajectory_staleness_worst/max",
    "rollout_corr/rollout_is_eff_sample_size",
]
"""From the metric table of verl 0.9.1."""


def test_every_metric_states_unit_numerator_reduction_owner_and_meaning() -> None:
    for metric in catalogue():
        assert metric.unit and metric.numerator and metric.owner, metric.name
        assert metric.reduction in ("ratio", "sum", "max", "min", "last", "quantile", "std"), metric.name
        assert metric.meaning.endswith("."), metric.name
        assert metric.denominator or metric.reduction != "ratio", metric.name


def test_no_name_stands_twice() -> None:
    names = [metric.name for metric in catalogue()]
    assert len(names) == len(set(names))


def test_each_name_finds_its_own_line() -> None:
    for metric in catalogue():
        example = re.sub(r"\{(\w+)\}", r"some_\1", metric.name)
        found = lookup(example)
        assert found is not None
        assert found.name == metric.name


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("reward/openai/gsm8k/mean", "reward/{source}/mean"),
        ("val/add/exact_match", "val/{source}/exact_match"),
        ("val/add/pass@8", "val/{source}/{score}"),
        ("replica/3/weight_version", "replica/{replica_id}/weight_version"),
        ("failures/timeout/num", "failures/{kind}/num"),
        ("failures/timeout/add/num", "failures/{kind}/{source}/num"),
        ("rollout/moe/max_vio/layer_3", "rollout/moe/{which}_vio/{layer}"),
        ("response_length/mean", "response_length/mean"),
    ],
)
def test_families(name: str, family: str) -> None:
    found = lookup(name)
    assert found is not None
    assert found.name == family


def test_unknown_names_are_unknown() -> None:
    assert lookup("reward") is None
    assert lookup("actor/entropyy") is None


def test_names_are_verls_where_the_meaning_is_the_same() -> None:
    for name in VERL_NAMES:
        found = lookup(name)
        assert found is not None, name
        assert found.name == name


def test_every_stage_has_a_meaning_and_both_metrics() -> None:
    assert set(STAGES) == set(module._STAGE_MEANING)
    assert set(STAGES) >= STAGES_OUTSIDE_STEP
    assert len(set(STAGES.values())) == len(STAGES)


def test_the_printed_page_is_up_to_date() -> None:
    """If this fails: python -m rollbook.observe.catalogue > docs/metrics.md"""
    assert (ROOT / "docs" / "metrics.md").read_text() == to_markdown()
