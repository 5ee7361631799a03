"""BR-079: results do not depend on how a batch is split. And: gradients agree with finite differences."""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollbook.algos.advantage import group_mean_advantages, leave_one_out_advantages
from rollbook.algos.aggregate import AGGREGATIONS, LossCounts, aggregate, loss_counts
from rollbook.algos.config import AlgorithmConfig
from rollbook.algos.kl import KL_ESTIMATORS
from rollbook.algos.loss import LOSSES, Clip, clipped_value_loss
from rollbook.algos.policy import PolicyTensors, policy_objective
from rollbook.observe.values import Values, merge

LENGTHS = [1, 2, 3, 4, 5, 6]
LIMIT = 8
VOCABULARY = 7


class Batch:
    """Six sequences of 1 to 6 tokens under a tiny fp64 model: logits are rows of one matrix."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        n = sum(LENGTHS)
        self.features = torch.randn(n, 5, generator=draw, dtype=torch.float64)
        self.ids = torch.randint(VOCABULARY, (n,), generator=draw)
        self.weight = torch.randn(5, VOCABULARY, generator=draw, dtype=torch.float64).requires_grad_()
        noise = 0.3 * torch.randn(4, n, generator=draw, dtype=torch.float64)
        with torch.no_grad():
            now, _ = self.forward(torch.arange(n))
        self.proximal, self.behavior, self.reference = (now + noise[i] for i in range(3))
        self.importance_weights = noise[3].exp()
        self.advantages = torch.randn(n, generator=draw, dtype=torch.float64)
        self.loss_mask = torch.rand(n, generator=draw) < 0.7
        starts = [0, *itertools.accumulate(LENGTHS)]
        self.rows = [torch.arange(a, b) for a, b in itertools.pairwise(starts)]

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(self.features[rows] @ self.weight, -1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, self.ids[rows][:, None])[:, 0], entropy

    def tensors(self, members: list[int]) -> PolicyTensors:
        rows = torch.cat([self.rows[m] for m in members])
        lengths = torch.tensor([LENGTHS[m] for m in members])
        now, entropy = self.forward(rows)
        return PolicyTensors(
            logprobs=now,
            loss_mask=self.loss_mask[rows],
            action_mask=torch.ones(len(rows), dtype=torch.bool),
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            advantages=self.advantages[rows],
            behavior_logprobs=self.behavior[rows],
            proximal_logprobs=self.proximal[rows],
            reference_logprobs=self.reference[rows],
            importance_weights=self.importance_weights[rows],
            entropy_nats=entropy,
        )

    def counts(self) -> LossCounts:
        whole = self.tensors(list(range(6)))
        return loss_counts(whole.loss_mask, whole.cu_seqlens, max_response_tokens=LIMIT)


SPLITS = {
    "one": [[0, 1, 2, 3, 4, 5]],
    "two": [[0, 1], [2, 3, 4, 5]],
    "six": [[0], [1], [2], [3], [4], [5]],
    "shuffled": [[4, 0], [5], [3, 1, 2]],
}


def run(batch: Batch, config: AlgorithmConfig, split: list[list[int]]) -> tuple[float, Tensor, Values]:
    counts, total, values = batch.counts(), 0.0, Values()
    gradient = torch.zeros_like(batch.weight)
    for members in split:
        loss, more = policy_objective(batch.tensors(members), config, counts)
        gradient += torch.autograd.grad(loss, batch.weight)[0]
        total += loss.item()
        merge(values, more)
    return total, gradient, values


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_loss_gradient_and_metrics_do_not_depend_on_the_split(loss: str, mode: str) -> None:
    config = AlgorithmConfig.model_validate(
        {
            "loss": loss,
            "aggregation": mode,
            "entropy_coef": 0.01,
            "kl": {"placement": "loss", "estimator": "k3", "coef": 0.1},
            "correction": {"level": "token"},
        }
    )
    batch = Batch()
    whole_loss, whole_gradient, whole_values = run(batch, config, SPLITS["one"])
    assert whole_gradient.abs().max() > 1e-3
    for split in SPLITS.values():
        total, gradient, values = run(batch, config, split)
        assert total == pytest.approx(whole_loss, abs=1e-10)
        assert (gradient - whole_gradient).abs().max() < 1e-10
        for name, value in whole_values.items():
            assert values[name].result() == pytest.approx(value.result(), abs=1e-10), name
    assert whole_values["actor/loss"].result() == pytest.approx(whole_loss, abs=1e-10)


def test_two_micro_batches_of_unequal_size_give_the_token_mean() -> None:
    """BR-079 by hand: 6 tokens of loss 1 and 2 of loss 3 give 1.5; on ranks of 5 and 1 each token weighs 1/6."""
    whole = LossCounts(num_loss_tokens=8, num_loss_sequences=2, max_response_tokens=9)

    def share(losses: Tensor, counts: LossCounts) -> Tensor:
        mask = torch.ones(len(losses), dtype=torch.bool)
        return aggregate(losses, mask, torch.tensor([0, len(losses)]), mode="token_mean", counts=counts)

    assert (share(torch.ones(6), whole) + share(3 * torch.ones(2), whole)).item() == 1.5
    ranks = LossCounts(num_loss_tokens=6, num_loss_sequences=2, max_response_tokens=9)
    for size in (5, 1):
        losses = torch.ones(size, requires_grad=True)
        (weights,) = torch.autograd.grad(share(losses, ranks), losses)
        assert weights.tolist() == pytest.approx([1 / 6] * size)


def inputs(n: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    now = -torch.rand(n, generator=draw, dtype=torch.float64) - 0.1
    anchor = now + 0.6 * torch.rand(n, generator=draw, dtype=torch.float64) - 0.3
    return now.requires_grad_(), anchor, torch.randn(n, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("name", ["clip", "gspo", "reinforce"])
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_gradient_agrees_with_finite_differences(name: str, mode: str) -> None:
    """No advantage or ratio of this draw lies within 1e-3 of a kink, so central differences are exact enough."""
    now, anchor, advantages = inputs()
    mask, cu = torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.bool), torch.tensor([0, 2, 6])
    counts = loss_counts(mask, cu, max_response_tokens=LIMIT)

    def objective(logprobs: Tensor) -> Tensor:
        token = LOSSES[name](
            logprobs,
            anchor,
            advantages,
            mask,
            importance_weights=torch.full((6,), 1.3, dtype=torch.float64),
            cu_seqlens=cu,
            clip=Clip(eps_low=0.1, eps_high=0.15, dual=3.0 if name == "clip" else 0.0),
        )
        return aggregate(token.losses, mask, cu, mode=mode, counts=counts)

    assert torch.autograd.gradcheck(objective, (now,))


def test_cispo_gradient_is_that_of_its_frozen_weight() -> None:
    """The weight is a constant by definition: differences are taken with it held at its value."""
    now, anchor, advantages = inputs()
    mask, cu = torch.ones(6, dtype=torch.bool), torch.tensor([0, 6])
    token = LOSSES["cispo"](
        now,
        anchor,
        advantages,
        mask,
        importance_weights=torch.ones(6, dtype=torch.float64),
        cu_seqlens=cu,
        clip=Clip(eps_low=1.0, eps_high=0.1),
    )
    (gradient,) = torch.autograd.grad(token.losses.sum(), now)
    frozen = (now - anchor).exp().clamp(max=1.1).detach()
    h = 1e-6
    differences = [
        (((now + h * e) * -frozen * advantages).sum() - ((now - h * e) * -frozen * advantages).sum()).item()
        / (2 * h)
        for e in torch.eye(6, dtype=torch.float64)
    ]
    assert gradient.tolist() == pytest.approx(differences, abs=1e-8)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_gradient_agrees_with_finite_differences(name: str) -> None:
    now, anchor, _ = inputs()
    mask = torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.bool)
    assert torch.autograd.gradcheck(lambda x: KL_ESTIMATORS[name](x, anchor, mask), (now,))


def test_value_gradient_agrees_with_finite_differences() -> None:
    now, before, target = inputs()
    mask = torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.bool)
    assert torch.autograd.gradcheck(
        lambda x: clipped_value_loss(x, before, target, mask, clip_eps=0.1).losses, (now,)
    )


rewards_and_groups = st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 3)), min_size=1)


@given(rewards_and_groups)
@settings(max_examples=80, deadline=None)
def test_group_baselines_sum_to_zero_within_every_group(pairs: list[tuple[float, int]]) -> None:
    import numpy as np

    rewards, ids = np.array([r for r, _ in pairs]), np.array([g for _, g in pairs])
    for advantages in (
        group_mean_advantages(rewards, ids, divide_by_std=False),
        leave_one_out_advantages(rewards, ids),
    ):
        for group in set(ids.tolist()):
            assert abs(advantages[ids == group].sum()) < 1e-9
            if (ids == group).sum() == 1:
                assert advantages[ids == group].item() == 0.0


def test_policy_tensors_of_the_tests_name_every_field() -> None:
    """A field added to PolicyTensors must be split with the rest, or the split test proves less than it says."""
    given_here = {"teacher_logprobs"} | {
        f.name for f in fields(PolicyTensors) if getattr(Batch().tensors([0]), f.name) is not None
    }
    assert given_here == {f.name for f in fields(PolicyTensors)}
