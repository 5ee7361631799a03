"""The losses by their papers' formulas on padded [B, R] rows, as most code writes them, against ours on packed tokens.

Values and gradients agree to the rounding of float64 for random batches of every loss, aggregation and term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from rollbook.algos.aggregate import AGGREGATIONS, loss_counts
from rollbook.algos.config import AlgorithmConfig
from rollbook.algos.policy import PolicyTensors, ValueTensors, policy_objective, value_objective

NUM_PROMPT = 2
LIMIT = 9
"""Longest response, and the limit that some denominators hold."""
LENGTHS = (9, 4, 7, 1, 9, 5)


@dataclass
class Rows:
    """[B, R] float64 each; what lies behind a response's end is noise that must not be read."""

    mask: Tensor
    now: Tensor
    old: Tensor
    reference: Tensor
    weights: Tensor
    entropy: Tensor
    advantages: Tensor


@pytest.fixture(params=range(3))
def rows(request: pytest.FixtureRequest) -> Rows:
    generator = torch.Generator().manual_seed(request.param)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(len(LENGTHS), LIMIT, generator=generator, dtype=torch.float64)

    old = -noise(1.0).abs()
    return Rows(
        mask=torch.arange(LIMIT)[None] < torch.tensor(LENGTHS)[:, None],
        now=(old + noise(0.4)).requires_grad_(),
        old=old,
        reference=old + noise(0.2),
        weights=noise(0.5).exp(),
        entropy=noise(1.0).abs(),
        advantages=noise(1.0)[:, :1].expand(-1, LIMIT).contiguous(),
    )


def packed(values: Tensor) -> Tensor:
    """[T]: each response behind its prompt."""
    prompt = values.new_zeros(NUM_PROMPT)
    return torch.cat([part for row, n in zip(values, LENGTHS) for part in (prompt, row[:n])])


CU_SEQLENS = torch.tensor(np.cumsum([0, *(n + NUM_PROMPT for n in LENGTHS)]), dtype=torch.int32)


def reduced(losses: Tensor, mask: Tensor, mode: str) -> Tensor:
    held = losses.where(mask, 0.0)
    by_definition: dict[str, Callable[[], Tensor]] = {
        "token_mean": lambda: held.sum() / mask.sum(),
        "sequence_mean_token_mean": lambda: (held.sum(1) / mask.sum(1)).mean(),
        "sequence_mean_token_sum": lambda: held.sum(1).mean(),
        "sequence_mean_token_sum_norm": lambda: held.sum(1).mean() / LIMIT,
    }
    return by_definition[mode]()


def clipped(rows: Rows, ratios: Tensor, low: float, high: float, dual: float = 0.0) -> Tensor:
    gains = rows.advantages
    losses = -torch.minimum(ratios * gains, ratios.clamp(1 - low, 1 + high) * gains)
    return torch.where(gains < 0, torch.minimum(losses, -dual * gains), losses) if dual else losses


def token_ratios(rows: Rows) -> Tensor:
    return (rows.now - rows.old).exp()


def sequence_ratios(rows: Rows) -> Tensor:
    """The geometric mean over the response for all its tokens."""
    logs = (rows.now - rows.old).where(rows.mask, 0.0)
    return (logs.sum(1) / rows.mask.sum(1)).exp()[:, None].expand(-1, LIMIT)


def k3(rows: Rows) -> Tensor:
    logs = rows.reference - rows.now
    return logs.exp() - logs - 1


LOSSES: dict[str, tuple[AlgorithmConfig, Callable[[Rows], Tensor]]] = {
    "clip higher": (
        AlgorithmConfig(clip_eps_high=0.28),
        lambda rows: clipped(rows, token_ratios(rows), 0.2, 0.28),
    ),
    "dual clip": (
        AlgorithmConfig(dual_clip=1.2),
        lambda rows: clipped(rows, token_ratios(rows), 0.2, 0.2, 1.2),
    ),
    "decoupled": (
        AlgorithmConfig.model_validate({"correction": {"level": "token", "upper": 9.0}}),
        lambda rows: rows.weights * clipped(rows, token_ratios(rows), 0.2, 0.2),
    ),
    "gspo": (
        AlgorithmConfig(loss="gspo", clip_eps_low=0.05, clip_eps_high=0.05),
        lambda rows: clipped(rows, sequence_ratios(rows), 0.05, 0.05),
    ),
    "cispo": (
        AlgorithmConfig(loss="cispo", clip_eps_low=1.0, clip_eps_high=0.3),
        lambda rows: -token_ratios(rows).detach().clamp(max=1.3) * rows.advantages * rows.now,
    ),
    "kl and entropy": (
        AlgorithmConfig.model_validate({"entropy_coef": 0.01, "kl": {"placement": "loss", "coef": 0.1}}),
        lambda rows: clipped(rows, token_ratios(rows), 0.2, 0.2) + 0.1 * k3(rows) - 0.01 * rows.entropy,
    ),
}


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_policy_loss_is_its_formula_on_padded_rows(name: str, mode: str, rows: Rows) -> None:
    config, formula = LOSSES[name]
    mask = packed(rows.mask.double()).bool()
    ours, _ = policy_objective(
        PolicyTensors(
            logprobs=packed(rows.now),
            loss_mask=mask,
            action_mask=mask,
            cu_seqlens=CU_SEQLENS,
            advantages=packed(rows.advantages),
            behavior_logprobs=packed(rows.old),
            proximal_logprobs=packed(rows.old),
            importance_weights=packed(rows.weights),
            reference_logprobs=packed(rows.reference),
            entropy_nats=packed(rows.entropy),
        ),
        config.model_copy(update={"aggregation": mode}),
        loss_counts(mask, CU_SEQLENS, max_response_tokens=LIMIT),
    )
    assert_same(ours, reduced(formula(rows), rows.mask, mode), rows.now)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_critics_loss_is_its_formula_on_padded_rows(mode: str, rows: Rows) -> None:
    values, before, returns = rows.now, rows.old, rows.reference
    near = torch.maximum(torch.minimum(values, before + 0.2), before - 0.2)
    formula = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    mask = packed(rows.mask.double()).bool()
    ours, _ = value_objective(
        ValueTensors(
            values=packed(values),
            old_values=packed(before),
            returns=packed(returns),
            loss_mask=mask,
            cu_seqlens=CU_SEQLENS,
        ),
        AlgorithmConfig(name="ppo", value_clip_eps=0.2).model_copy(update={"aggregation": mode}),
        loss_counts(mask, CU_SEQLENS, max_response_tokens=LIMIT),
    )
    assert_same(ours, reduced(formula, rows.mask, mode), values)


def assert_same(ours: Tensor, theirs: Tensor, of: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    (one,), (other,) = (torch.autograd.grad(loss, of) for loss in (ours, theirs))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert one.abs().sum() > 0
