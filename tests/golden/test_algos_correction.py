"""Importance weights, rejection and the gap, worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rollbook.algos.config import CorrectionConfig, RejectConfig
from rollbook.algos.correction import bounded, correct, kept_by_bounds, kept_by_divergence, mismatch
from rollbook.algos.gap import LogprobGap, logprob_gap
from rollbook.errors import DataError
from rollbook.types import TrainSequence


def sequence(
    proximal: list[float],
    behavior: list[float],
    *,
    mask: list[int] | None = None,
    version: int = 0,
    replica_id: int = 0,
) -> TrainSequence:
    """Probabilities of the sampled tokens under both policies; a prompt token goes before them."""
    action_mask = np.array([0, *(mask or [1] * len(proximal))], np.bool_)
    return TrainSequence(
        group_id=0,
        member_idx=0,
        source="test",
        token_ids=np.zeros(len(action_mask), np.int32),
        action_mask=action_mask,
        loss_mask=action_mask.copy(),
        behavior_logprobs=np.log(np.array([1.0, *behavior], np.float32)),
        proximal_logprobs=np.log(np.array([1.0, *proximal], np.float32)),
        reward=0.0,
        oldest_version=version,
        replica_id=replica_id,
    )


def weights(one: TrainSequence) -> list[float]:
    assert one.importance_weights is not None
    return one.importance_weights[1:].tolist()


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2.0, 0.5, 2.0]),
        ("sequence", [4.0, 4.0, 4.0]),  # 4 x 0.5 x 2
        ("geometric", [4 ** (1 / 3)] * 3),
    ],
)
def test_levels(level: str, expected: list[float]) -> None:
    """Ratios 4, 0.5 and 2; the token weights are truncated at 2, the others at 9."""
    one = sequence([0.8, 0.2, 0.4], [0.2, 0.4, 0.2])
    upper = 2.0 if level == "token" else 9.0
    correct([one], CorrectionConfig.model_validate({"level": level, "upper": upper}))
    assert weights(one) == pytest.approx(expected, rel=1e-6)
    assert one.loss_mask.tolist() == [False, True, True, True]


def test_sequence_weight_is_over_all_sampled_tokens_also_those_not_trained() -> None:
    """Ratios 4 and 0.5; the second was filtered out of the loss and still makes the sequence as likely."""
    one = sequence([0.8, 0.2], [0.2, 0.4])
    one.loss_mask[2] = False
    correct([one], CorrectionConfig(level="sequence", upper=9.0))
    assert weights(one)[0] == pytest.approx(2.0)


def test_observation_tokens_take_no_part() -> None:
    """The middle token was added by a tool; its logprobs mean nothing."""
    one = sequence([0.8, 1e-9, 0.4], [0.2, 1.0, 0.2], mask=[1, 0, 1])
    correct([one], CorrectionConfig(level="sequence", upper=9.0))
    assert weights(one) == pytest.approx([8.0, 1.0, 8.0])


def test_masking_tokens_moves_them_out_of_the_loss() -> None:
    """Ratios 4, 0.5, 1 within [0.6, 2]: only the last trains, with its own weight."""
    one = sequence([0.8, 0.2, 0.3], [0.2, 0.4, 0.3])
    values = correct([one], CorrectionConfig(level="token", mode="mask", lower=0.6, upper=2.0))
    assert one.loss_mask.tolist() == [False, False, False, True]
    assert weights(one)[2] == pytest.approx(1.0)
    assert values["rollout_corr/rollout_rs_masked_fraction"].result() == pytest.approx(2 / 3)
    assert values["rollout_corr/rollout_is_ratio_fraction_high"].result() == pytest.approx(1 / 3)
    assert values["rollout_corr/rollout_is_ratio_fraction_low"].result() == pytest.approx(1 / 3)


def test_masking_sequences_takes_all_their_tokens() -> None:
    """Products 4 and 1: the first sequence leaves whole."""
    far, near = sequence([0.8, 0.2], [0.2, 0.2]), sequence([0.8, 0.2], [0.4, 0.4])
    values = correct([far, near], CorrectionConfig(level="sequence", mode="mask", upper=2.0))
    assert far.loss_mask.any() is np.False_
    assert near.loss_mask.tolist() == [False, True, True]
    assert values["rollout_corr/rollout_rs_seq_masked_fraction"].result() == 0.5


@pytest.mark.parametrize(
    ("statistic", "upper", "kept"),
    [
        ("token", 0.5, [False, True, True]),  # k2 of ln 4, ln 2, 0: 0.9609, 0.2402, 0
        ("sequence_sum", 1.21, [True, True, True]),  # 1.2011
        ("sequence_sum", 1.19, [False, False, False]),
        ("sequence_mean", 0.41, [True, True, True]),  # 0.4004
        ("sequence_mean", 0.39, [False, False, False]),
        ("sequence_max", 0.97, [True, True, True]),
        ("sequence_max", 0.95, [False, False, False]),
    ],
)
def test_rejection_statistics(statistic: str, upper: float, kept: list[bool]) -> None:
    """Ratios 4, 1/2, 1 under k2 = half of the squared logarithm."""
    one = sequence([0.8, 0.2, 0.3], [0.2, 0.4, 0.3])
    reject = {"statistic": statistic, "estimator": "k2", "upper_nats": upper}
    correct([one], CorrectionConfig.model_validate({"reject": reject}))
    assert one.loss_mask[1:].tolist() == kept
    assert one.importance_weights is None  # rejection alone weighs nothing


def test_rejection_by_signed_k1() -> None:
    """k1 of KL(behavior || proximal) is -ln r: -ln 4 and ln 2. One bound at a time rejects one of them."""
    for bound, kept in (({"lower_nats": -1.0}, [False, True]), ({"upper_nats": 0.5}, [True, False])):
        one = sequence([0.8, 0.2], [0.2, 0.4])
        reject = {"statistic": "token", "estimator": "k1", **bound}
        correct([one], CorrectionConfig.model_validate({"reject": reject}))
        assert one.loss_mask[1:].tolist() == kept


def test_what_lies_on_a_bound_is_kept() -> None:
    """k1 of logprobs -1 and -1.5 is 1/2, the other way round -1/2; weights of 1/2 and 2."""
    one, other = (torch.tensor(row, dtype=torch.float64) for row in ([-1.0, -1.5], [-1.5, -1.0]))
    both, cu_seqlens = torch.tensor([True, True]), torch.tensor([0, 2])
    reject = RejectConfig(statistic="token", estimator="k1", lower_nats=-0.5, upper_nats=0.5)
    assert kept_by_divergence(one, other, both, cu_seqlens, reject).all()
    bounds = CorrectionConfig(level="token", mode="mask", lower=0.5, upper=2.0)
    assert kept_by_bounds(torch.tensor([0.5, 2.0]), bounds).all()


def test_mismatch_metrics_are_reported_with_the_correction_off() -> None:
    """Ratios 2 and 0.5 in one sequence: kl = -(ln 2 - ln 2)/2 = 0; k3 = (2 - 1 - ln 2 + 0.5 - 1 + ln 2)/2 =
    0.25; chi2 per token (4 + 0.25)/2 - 1; per sequence 1 - 1. Perplexities both 1/sqrt(0.08)."""
    one = sequence([0.4, 0.2], [0.2, 0.4])
    values = correct([one], CorrectionConfig())
    result = {name.removeprefix("rollout_corr/"): value.result() for name, value in values.items()}
    assert result == pytest.approx(
        {
            "kl": 0.0,
            "k3_kl": 0.25,
            "training_ppl": 1 / math.sqrt(0.08),
            "rollout_ppl": 1 / math.sqrt(0.08),
            "log_ppl_diff": 0.0,
            "ppl_ratio": 1.0,
            "chi2_token": 1.125,
            "chi2_seq": 0.0,
        },
        abs=1e-6,
    )
    assert one.importance_weights is None


def test_effective_sample_size() -> None:
    """Weights 3 and 1: (3 + 1)^2 / (2 x 10) = 0.8."""
    one = sequence([0.6, 0.2], [0.2, 0.2])
    values = correct([one], CorrectionConfig(level="token", upper=9.0))
    assert values["rollout_corr/rollout_is_eff_sample_size"].result() == pytest.approx(0.8)
    assert values["rollout_corr/rollout_is_mean"].result() == pytest.approx(2.0)
    assert values["rollout_corr/rollout_is_max"].result() == pytest.approx(3.0)
    assert values["rollout_corr/rollout_is_std"].result() == pytest.approx(1.0)


def test_log_ratios_are_clamped_at_twenty() -> None:
    """A broken token of ratio e^60 weighs e^20 before bounds, and so does a sequence of three of them."""
    one = sequence([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    one.behavior_logprobs[1:] = -60.0
    correct([one], CorrectionConfig(level="sequence", upper=1e30))
    assert weights(one) == pytest.approx([math.exp(20)] * 3)


def test_a_missing_forward_is_named() -> None:
    one = sequence([0.5], [0.5])
    one.proximal_logprobs = None
    with pytest.raises(DataError, match="0/0 has no proximal logprobs"):
        correct([one], CorrectionConfig(level="token"))


def test_a_logprob_that_is_not_finite_is_refused() -> None:
    one = sequence([0.5], [0.5])
    one.behavior_logprobs[1] = -math.inf
    with pytest.raises(DataError, match="1 of 1 behavior"):
        correct([one], CorrectionConfig(level="token"))


def test_gap_statistics() -> None:
    """Differences ln 2, -ln 2, 0, 0: mean of sizes ln 2 / 2; p95 by linear interpolation is ln 2; ratios 2, 1/2,
    1, 1 average 1.125 with geometric mean 1; two of four lie outside +-0.2."""
    gap = LogprobGap.of(
        np.log([0.4, 0.2, 0.5, 0.9]), np.log([0.2, 0.4, 0.5, 0.9]), clip_eps_low=0.2, clip_eps_high=0.2
    )
    ln2 = math.log(2)
    assert (gap.mean, gap.p95, gap.max) == pytest.approx((ln2 / 2, ln2, ln2))
    assert (gap.geometric_mean_ratio, gap.mean_ratio) == pytest.approx((1.0, 1.125))
    assert gap.outside_clip_frac == 0.5
    expected = np.corrcoef(np.log([0.4, 0.2, 0.5, 0.9]), np.log([0.2, 0.4, 0.5, 0.9]))[0, 1]
    assert gap.pearson == pytest.approx(expected)


def test_geometric_mean_shows_a_sharper_sampler_where_the_mean_ratio_does_not() -> None:
    """BR-063: the engine samples at temperature 0.5, the trainer scores at 1. Over tokens drawn from the engine
    p_e = softmax([4,0]) = (0.982, 0.018) the expected ratio is 1 whatever the trainer's p = softmax([2,0]); the
    geometric mean is exp(-KL)."""
    engine = np.array([1 / (1 + math.exp(-4)), 1 / (1 + math.exp(4))])
    trainer = np.array([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))])
    counts = np.round(engine * 1_000_000).astype(int)
    gap = LogprobGap.of(
        np.repeat(np.log(trainer), counts),
        np.repeat(np.log(engine), counts),
        clip_eps_low=0.2,
        clip_eps_high=0.2,
    )
    assert gap.mean_ratio == pytest.approx(1.0, abs=1e-4)
    kl = float((engine * np.log(engine / trainer)).sum())
    assert gap.geometric_mean_ratio == pytest.approx(math.exp(-kl), abs=1e-4)
    assert gap.geometric_mean_ratio < 0.95


def test_gap_by_replica_and_age() -> None:
    """Replica 1 is off by ln 2, replica 0 not; the trainer is at version 3, so only the third is on policy."""
    batch = [
        sequence([0.5], [0.5], version=2, replica_id=0),
        sequence([0.5], [0.25], version=2, replica_id=1),
        sequence([0.3], [0.3], version=3, replica_id=0),
    ]
    report = logprob_gap(batch, staleness=lambda v: 3 - v, clip_eps_low=0.2, clip_eps_high=0.2)
    assert report is not None
    assert report.on_policy is not None
    assert report.on_policy.max == pytest.approx(0.0, abs=1e-6)
    assert {k: round(g.max, 4) for k, g in report.by_replica.items()} == {0: 0.0, 1: 0.6931}
    assert {k: g.num_tokens for k, g in report.by_staleness.items()} == {0: 1, 1: 2}
    values = report.values()
    assert values["training/logprob_gap/max"].result() == pytest.approx(0.0, abs=1e-6)
    assert values["training/logprob_gap_by_replica/1/mean"].result() == pytest.approx(math.log(2))
    assert values["training/logprob_gap_by_staleness/1/mean"].result() == pytest.approx(math.log(2) / 2)
    assert values["training/rollout_probs_diff_max"].result() == pytest.approx(0.25)


def test_fresh_sequences_tell_the_gap_of_numerics_when_the_whole_batch_is_stale() -> None:
    """The batch is a step old and moved by ln 2; the fresh one is off by ln 1.1 and counts for nothing else."""
    stale, fresh = sequence([0.5], [0.25], version=2), sequence([0.55], [0.5], version=3, replica_id=7)
    report = logprob_gap(
        [stale], staleness=lambda v: 3 - v, clip_eps_low=0.2, clip_eps_high=0.2, fresh=[fresh]
    )
    assert report is not None
    values = report.values()
    assert values["training/logprob_gap/mean"].result() == pytest.approx(math.log(1.1), rel=1e-5)
    assert values["training/logprob_gap_all/mean"].result() == pytest.approx(math.log(2))
    assert values["training/rollout_probs_diff_max"].result() == pytest.approx(0.25)
    assert set(report.by_replica) == {0}
    assert set(report.by_staleness) == {1}


def test_gap_of_no_tokens_is_none() -> None:
    one = sequence([0.5], [0.5], mask=[0])
    assert logprob_gap([one], staleness=lambda v: 0, clip_eps_low=0.2, clip_eps_high=0.2) is None


def test_both_bounds_hold_a_weight_or_leave_it_out() -> None:
    """0.2 below and 5 above [0.5, 2]: set to the nearer bound, or masked; the bounds themselves are inside."""
    weights = torch.tensor([0.2, 0.5, 1.0, 2.0, 5.0])
    config = CorrectionConfig(level="token", lower=0.5, upper=2.0)
    assert bounded(weights, config).tolist() == [0.5, 0.5, 1.0, 2.0, 2.0]
    assert kept_by_bounds(weights, config).tolist() == [False, True, True, True, False]


def test_chi_squared_of_a_long_sequence_is_that_of_its_whole_ratio() -> None:
    """Twelve tokens each 2.5 times as likely: 2.5^24 - 1, above the e^20 to which a sum of logs is clamped."""
    long = sequence([0.5] * 12, [0.2] * 12)
    values = mismatch([long], CorrectionConfig())
    assert values["rollout_corr/chi2_seq"].result() == pytest.approx(2.5**24, rel=1e-4)


def test_what_is_only_reported_is_not_corrected() -> None:
    config = CorrectionConfig(level="token", mode="mask", upper=2.5)
    one, other = (sequence([0.8, 0.2, 0.4], [0.2, 0.4, 0.2]) for _ in range(2))
    assert mismatch([one], config) == correct([other], config)
    assert one.importance_weights is None and one.loss_mask.sum() == 3
    assert other.importance_weights is not None and other.loss_mask.sum() == 2
