"""Losses, KL, corrections and their gradients, worked by hand.

Two tokens in most tests. Probabilities stand in the test; logprobs are their logarithms. d loss / d logprob of
a ratio r = exp(logprob - proximal) is r itself, so an unclipped token with advantage A has gradient -r A.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rollbook.algos.aggregate import AGGREGATIONS, LossCounts, aggregate
from rollbook.algos.config import AlgorithmConfig
from rollbook.algos.kl import kl_k1_nats, kl_k2_nats, kl_k3_nats
from rollbook.algos.loss import LOSSES, Clip, TokenLosses, clipped_value_loss
from rollbook.algos.policy import PolicyTensors, ValueTensors, policy_objective, value_objective

PPO = Clip(eps_low=0.2, eps_high=0.2)


def log(*probs: float) -> Tensor:
    return torch.log(torch.tensor(probs, dtype=torch.float64))


def run(
    name: str,
    now: Tensor,
    anchor: Tensor,
    advantages: list[float],
    *,
    clip: Clip = PPO,
    weights: list[float] | None = None,
    cu_seqlens: list[int] | None = None,
) -> tuple[TokenLosses, list[float]]:
    """Losses, and the gradient of their sum."""
    now = now.clone().requires_grad_()
    n = len(now)
    token = LOSSES[name](
        now,
        anchor,
        torch.tensor(advantages, dtype=torch.float64),
        torch.ones(n, dtype=torch.bool),
        importance_weights=torch.tensor(weights or [1.0] * n, dtype=torch.float64),
        cu_seqlens=torch.tensor(cu_seqlens or [0, n]),
        clip=clip,
    )
    (gradient,) = torch.autograd.grad(token.losses.sum(), now)
    return token, gradient.tolist()


def test_clip_inside_the_band_is_the_plain_surrogate() -> None:
    """Ratios 0.55/0.5 = 1.1 and 0.45/0.5 = 0.9: losses -1.1 x 2 and -0.9 x -1."""
    token, gradient = run("clip", log(0.55, 0.45), log(0.5, 0.5), [2.0, -1.0])
    assert token.losses.tolist() == pytest.approx([-2.2, 0.9])
    assert gradient == pytest.approx([-2.2, 0.9])
    assert token.is_clipped.tolist() == [False, False]


def test_clip_stops_the_gradient_only_where_the_step_went_too_far() -> None:
    """Ratios 1.5, 0.5, 1.5, 0.5 with advantages 1, 1, -1, -1: gains past 1.2 and losses below 0.8 are held,
    a step in the wrong direction is not."""
    token, gradient = run("clip", log(0.6, 0.2, 0.6, 0.2), log(0.4, 0.4, 0.4, 0.4), [1.0, 1.0, -1.0, -1.0])
    assert token.losses.tolist() == pytest.approx([-1.2, -0.5, 1.5, 0.8])
    assert gradient == pytest.approx([0.0, -0.5, 1.5, 0.0])
    assert token.is_clipped.tolist() == [True, False, False, True]


def test_clip_higher_leaves_room_above() -> None:
    """Ratio 1.25 passes eps_high 0.28 and is held by 0.2."""
    wide, _ = run("clip", log(0.5), log(0.4), [1.0], clip=Clip(eps_low=0.2, eps_high=0.28))
    narrow, _ = run("clip", log(0.5), log(0.4), [1.0])
    assert (wide.losses.item(), narrow.losses.item()) == pytest.approx((-1.25, -1.2))


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    """Ratio 5, advantage -1: loss 5 without, 3 with dual clip 3, and no gradient."""
    token, gradient = run("clip", log(0.5), log(0.1), [-1.0], clip=Clip(eps_low=0.2, eps_high=0.2, dual=3.0))
    assert token.losses.item() == pytest.approx(3.0)
    assert gradient == [0.0]
    assert token.is_clipped_lower.tolist() == [True]


def test_dual_clip_leaves_good_tokens_alone() -> None:
    """Ratio 0.9, advantage 1: -0.9, far from -3."""
    token, gradient = run("clip", log(0.45), log(0.5), [1.0], clip=Clip(eps_low=0.2, eps_high=0.2, dual=3.0))
    assert token.losses.item() == pytest.approx(-0.9)
    assert gradient == pytest.approx([-0.9])
    assert token.is_clipped_lower.tolist() == [False]


def test_one_broken_token_cannot_overflow_a_loss() -> None:
    """A difference of 60 nats counts as 20: the unclipped side of a negative advantage is e^20, without gradient."""
    token, gradient = run("clip", log(1.0), log(1.0) - 60, [-1.0])
    assert token.losses.item() == pytest.approx(math.exp(20))
    assert gradient == [0.0]


def test_decoupled_loss_multiplies_weight_and_clipped_ratio() -> None:
    """Current 0.6, proximal 0.5, behavior 0.25: weight 2, ratio 1.2 held at 1.1: -2.2."""
    token, _ = run("clip", log(0.6), log(0.5), [1.0], clip=Clip(eps_low=0.1, eps_high=0.1), weights=[2.0])
    assert token.losses.item() == pytest.approx(-2.2)


def test_gspo_uses_the_geometric_mean_of_the_sequence() -> None:
    """Ratios 4 and 1 in one sequence: sqrt(4) = 2 for both tokens, wide clip. Advantage 1: -2 a token, and each
    token's gradient is -2 (two tokens x 2 x 1/2). The second sequence, ratio 0.5, stands alone."""
    wide = Clip(eps_low=0.9, eps_high=9.0)
    token, gradient = run(
        "gspo", log(0.8, 0.5, 0.2), log(0.2, 0.5, 0.4), [1.0, 1.0, -1.0], clip=wide, cu_seqlens=[0, 2, 3]
    )
    assert token.losses.tolist() == pytest.approx([-2.0, -2.0, 0.5])
    assert gradient == pytest.approx([-2.0, -2.0, 0.5])


def test_gspo_clips_whole_sequences() -> None:
    """Geometric ratio 2 above 1.2 with a positive advantage: both tokens held, none has a gradient."""
    token, gradient = run("gspo", log(0.8, 0.5), log(0.2, 0.5), [1.0, 1.0])
    assert token.losses.tolist() == pytest.approx([-1.2, -1.2])
    assert gradient == [0.0, 0.0]
    assert token.is_clipped.tolist() == [True, True]


def test_cispo_caps_the_weight_and_keeps_the_gradient() -> None:
    """Ratios 2.5 (capped at 1.5) and 0.5: gradient -cap x advantage; loss is that times the logprob."""
    token, gradient = run(
        "cispo", log(0.5, 0.2), log(0.2, 0.4), [1.0, 1.0], clip=Clip(eps_low=1.0, eps_high=0.5)
    )
    assert gradient == pytest.approx([-1.5, -0.5])
    assert token.losses.tolist() == pytest.approx([-1.5 * math.log(0.5), -0.5 * math.log(0.2)])
    assert token.is_clipped.tolist() == [True, False]


def test_reinforce_is_the_weighted_score_function() -> None:
    _, gradient = run("reinforce", log(0.5, 0.2), log(0.9, 0.9), [2.0, -1.0], weights=[0.5, 3.0])
    assert gradient == pytest.approx([-1.0, 3.0])


def test_value_loss_takes_the_worse_of_free_and_clipped() -> None:
    """Before 0, return 1, clip 0.2. Now 0.5: errors 0.25 free, 0.64 clipped at 0.2: half of 0.64, no gradient.
    Now -0.5: free error 2.25 beats the clipped 1.44: half of 2.25, gradient -1.5."""
    now = torch.tensor([0.5, -0.5], dtype=torch.float64, requires_grad=True)
    zeros, ones = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    critic = clipped_value_loss(now, zeros, ones, torch.tensor([True, True]), clip_eps=0.2)
    (gradient,) = torch.autograd.grad(critic.losses.sum(), now)
    assert critic.losses.tolist() == pytest.approx([0.32, 1.125])
    assert gradient.tolist() == pytest.approx([0.0, -1.5])
    assert critic.is_clipped.tolist() == [True, False]


def test_kl_estimators() -> None:
    """p 0.5, q 0.25: ln 2; half its square; 0.5 - 1 + ln 2."""
    p, q, yes = log(0.5), log(0.25), torch.tensor([True])
    ln2 = math.log(2)
    assert kl_k1_nats(p, q, yes).item() == pytest.approx(ln2)
    assert kl_k2_nats(p, q, yes).item() == pytest.approx(ln2**2 / 2)
    assert kl_k3_nats(p, q, yes).item() == pytest.approx(ln2 - 0.5)


def test_kl_estimators_average_to_the_kl_under_p() -> None:
    """Two outcomes, p = (0.7, 0.3), q = (0.4, 0.6): KL = 0.7 ln 1.75 + 0.3 ln 0.5, for k1 and k3 exactly."""
    p, q, yes = log(0.7, 0.3), log(0.4, 0.6), torch.tensor([True, True])
    exact = 0.7 * math.log(1.75) + 0.3 * math.log(0.5)
    for estimate in (kl_k1_nats, kl_k3_nats):
        assert (p.exp() * estimate(p, q, yes)).sum().item() == pytest.approx(exact)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", (1 + 2 + 3 + 10) / 4),
        ("sequence_mean_token_mean", (2 + 10) / 2),
        ("sequence_mean_token_sum", (6 + 10) / 2),
        ("sequence_mean_token_sum_norm", (6 + 10) / (2 * 8)),
    ],
)
def test_aggregations(mode: str, expected: float) -> None:
    """Sequences [1,2,3,(masked 99)] and [10], token limit 8."""
    losses = torch.tensor([1.0, 2, 3, 99, 10])
    mask = torch.tensor([True, True, True, False, True])
    counts = LossCounts(num_loss_tokens=4, num_loss_sequences=2, max_response_tokens=8)
    got = aggregate(losses, mask, torch.tensor([0, 4, 5]), mode=mode, counts=counts)
    assert got.item() == pytest.approx(expected)
    assert mode in AGGREGATIONS


def tensors(now: Tensor, anchor: Tensor, **more: Tensor) -> PolicyTensors:
    n = len(now)
    yes = torch.ones(n, dtype=torch.bool)
    filled = {"advantages": torch.ones(n, dtype=torch.float64), "behavior_logprobs": anchor} | more
    return PolicyTensors(
        logprobs=now,
        proximal_logprobs=anchor,
        loss_mask=yes,
        action_mask=yes,
        cu_seqlens=torch.tensor([0, n]),
        **filled,
    )


def test_objective_adds_kl_and_subtracts_entropy() -> None:
    """One token, ratio 1.1, advantage 1: -1.1; k2 against reference 0.275: half of (ln 2)^2 x 0.1; entropy
    0.6 x 0.01."""
    config = AlgorithmConfig(
        name="grpo", kl={"placement": "loss", "estimator": "k2", "coef": 0.1}, entropy_coef=0.01
    )
    counts = LossCounts(num_loss_tokens=1, num_loss_sequences=1, max_response_tokens=4)
    loss, values = policy_objective(
        tensors(
            log(0.55),
            log(0.5),
            reference_logprobs=log(0.275),
            entropy_nats=torch.tensor([0.6], dtype=torch.float64),
        ),
        config,
        counts,
    )
    k2 = math.log(2) ** 2 / 2
    assert loss.item() == pytest.approx(-1.1 + 0.1 * k2 - 0.006)
    assert values["actor/kl_loss"].result() == pytest.approx(k2)
    assert values["actor/pg_loss"].result() == pytest.approx(-1.1)
    assert values["actor/entropy"].result() == pytest.approx(0.6)
    assert values["actor/ppo_kl"].result() == pytest.approx(-math.log(1.1))
    assert values["actor/ratio/mean"].result() == pytest.approx(1.1)


def test_bypass_reinforce_weighs_current_against_behavior() -> None:
    """proximal = behavior, loss reinforce, weights exp(current - behavior) = 3 truncated at 2, and 0.5: the
    gradient of the token mean is minus half of each."""
    config = AlgorithmConfig(
        name="grpo",
        loss="reinforce",
        proximal="behavior",
        aggregation="token_mean",
        correction={"level": "token", "upper": 2.0},
    )
    now = log(0.6, 0.2).requires_grad_()
    batch = tensors(now, log(0.2, 0.4))
    counts = LossCounts(num_loss_tokens=2, num_loss_sequences=1, max_response_tokens=4)
    loss, _ = policy_objective(batch, config, counts)
    (gradient,) = torch.autograd.grad(loss, now)
    assert gradient.tolist() == pytest.approx([-1.0, -0.25])


def test_bypass_weights_are_of_all_tokens_that_were_sampled() -> None:
    """Weights 3 and 1/2 are 3/2 for the sequence, also where a filter left only the first token in the loss."""
    config = AlgorithmConfig(
        name="grpo",
        loss="reinforce",
        proximal="behavior",
        aggregation="token_mean",
        correction={"level": "sequence", "upper": 2.0},
    )
    now = log(0.6, 0.2).requires_grad_()
    batch = replace(tensors(now, log(0.2, 0.4)), loss_mask=torch.tensor([True, False]))
    counts = LossCounts(num_loss_tokens=1, num_loss_sequences=1, max_response_tokens=4)
    loss, _ = policy_objective(batch, config, counts)
    (gradient,) = torch.autograd.grad(loss, now)
    assert gradient.tolist() == pytest.approx([-1.5, 0.0])


@pytest.mark.parametrize("name", LOSSES)
def test_advantages_and_weights_are_constants_of_every_loss(name: str) -> None:
    now, constant = log(0.5, 0.4).requires_grad_(), torch.ones(2, dtype=torch.float64, requires_grad=True)
    token = LOSSES[name](
        now,
        log(0.5, 0.4),
        constant * 2,
        torch.ones(2, dtype=torch.bool),
        importance_weights=constant * 3,
        cu_seqlens=torch.tensor([0, 2]),
        clip=PPO,
    )
    gradients = torch.autograd.grad(token.losses.sum(), (now, constant), allow_unused=True)
    assert gradients[0].tolist() == pytest.approx([-6.0, -6.0]) and gradients[1] is None


def test_bypass_clip_takes_its_ratio_against_behavior() -> None:
    """The proximal logprobs are not even read: ratio 0.6/0.5 = 1.2 against behavior."""
    config = AlgorithmConfig(name="grpo", proximal="behavior")
    batch = tensors(log(0.6), log(float("nan")), behavior_logprobs=log(0.5))
    counts = LossCounts(num_loss_tokens=1, num_loss_sequences=1, max_response_tokens=4)
    _, values = policy_objective(batch, config, counts)
    assert values["actor/ratio/mean"].result() == pytest.approx(1.2)


def test_value_objective_is_the_token_mean() -> None:
    """Half squared errors 0.5 and 2 over two tokens: 1.25; predictions 1 and 2 average 1.5."""
    config = AlgorithmConfig(name="ppo", value_clip_eps=0)
    batch = ValueTensors(
        values=torch.tensor([1.0, 2.0]),
        old_values=torch.zeros(2),
        returns=torch.zeros(2),
        loss_mask=torch.tensor([True, True]),
        cu_seqlens=torch.tensor([0, 2]),
    )
    counts = LossCounts(num_loss_tokens=2, num_loss_sequences=1, max_response_tokens=4)
    loss, values = value_objective(batch, config, counts)
    assert loss.item() == pytest.approx(1.25)
    assert values["critic/vpred_mean"].result() == 1.5
