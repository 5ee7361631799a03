"""Every metric that the algorithms report stands in the catalogue."""

from __future__ import annotations

import numpy as np
import torch

from rollbook.algos.advantage import estimate_advantages
from rollbook.algos.aggregate import loss_counts
from rollbook.algos.config import AlgorithmConfig
from rollbook.algos.correction import correct
from rollbook.algos.gap import logprob_gap
from rollbook.algos.policy import PolicyTensors, ValueTensors, policy_objective, value_objective
from rollbook.observe import catalogue
from rollbook.observe.values import Values
from rollbook.types import TrainSequence


def sequence(idx: int) -> TrainSequence:
    logprobs = np.linspace(-1.0, -0.3, 8, dtype=np.float32)
    mask = np.arange(8) >= 3
    return TrainSequence(
        group_id=idx // 2,
        member_idx=idx,
        source="test",
        token_ids=np.zeros(8, np.int32),
        action_mask=mask,
        loss_mask=mask.copy(),
        behavior_logprobs=logprobs,
        proximal_logprobs=logprobs * np.float32(0.9),
        values=logprobs,
        reward=float(idx),
        oldest_version=idx % 2,
        replica_id=idx,
    )


def test_every_reported_name_is_catalogued() -> None:
    batch = [sequence(idx) for idx in range(4)]
    reject = {"statistic": "token", "upper_nats": 1.0}
    config = AlgorithmConfig.model_validate(
        {
            "name": "ppo",
            "entropy_coef": 0.1,
            "kl": {"placement": "loss", "coef": 0.1},
            "distill": {"placement": "loss", "coef": 0.1},
            "correction": {"level": "token", "mode": "mask", "reject": reject},
        }
    )
    gap = logprob_gap(batch, staleness=lambda v: 1 - v, clip_eps_low=0.2, clip_eps_high=0.2)
    assert gap is not None
    values: Values = correct(batch, config.correction) | gap.values()
    values |= estimate_advantages(batch, config)
    mask = torch.from_numpy(np.concatenate([s.loss_mask for s in batch]))
    some, cu_seqlens = torch.full((32,), -0.5), torch.arange(0, 33, 8)
    counts = loss_counts(mask, cu_seqlens, max_response_tokens=8)
    policy = PolicyTensors(
        logprobs=some,
        loss_mask=mask,
        action_mask=mask,
        cu_seqlens=cu_seqlens,
        advantages=some,
        behavior_logprobs=some,
        proximal_logprobs=some,
        importance_weights=some,
        reference_logprobs=some,
        teacher_logprobs=some,
        entropy_nats=some,
    )
    critic = ValueTensors(values=some, old_values=some, returns=some, loss_mask=mask, cu_seqlens=cu_seqlens)
    values |= policy_objective(policy, config, counts)[1] | value_objective(critic, config, counts)[1]
    assert len(values) > 50
    assert [name for name in values if catalogue.lookup(name) is None] == []
