"""The [algorithm] section: presets, and combinations that would do nothing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from rollbook.algos.advantage import ESTIMATORS
from rollbook.algos.aggregate import AGGREGATIONS
from rollbook.algos.config import (
    PRESETS,
    AggregationName,
    AlgorithmConfig,
    AlgorithmName,
    EstimatorName,
    LossName,
    RejectStatistic,
)
from rollbook.algos.correction import REJECT_STATISTICS
from rollbook.algos.loss import LOSSES


def made(**fields: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(fields)


def test_every_name_in_the_config_is_a_row_of_its_table() -> None:
    assert set(get_args(AlgorithmName)) == set(PRESETS)
    assert set(get_args(EstimatorName)) == set(ESTIMATORS)
    assert set(get_args(LossName)) == set(LOSSES)
    assert set(get_args(AggregationName)) == set(AGGREGATIONS)
    assert set(get_args(RejectStatistic)) == set(REJECT_STATISTICS)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_stands_and_survives_being_written_down(name: str) -> None:
    config = made(name=name)
    assert made(**config.model_dump()) == config


def test_a_preset_is_visible_and_a_field_beside_it_wins() -> None:
    dapo = made(name="dapo")
    assert (dapo.clip_eps_high, dapo.filter.drop_flat, dapo.overlong.buffer_frac) == (0.28, True, 0.2)
    assert dapo.aggregation == "token_mean"
    changed = made(name="dapo", clip_eps_high=0.3, filter={"metric": "reward"})
    assert (changed.clip_eps_high, changed.filter.metric) == (0.3, "reward")
    assert changed.filter.drop_flat  # tables merge key by key


def test_flatness_is_judged_by_the_raw_score_by_default() -> None:
    assert made(name="dapo").filter.metric == "score"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kl": {"coef": 0.1}}, "no effect"),
        ({"kl": {"placement": "loss"}}, "no effect"),
        ({"kl": {"placement": "loss", "estimator": "k1", "coef": 0.1}}, "expected gradient of zero"),
        ({"distill": {"placement": "loss"}}, "no effect"),
        ({"estimator": "none"}, "nothing would be learned"),
        (
            {"name": "distill", "kl": {"placement": "reward", "coef": 0.1}},
            "reads no reward; use kl.placement",
        ),
        ({"name": "distill", "overlong": {"buffer_frac": 0.2}}, "overlong.buffer_frac has no effect"),
        ({"name": "distill", "scale": "batch_std"}, "reads no reward; use scale = 'none'"),
        ({"estimator": "gae"}, "group_std"),
        ({"dual_clip": 0.9}, "above 1"),
        ({"loss": "cispo", "dual_clip": 3.0}, "no effect"),
        ({"correction": {"mode": "mask"}}, "no effect"),
        ({"correction": {"upper": 5.0}}, "no effect"),
        ({"correction": {"level": "token", "lower": 3.0}}, "not below"),
        ({"correction": {"level": "token", "upper": 0.5}}, "leave out 1, the weight of every on-policy"),
        ({"correction": {"level": "sequence", "mode": "mask", "lower": 1.5}}, "leave out 1"),
        (
            {"correction": {"reject": {"statistic": "token", "upper_nats": -5.0}}},
            "upper_nats is -5.0: where behavior and proximal policy agree",
        ),
        ({"correction": {"reject": {"statistic": "sequence_max", "upper_nats": 0.0}}}, "would be rejected"),
        (
            {"correction": {"reject": {"statistic": "token", "estimator": "k1", "lower_nats": 0.0}}},
            "lower_nats is 0.0: where behavior and proximal policy agree",
        ),
        (
            {"correction": {"reject": {"statistic": "sequence_max", "estimator": "k1", "lower_nats": -0.1}}},
            "'sequence_max', which is at least 0",
        ),
        ({"correction": {"reject": {"upper_nats": 1.0}}}, "nothing would be rejected"),
        ({"correction": {"reject": {"statistic": "token"}}}, "nothing would be rejected"),
        (
            {"correction": {"reject": {"statistic": "token", "lower_nats": 0.1}}},
            "never negative",
        ),
        ({"proximal": "behavior", "correction": {"level": "token"}}, "every weight is 1"),
        ({"proximal": "behavior", "loss": "gspo", "correction": {"level": "sequence"}}, "every weight is 1"),
        (
            {"proximal": "behavior", "loss": "reinforce", "correction": {"level": "token", "mode": "mask"}},
            "before the step",
        ),
        (
            {
                "proximal": "behavior",
                "correction": {"reject": {"statistic": "token", "upper_nats": 1.0}},
            },
            "before the step",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        made(**fields)


def test_bypass_with_reinforce_truncation_and_rejection_with_recompute_stand() -> None:
    bypass = made(proximal="behavior", loss="reinforce", correction={"level": "token"})
    assert bypass.correction.is_on
    assert not bypass.correction.changes_mask
    rejecting = made(correction={"reject": {"statistic": "sequence_mean", "upper_nats": 0.1}})
    assert rejecting.correction.changes_mask


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("grpo", (True, False, False, False)),
        ("reinforce_pp", (False, False, False, False)),
        ("ppo", (False, True, False, False)),
        ("distill", (False, False, False, True)),
    ],
)
def test_what_an_algorithm_needs(name: str, needs: tuple[bool, ...]) -> None:
    config = made(name=name)
    assert (
        config.needs_group,
        config.needs_values,
        config.needs_reference,
        config.needs_teacher,
    ) == needs
    assert made(name=name, kl={"placement": "loss", "coef": 0.01}).needs_reference


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({}, False),
        ({"correction": {"level": "token"}}, True),
        ({"kl": {"placement": "reward", "estimator": "k1", "coef": 0.1}}, True),
        ({"kl": {"placement": "loss", "coef": 0.1}}, False),
        ({"name": "distill"}, True),
        ({"name": "distill", "proximal": "behavior"}, False),
    ],
)
def test_who_reads_proximal_logprobs_before_the_update(fields: dict[str, Any], needs: bool) -> None:
    assert made(**fields).needs_proximal_first is needs


def test_reading_the_config_loads_no_torch() -> None:
    code = "import sys, rollbook.algos.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
