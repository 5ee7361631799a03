"""Advantages worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rollbook.algos.advantage import (
    discounted_sums,
    estimate_advantages,
    gae,
    group_mean_advantages,
    leave_one_out_advantages,
)
from rollbook.algos.config import AlgorithmConfig
from rollbook.types import TrainSequence


def sequence(
    *,
    reward: float,
    group_id: int = 0,
    mask: list[int] | None = None,
    values: list[float] | None = None,
    is_truncated: bool = False,
    **logprobs: list[float],
) -> TrainSequence:
    """One sequence; by default one prompt token and two action tokens."""
    action_mask = np.array(mask or [0, 1, 1], np.bool_)
    n = len(action_mask)
    arrays = {name: np.array(held, np.float32) for name, held in logprobs.items()}
    arrays.setdefault("behavior_logprobs", np.zeros(n, np.float32))
    return TrainSequence(
        group_id=group_id,
        member_idx=0,
        source="test",
        token_ids=np.arange(n, dtype=np.int32),
        action_mask=action_mask,
        loss_mask=action_mask.copy(),
        reward=reward,
        oldest_version=0,
        is_truncated=is_truncated,
        values=None if values is None else np.array(values, np.float32),
        **arrays,
    )


def advantages_of(sequences: list[TrainSequence], config: AlgorithmConfig) -> list[list[float]]:
    estimate_advantages(sequences, config)
    return [[] if s.advantages is None else s.advantages.tolist() for s in sequences]


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    """[1,0,0,0]: mean 1/4; squares 9/16 + 3/16 = 3/4 over n - 1 = 3 is 1/4, deviation 1/2; 0.75 / 0.5 = 1.5."""
    rewards = np.array([1.0, 0.0, 0.0, 0.0])
    got = group_mean_advantages(rewards, np.zeros(4, np.int64), divide_by_std=True)
    assert got == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_rloo_over_the_standard_deviation() -> None:
    """[1,0,0,0]: 1 - 0 over a deviation of 1/2 is 2, and 0 - 1/3 over it -2/3."""
    config = AlgorithmConfig(estimator="leave_one_out", scale="group_std")
    got = advantages_of([sequence(reward=r) for r in (1.0, 0.0, 0.0, 0.0)], config)
    assert [row[1] for row in got] == pytest.approx([2.0, -2 / 3, -2 / 3, -2 / 3], abs=1e-5)


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    """[3,1,2]: 3 - 1.5; 1 - 2.5; 2 - 2."""
    got = leave_one_out_advantages(np.array([3.0, 1.0, 2.0]), np.zeros(3, np.int64))
    assert got == pytest.approx([1.5, -1.5, 0.0])


def test_interleaved_groups_are_told_apart_by_id() -> None:
    """Group 5 holds [1,3], group 9 holds [10,20]: means 2 and 15."""
    got = group_mean_advantages(np.array([1.0, 10.0, 3.0, 20.0]), np.array([5, 9, 5, 9]), divide_by_std=False)
    assert got.tolist() == [-1.0, -5.0, 1.0, 5.0]


def test_flat_group_is_exactly_zero_despite_rounding() -> None:
    """The float mean of three 0.1 is not 0.1; divided by STD_EPS that would be a signal of 1e-11."""
    got = group_mean_advantages(np.full(3, 0.1), np.zeros(3, np.int64), divide_by_std=True)
    assert got.tolist() == [0.0, 0.0, 0.0]


def test_group_of_one_has_no_advantage() -> None:
    one, zero = np.array([1.0]), np.zeros(1, np.int64)
    assert group_mean_advantages(one, zero, divide_by_std=True).tolist() == [0.0]
    assert leave_one_out_advantages(one, zero).tolist() == [0.0]


def test_discounted_sums_stay_within_their_sequence() -> None:
    """gamma 0.5 over [0,0,1] and [2,4]: 0.25, 0.5, 1 and 2 + 2, 4."""
    got = discounted_sums(np.array([0.0, 0, 1, 2, 4]), np.array([3, 2]), gamma=0.5)
    assert got.tolist() == [0.25, 0.5, 1.0, 4.0, 4.0]


def test_gae_of_two_steps() -> None:
    """gamma 0.9, lambda 0.5, values [1,2], rewards [0,3]: delta_1 = 3 - 2 = 1; delta_0 = 0.9 x 2 - 1 = 0.8;
    advantage_0 = 0.8 + 0.45 x 1 = 1.25."""
    got = gae(
        np.array([0.0, 3.0]),
        np.array([1.0, 2.0]),
        np.array([2]),
        np.zeros(1),
        gamma=0.9,
        gae_lambda=0.5,
    )
    assert got == pytest.approx([1.25, 1.0])


def test_grpo_spreads_the_sequence_advantage_over_action_tokens() -> None:
    config = AlgorithmConfig(name="dr_grpo")
    batch = [sequence(reward=1.0), sequence(reward=0.0, mask=[0, 1, 0, 1])]
    assert advantages_of(batch, config) == [[0.0, 0.5, 0.5], [0.0, -0.5, 0.0, -0.5]]


def test_reinforce_pp_whitens_returns_over_the_tokens_of_the_batch() -> None:
    """Returns at gamma 1: [1,1] and [0]. Tokens 1,1,0: mean 2/3, sample deviation sqrt((1/9+1/9+4/9)/2) =
    0.57735; (1/3)/0.57735 = 0.57735 and (-2/3)/0.57735 = -1.1547."""
    batch = [sequence(reward=1.0), sequence(reward=0.0, mask=[0, 1])]
    got = advantages_of(batch, AlgorithmConfig(name="reinforce_pp"))
    assert got[0] == pytest.approx([0.0, 0.57735, 0.57735], abs=1e-5)
    assert got[1] == pytest.approx([0.0, -1.1547], abs=1e-4)


def test_whitening_looks_at_loss_tokens_only() -> None:
    """The third sequence was cut out of the loss; the other two whiten as [1], [0]: +-1/sqrt(2)."""
    batch = [sequence(reward=r, mask=[0, 1]) for r in (1.0, 0.0, 100.0)]
    batch[2].loss_mask[:] = False
    got = advantages_of(batch, AlgorithmConfig(name="reinforce_pp"))
    assert [got[0][1], got[1][1]] == pytest.approx([0.70711, -0.70711], abs=1e-5)


def test_ppo_without_whitening_gives_returns_for_the_critic() -> None:
    """gamma 1, lambda 0.5, values [0.2,0.4], reward 1: advantages 0.5 and 0.6, returns 0.7 and 1.0."""
    config = AlgorithmConfig(name="ppo", scale="none", gae_lambda=0.5)
    batch = [sequence(reward=1.0, values=[9.0, 0.2, 0.4])]
    assert advantages_of(batch, config)[0] == pytest.approx([0.0, 0.5, 0.6])
    assert batch[0].returns is not None
    assert batch[0].returns.tolist() == pytest.approx([0.0, 0.7, 1.0])


def test_group_mean_over_the_batch_deviation() -> None:
    """Groups [1,0] and [4,0] of one token each: centred +-0.5, +-2; deviation sqrt(8.5/3) = 1.68325."""
    batch = [sequence(reward=r, group_id=g, mask=[0, 1]) for g, r in ((0, 1.0), (0, 0.0), (1, 4.0), (1, 0.0))]
    got = [a[1] for a in advantages_of(batch, AlgorithmConfig(name="grpo", scale="batch_std"))]
    assert got == pytest.approx([0.29704, -0.29704, 1.18818, -1.18818], abs=1e-4)


def test_group_baselines_are_not_centred_again_by_length() -> None:
    """+1 on two tokens, -1 on one: the token mean is 1/3, and is left. Deviation sqrt((2 x 4/9 + 16/9)/2) =
    1.1547: 0.86603 and -0.86603."""
    batch = [sequence(reward=2.0), sequence(reward=0.0, mask=[0, 1])]
    got = advantages_of(batch, AlgorithmConfig(name="grpo", scale="batch_std"))
    assert [got[0][1], got[0][2], got[1][1]] == pytest.approx([0.86603, 0.86603, -0.86603], abs=1e-4)


def test_kl_in_the_reward_is_charged_per_action_token() -> None:
    """k1 of proximal against reference: tokens 0.5 and 0.25 nats, coefficient 0.1; gamma 1, no baseline: the
    first token's return is 1 - 0.05 - 0.025, the second's 1 - 0.025. The prompt token's is never read."""
    config = AlgorithmConfig(
        name="reinforce_pp", scale="none", kl={"placement": "reward", "estimator": "k1", "coef": 0.1}
    )
    batch = [
        sequence(
            reward=1.0,
            proximal_logprobs=[99.0, -1.0, -1.0],
            reference_logprobs=[-99.0, -1.5, -1.25],
        )
    ]
    assert advantages_of(batch, config)[0] == pytest.approx([0.0, 0.925, 0.975])


def test_group_estimators_compare_rewards_after_the_kl_charge() -> None:
    """Rewards 1 and 1; the first pays 0.1 x (0.5 + 0.5) = 0.1: 0.9 against 1.0 is -0.05 and +0.05."""
    config = AlgorithmConfig(name="dr_grpo", kl={"placement": "reward", "estimator": "k1", "coef": 0.1})
    batch = [
        sequence(reward=1.0, proximal_logprobs=[0, -1, -1], reference_logprobs=[0, -1.5, -1.5]),
        sequence(reward=1.0, proximal_logprobs=[0, -1, -1], reference_logprobs=[0, -1, -1]),
    ]
    got = advantages_of(batch, config)
    assert got[0][1:] == pytest.approx([-0.05, -0.05])
    assert got[1][1:] == pytest.approx([0.05, 0.05])


def test_distillation_advantage_is_teacher_minus_proximal() -> None:
    """Reverse KL on sampled tokens: the teacher gives 0.5 nats more, then 2 nats less; coefficient 2."""
    config = AlgorithmConfig(name="distill", distill={"coef": 2.0})
    batch = [sequence(reward=7.0, proximal_logprobs=[0, -1, -1], teacher_logprobs=[0, -0.5, -3])]
    assert advantages_of(batch, config)[0] == pytest.approx([0.0, 1.0, -4.0])


def test_explained_variance_of_a_perfect_and_a_constant_critic() -> None:
    """Returns 1 and 0 (gamma 1, lambda 1, one token each). Values equal to them explain all, zeros nothing."""
    config = AlgorithmConfig(name="ppo", scale="none", gae_lambda=1.0)
    perfect = [sequence(reward=r, mask=[0, 1], values=[0, r]) for r in (1.0, 0.0)]
    constant = [sequence(reward=r, mask=[0, 1], values=[0, 0]) for r in (1.0, 0.0)]
    assert estimate_advantages(perfect, config)["critic/vf_explained_var"].result() == 1.0
    assert estimate_advantages(constant, config)["critic/vf_explained_var"].result() == 0.0
